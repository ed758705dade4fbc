"""Whole short trainings with random settings: cores, spaces, critics, resets, autoreset modes, sizes and engines.

    python tests/whole_runs.py --count 200 --seed 1

Each run must keep law 1 in every update (the replay gap is at most the tolerance), write finite losses, continue from its
checkpoint as if it had never stopped, and be loaded, shared, exported and deployed with the numbers it was trained to. What
its rollouts recorded is worked out a second time, one environment at a time (`reference_rollout.py`), and every third run
is trained once more without C. Run number n of a seed is always the same one.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array
from torch import nn

import holdfast as hf
from holdfast.cores.named import CORES, make_core
from holdfast.envs import WorkersVectorEnv
from holdfast.runs.record import read_progress
from holdfast.training import replay_check
from reference_rollout import ReferenceRollout
from tables import InfoMaskedTable, MaskedTable, Table, Tables

UPDATES, SAVED_AFTER = 4, 2
RESETS = np.array([[True, True], [False, False], [False, True], [True, False], [False, False], [False, False]])
"""Of two environments with a policy in use."""
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


class Own(hf.RecurrentPolicy):
    """A policy of the user's own, for vectors and one head of three actions."""

    def __init__(self, core: str, hidden_size: int, reset: str) -> None:
        super().__init__(core=make_core(core, 3, hidden_size, 1, reset))
        self.outputs = nn.Linear(self.core.output_size, 4)

    def encode(self, obs: Any) -> torch.Tensor:
        return torch.tanh(obs)

    def decode(self, features: torch.Tensor, action_mask: Any = None) -> tuple[Any, torch.Tensor]:
        logits, value = self.outputs(features).split((3, 1), -1)
        if action_mask is not None:
            logits = logits.masked_fill(~action_mask, -1e9)
        return torch.distributions.Categorical(logits=logits), value


def make_table(what: dict[str, Any], number: int) -> Table:
    number = 0 if what["copies"] else number
    kind = (InfoMaskedTable if what["masks_in_info"] else MaskedTable) if what["masks"] else Table
    return kind(
        OBSERVATIONS[what["observations"]], ACTIONS[what["actions"]], what["table"], number, masks=what["masks"]
    )


def make_env(what: dict[str, Any]) -> Any:
    makers = [partial(make_table, what, number) for number in range(what["settings"]["num_envs"])]
    if what["copies"]:  # made by the trainer
        return lambda: make_table(what, 0)
    if what["workers"]:
        return WorkersVectorEnv(makers, min(2, len(makers)), AutoresetMode[what["mode"]])
    return Tables(makers, what["mode"])


def make_policy(what: dict[str, Any]) -> Own | None:
    if not what["own_policy"]:
        return None
    torch.manual_seed(what["table"])
    settings = what["settings"]
    return Own(settings["core"], settings["hidden_size"], settings["reset"])


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
    # Drawn last, so that what stands above is what it was before these were there.
    what["workers"] = draw.random() < 0.15
    what["exported"] = pick(("", "", "", "", "", "pt2", "onnx"))
    what["masks"] = not isinstance(ACTIONS[actions], spaces.Box) and draw.random() < 0.5
    if draw.random() < 0.1:  # a core of the user's own
        settings.update(core="accumulator:ProjectedAccumulator", num_layers=1, reset="zero", memory_span=None)
    what["own_policy"] = draw.random() < 0.1
    if what["own_policy"]:
        what.update(observations="vector", actions="discrete", exported="")
        keep = (
            "core",
            "hidden_size",
            "reset",
            "num_envs",
            "num_steps",
            "bptt",
            "epochs",
            "minibatches",
            "refresh_states",
        )
        settings = {name: settings[name] for name in keep} | dict(inputs=(), gamma=0.9, seed=settings["seed"])
    what["masks_in_info"] = what["masks"] and draw.random() < 0.5
    what["copies"] = pick(("sync", "async", "workers")) if draw.random() < 0.15 else ""
    if what["copies"]:
        what.update(workers=False, mode="SAME_STEP")
        settings["vectorization"] = what["copies"]
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
        reference = ReferenceRollout(partial(make_table, what), what["settings"], what["mode"])
        config = hf.TrainConfig(**settings)
        trainer = hf.Trainer(config, env=make_env(what), policy=make_policy(what), callbacks=[reference])
        trainer.run()
        rows = record(folder / "whole")
        problem = _law_1(rows) or reference.problem
        if reference.compared < UPDATES:
            problem = problem or f"{reference.compared} rollouts in place of {UPDATES}"
        problem = problem or _resumed(what, settings, rows, folder) or _deployed(trainer.policy, what, folder)
        return problem or _without_c(what, settings, trainer.policy, folder)
    finally:
        os.environ.pop("HOLDFAST_CPU_KERNEL") if before is None else os.environ.update(HOLDFAST_CPU_KERNEL=before)


