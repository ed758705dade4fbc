"""Whole short trainings with random settings: cores, spaces, critics, resets, autoreset modes, sizes and engines.

    python tests/whole_runs.py --count 200 --seed 1

Each run must keep law 1 in every update (the replay gap is at most the tolerance), write finite losses, continue from its
checkpoint as if it had never stopped, and be loaded, shared and deployed with the numbers it was trained to. Run number n of
a seed is always the same one.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

import holdfast as hf
from holdfast.cores.named import CORES
from holdfast.runs.record import read_progress
from holdfast.training import replay_check

UPDATES, SAVED_AFTER = 4, 2
ANY = spaces.Box(-np.inf, np.inf, (3,), np.float32)
OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "vector": ANY,
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "half-bounded": spaces.Box(np.array([0, -np.inf], np.float32), np.array([np.inf, 5], np.float32)),
    "float64": spaces.Box(-1, 1, (2, 2), np.float64),
    "integers": spaces.Box(-3, 1000, (2,), np.int64),
    "image": spaces.Box(0, 255, (20, 20, 3), np.uint8),
    "bytes": spaces.Box(0, 255, (4,), np.uint8),
    "booleans": spaces.Box(0, 1, (3,), bool),
    "discrete": spaces.Discrete(5, start=-2),
    "one value": spaces.Discrete(1),
    "counts": spaces.MultiDiscrete([2, 3, 1]),
    "bits": spaces.MultiBinary((2, 2)),
    "nested": spaces.Dict(
        {
            "a": ANY,
            "b": spaces.Tuple(
                [spaces.Discrete(3, start=1), spaces.Tuple([spaces.MultiBinary(2), spaces.Box(0, 1, ())])]
            ),
        }
    ),
    "for the critic": spaces.Dict({"seen": ANY, "hidden": spaces.Box(-1, 1, (2,), np.float32)}),
}
ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(3),
    "discrete from 2": spaces.Discrete(3, start=2),
    "one action": spaces.Discrete(1),
    "heads": spaces.MultiDiscrete([2, 3]),
    "bits": spaces.MultiBinary(3),
    "box": spaces.Box(-1, np.array([1, 2], np.float32)),
    "scalar box": spaces.Box(-2, 2, (), np.float32),
    "unbounded box": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "matrix box": spaces.Box(-1, 1, (2, 2), np.float64),
}


class Table(gym.Env[Any, Any]):
    """Observations, rewards and ends in an order that is drawn once, so that a position in it is all there is to save."""

    def __init__(self, observation_space: Any, action_space: Any, seed: int, number: int) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        observation_space.seed(seed)
        self.rows = [observation_space.sample() for _ in range(31)]
        draw = random.Random(seed)
        self.ends = [draw.choice(("", "", "", "terminated", "truncated", "both")) for _ in range(37)]
        self.rewards = [draw.gauss(0, 1) for _ in range(41)]
        self.at = 5 * number

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at += 1
        return self.rows[self.at % 31], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.at += 1
        end = self.ends[self.at % 37]
        ends = end in ("terminated", "both"), end in ("truncated", "both")
        return self.rows[self.at % 31], self.rewards[self.at % 41], *ends, {}


class Tables(SyncVectorEnv):
    """Tables that can save their state."""

    def __init__(self, what: dict[str, Any]) -> None:
        pair = OBSERVATIONS[what["observations"]], ACTIONS[what["actions"]]
        makers = [lambda i=i: Table(*pair, what["table"], i) for i in range(what["settings"]["num_envs"])]
        super().__init__(makers, autoreset_mode=AutoresetMode[what["mode"]])

    def state_dict(self) -> dict[str, Any]:
        return {"at": [env.at for env in self.envs], "due": self._autoreset_envs.tolist()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for env, at in zip(self.envs, saved["at"]):
            env.at = at
        self._autoreset_envs = np.array(saved["due"])


def draw_run(seed: int, number: int) -> dict[str, Any]:
    """Everything about run `number` of a seed, as plain data."""
    draw = random.Random(f"{seed}/{number}")
    pick = draw.choice
    core = pick([*CORES, *CORES, "none"])
    num_envs, bptt, chunks = pick((1, 2, 3, 5)), pick((1, 2, 3, 7)), pick((1, 1, 2, 3))
    critic = pick(("shared", "separate", "none"))
    observations = pick(list(OBSERVATIONS))
    settings: dict[str, Any] = dict(
        core=core, hidden_size=pick((1, 4, 8)) if core not in ("mlstm", "window") else pick((4, 8)),
        num_layers=pick((1, 1, 2)), critic_core=critic,
        reset=pick(("zero", "never") if core == "window" else ("zero", "zero", "learned", "detach", "never")),
        memory_span=pick((None, None, 2, 5, 40)), num_envs=num_envs, num_steps=bptt * chunks,
        bptt=pick((None, bptt)) if chunks > 1 else None, encoder_sizes=pick((None, None, (), (3, 5))),
        head_sizes=pick(((), (), (4,))), activation=pick(("tanh", "relu", "silu")),
        inputs=pick(((), (), ("obs", "prev_action"), ("obs", "prev_action", "prev_reward"))), epochs=pick((1, 2)),
        clip_schedule=pick(("constant", "linear")), entropy_schedule=pick(("constant", "linear")),
        lr_schedule=pick(("constant", "linear", "cosine")), clip_value=pick((None, 0.2)), target_kl=pick((None, 0.01)),
        normalize_obs=pick((True, False)), normalize_value=pick((True, False)), normalize_reward=pick((True, False)),
        squash_actions=pick((False, False, True)), noise_correlation=pick((0.0, 0.9)), gamma=pick((0.0, 0.9, 1.0)),
        refresh_states=pick((False, True)), seed=draw.randrange(10**6),
    )  # fmt: skip
    sequences = num_envs * (chunks if settings["bptt"] else 1)
    settings["minibatches"] = draw.randrange(1, sequences + 1)
    if observations == "for the critic":
        settings.update(actor_obs=("seen",), critic_obs=pick((("hidden",), ("seen", "hidden"))), inputs=())
    mode = pick([mode.name for mode in AutoresetMode])
    kernel = pick(("auto", "auto", "portable"))
    actions = pick(list(ACTIONS))
    if settings["squash_actions"] and actions == "unbounded box":
        settings["squash_actions"] = False
    what = dict(observations=observations, actions=actions, mode=mode, kernel=kernel, table=draw.randrange(999))
    return {**what, "settings": settings}


class Stop(hf.Callback):
    """Ends a run after an update, as Ctrl-C would."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> bool:
        return trainer.update < self.after