def _resumed(what: dict[str, Any], settings: dict[str, Any], rows: list[dict[str, str]], folder: Path) -> str:
    """Stopped after a checkpoint, or as a SIGKILL after it leaves a run: its checkpoint, with what came later there too."""
    half = hf.TrainConfig(**{**settings, "run_dir": str(folder / "half")})
    if what["table"] % 2:
        shutil.copytree(folder / "whole", folder / "half")
        for late in (folder / "half" / "checkpoints").glob(f"update_*{UPDATES}.pt"):
            late.unlink()
    else:
        hf.Trainer(half, env=make_env(what), policy=make_policy(what), callbacks=[Stop(SAVED_AFTER)]).run()
    hf.Trainer.resume(folder / "half", env=make_env(what), policy=make_policy(what)).run()
    again = record(folder / "half")
    if what["workers"] or what["copies"]:  # they cannot save their state: episodes restart
        return _law_1(again)
    return f"resumed, it writes another record: {_first_difference(rows, again)}" if again != rows else ""


def _without_c(what: dict[str, Any], settings: dict[str, Any], policy: Any, folder: Path) -> str:
    """Where C rolled out and updated, the same run through autograd ends with the same weights."""
    if what["kernel"] == "portable" or what["own_policy"] or settings["target_kl"] or what["table"] % 3:
        return ""
    os.environ["HOLDFAST_CPU_KERNEL"] = "portable"
    trainer = hf.Trainer(hf.TrainConfig(**{**settings, "run_dir": str(folder / "slow")}), env=make_env(what))
    trainer.run()
    for (name, ours), theirs in zip(policy.named_parameters(), trainer.policy.parameters()):
        far, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
        if not far <= 5e-3 * (1e-3 + largest):
            return f"with autograd {name} differs by {far}, and its largest number is {largest}"
    return ""


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


def _deployed(policy: Any, what: dict[str, Any], folder: Path) -> str:
    """The checkpoint and the shared folder hold the same policy, and no row of a batch depends on another."""
    space = OBSERVATIONS[what["observations"]] if what["own_policy"] else policy.observation_space
    space.seed(1)
    seen = [concatenate(space, [space.sample(), space.sample()], create_empty_array(space, 2)) for _ in range(6)]
    expected = _actions(policy, seen)
    alone = [_actions(policy, [_row(obs, row) for obs in seen], RESETS[:, row : row + 1]) for row in range(2)]
    if not np.allclose(expected, np.concatenate(alone, 1), atol=1e-5):
        return "a row of a batch acts differently when it is alone"
    if what["own_policy"]:
        return ""
    shared = [hf.save_pretrained(policy, folder / "shared")] if what["table"] % 4 == 0 else []  # draws its curve
    for source in (folder / "whole", *shared):
        if not np.array_equal(expected, _actions(hf.load(source), seen)):
            return f"loaded from {source.name} it acts differently"
    if what["exported"] and not what["masks"]:
        file = hf.export_policy(policy, folder / f"policy.{what['exported']}").path
        runner, keys = hf.Runner(file), what["settings"].get("actor_obs")
        obs = [{key: o[key] for key in keys} if keys else o for o in seen]
        acted = [runner.act(o, resets=r, env_ids=[0, 1]).raw_action for o, r in zip(obs, RESETS)]
        if not np.allclose(expected, np.stack(acted), atol=1e-4):
            return f"exported to {what['exported']} it acts differently"
    return ""


def _row(tree: Any, row: int) -> Any:
    if isinstance(tree, dict):
        return {name: _row(leaf, row) for name, leaf in tree.items()}
    return tuple(_row(leaf, row) for leaf in tree) if isinstance(tree, tuple) else tree[row : row + 1]


def _actions(policy: Any, seen: list[Any], resets: Any = None) -> np.ndarray[Any, Any]:
    """The most likely actions, [T, B, ...]."""
    state, found = None, []
    for obs, first in zip(seen, RESETS if resets is None else resets):
        action, state = policy.predict(obs, state, episode_start=first, deterministic=True)
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