def play(what: dict[str, Any], folder: Path) -> str:
    """ "" if everything about a run is as promised, otherwise what is not."""
    settings = dict(
        **what["settings"], env="tables", device="cpu", threads=1, tensorboard=False, quiet=True, final_eval_episodes=1,
        checkpoint_every=SAVED_AFTER, replay_check_every=1, run_dir=str(folder / "whole"),
    )  # fmt: skip
    settings["total_steps"] = UPDATES * settings["num_envs"] * settings["num_steps"]
    before = os.environ.get("HOLDFAST_CPU_KERNEL")
    os.environ["HOLDFAST_CPU_KERNEL"] = what["kernel"]
    try:
        trainer = hf.Trainer(hf.TrainConfig(**settings), env=Tables(what))
        trainer.run()
        rows = record(folder / "whole")
        problem = _law_1(rows)
        half = hf.TrainConfig(**{**settings, "run_dir": str(folder / "half")})
        hf.Trainer(half, env=Tables(what), callbacks=[Stop(SAVED_AFTER)]).run()
        hf.Trainer.resume(folder / "half", env=Tables(what)).run()
        if record(folder / "half") != rows:
            problem = (
                problem or f"resumed, it writes another record: {_first_difference(rows, record(folder / 'half'))}"
            )
        return problem or _deployed(trainer.policy, folder)
    finally:
        os.environ.pop("HOLDFAST_CPU_KERNEL") if before is None else os.environ.update(HOLDFAST_CPU_KERNEL=before)


def record(run: Path) -> list[dict[str, str]]:
    """The rows without the columns that measure time."""
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_progress(run)]


def _law_1(rows: list[dict[str, str]]) -> str:
    if len(rows) < UPDATES:
        return f"{len(rows)} rows in place of {UPDATES}"
    allowed = replay_check.tolerance(torch.device("cpu"), False)
    for row in rows:
        gap, losses = float(row["memory/replay_gap"]), [float(v) for k, v in row.items() if k.startswith("train/loss")]
        if not gap <= allowed:
            return f"the replay gap is {gap} in update {row['update']}"
        if not all(map(math.isfinite, losses)):
            return f"losses {losses} in update {row['update']}"
    return ""


def _first_difference(rows: list[dict[str, str]], others: list[dict[str, str]]) -> str:
    if len(rows) != len(others):
        return f"{len(rows)} rows, then {len(others)}"
    pairs = ((a, b, name) for a, b in zip(rows, others) for name in a if a[name] != b[name])
    return next(f"update {a['update']}, {name}: {a[name]}, then {b[name]}" for a, b, name in pairs)


def _deployed(policy: Any, folder: Path) -> str:
    """The checkpoint and the shared folder hold the same policy, and a row acts as it does alone."""
    space = policy.observation_space
    space.seed(1)
    seen = [concatenate(space, [space.sample(), space.sample()], create_empty_array(space, 2)) for _ in range(3)]
    expected = _actions(policy, seen)
    for source in (folder / "whole", hf.save_pretrained(policy, folder / "shared")):
        if not np.array_equal(expected, _actions(hf.load(source), seen)):
            return f"loaded from {source.name} it acts differently"
    alone = [_actions(policy, [_row(obs, row) for obs in seen]) for row in range(2)]
    if not np.allclose(expected, np.concatenate(alone, 1), atol=1e-5):
        return "a row of a batch acts differently when it is alone"
    return ""


def _row(tree: Any, row: int) -> Any:
    if isinstance(tree, dict):
        return {name: _row(leaf, row) for name, leaf in tree.items()}
    return tuple(_row(leaf, row) for leaf in tree) if isinstance(tree, tuple) else tree[row : row + 1]


def _actions(policy: Any, seen: list[Any]) -> np.ndarray[Any, Any]:
    """The most likely actions, [T, B, ...]."""
    state, found = None, []
    for obs in seen:
        action, state = policy.predict(obs, state, deterministic=True)
        found.append(np.asarray(action))
    return np.stack(found)


def hunt(seed: int, numbers: Iterator[int] | range, until: float = math.inf) -> Iterator[str]:
    """Play runs: "" for each that went as promised, otherwise what happened."""
    for number in numbers:
        what = draw_run(seed, number)
        with tempfile.TemporaryDirectory() as folder:
            try:
                problem = play(what, Path(folder))
            except Exception:
                problem = traceback.format_exc().strip()
        yield problem and f"run {number} of seed {seed}: {problem}\n    {what}"
        if time.monotonic() > until:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="runs to play")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=1, help="which runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    failures = []
    for problem in hunt(options.seed, range(options.first, options.first + options.count)):
        if problem:
            failures.append(problem)
            print(problem, flush=True)
    print(f"{options.count} runs of seed {options.seed}, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
