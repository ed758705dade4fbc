"""Gradient steps per second of SAC and R2D2: a sample of the buffer and all that is learned from it.

    python benchmarks/off_policy.py                                  # on one CPU thread: defaults, and how they grow
    python benchmarks/off_policy.py --device cuda
    python benchmarks/off_policy.py --problems "sac 8 x 64" --contenders holdfast skrl

Rows of a task of HalfCheetah's size with positions only: 8 numbers in, 6 actions (SAC; R2D2: one of 4), an encoder of one layer, a
GRU for the actor and one for the critics (R2D2: one), `--episode` steps per episode. SAC's two critics have heads of 128-128 on a CPU,
256-256 on a GPU. The contenders take turns; a cell is the median over turns, in CPU-seconds on a CPU.

holdfast      our page with hf.GRU
torch.nn.GRU  the same page with torch.nn.GRU, called for each stretch between two resets of any sequence
skrl          skrl's SAC_RNN (pip install skrl==2.1.1) with the same layers. Its two critics have a GRU each, which begins at the
              actor's stored state, because it knows no other
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from gymnasium import spaces
from this_commit import this_commit
from torch import Tensor, nn

import holdfast as hf
from holdfast.algorithms.base import RunContext
from holdfast.algorithms.off_policy import OffPolicy
from holdfast.algorithms.r2d2 import R2D2
from holdfast.algorithms.sac import SAC
from holdfast.cores import Core
from holdfast.distributed.ranks import ALONE
from holdfast.engines.choose import Engines
from holdfast.rollout.segment import Segment
from holdfast.state import RowShape, State

RESULTS = Path(__file__).parent / "results" / "off_policy.json"
NUM_ENVS, SEGMENT, SEGMENTS = 4, 32, 100
OBS, BOX, CHOICES = spaces.Box(-1, 1, (8,)), spaces.Box(-1, 1, (6,)), spaces.Discrete(4)


@dataclass(frozen=True)
class Problem:
    """One row of the table. head: the width of both layers of a head."""

    algorithm: str = "sac"
    batch: int = 8
    length: int = 64
    burn_in: int = 0
    hidden: int = 128
    head: int = 128

    def __str__(self) -> str:
        burn_in = f"{self.burn_in} + " if self.burn_in else ""
        sizes = "" if self.hidden == 128 else f", hidden {self.hidden}"
        return f"{self.algorithm} {self.batch} x {burn_in}{self.length}{sizes}"


def problems(device: str) -> list[Problem]:
    base = Problem(batch=32, head=256) if device == "cuda" else Problem()
    sac = [base, *(replace(base, batch=base.batch * n) for n in (2, 4, 8))]
    sac += [replace(base, length=n) for n in (16, 32, 128)] + [replace(base, hidden=n) for n in (64, 256)]
    return [*sac, *(Problem("r2d2", batch, 32, 32, head=base.head) for batch in (8, 32, 128))]


# --- the page ---------------------------------------------------------------------------------------------------------


class LoopedGRU(Core):
    """torch.nn.GRU under our reset rule, as one writes it by hand: a call for each stretch in which nothing resets."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, *, reset: str = "zero") -> None:
        super().__init__()
        assert num_layers == 1 and reset == "zero"
        self.input_size, self.output_size = input_size, hidden_size
        self.gru = nn.GRU(input_size, hidden_size)

    def row_shapes(self) -> State:
        return {"h": RowShape((1, self.output_size))}

    def _step(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        y, state = self._sequence(x.unsqueeze(0), state, None if resets is None else resets.unsqueeze(0))
        return y.squeeze(0), state

    def _sequence(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        h, ys = state["h"].transpose(0, 1).contiguous(), []
        starts = [] if resets is None else resets.any(1).nonzero().flatten().tolist()
        edges = sorted({0, *starts, len(x)})
        for begin, end in itertools.pairwise(edges):
            if resets is not None:
                h = h.masked_fill(resets[begin].view(1, -1, 1), 0.0)
            y, h = self.gru(x[begin:end], h)
            ys.append(y)
        return torch.cat(ys), {"h": h.transpose(0, 1)}


def algorithm_of(problem: Problem, device: torch.device, core: Any) -> OffPolicy:
    torch.manual_seed(1)
    kind, make, actions = (SAC, hf.SACConfig, BOX) if problem.algorithm == "sac" else (R2D2, hf.R2D2Config, CHOICES)
    config = make(
        core=core, hidden_size=problem.hidden, head_sizes=(2 if kind is SAC else 1) * (problem.head,), num_envs=NUM_ENVS,
        batch_size=problem.batch, train_length=problem.length, burn_in=problem.burn_in, device=device.type, buffer_size=100_000,
    )  # fmt: skip
    policy = kind.make_policy(config, OBS, actions).to(device)
    return kind(policy, config, RunContext(ALONE, device, 1, Engines(config, device), NUM_ENVS, actions))


def rows(policy: Any, episode: int, device: torch.device) -> list[Segment]:
    """Random segments in a row; each environment ends an episode at a random step once in `episode`."""
    random, made, ended = torch.Generator().manual_seed(1), [], torch.ones(NUM_ENVS, dtype=torch.bool)
    for _ in range(SEGMENTS):
        T, B = SEGMENT, NUM_ENVS
        terminated = torch.rand(T, B, generator=random) < 1 / episode
        actions = torch.rand(T, B, 6, generator=random) * 2 - 1
        if isinstance(policy.action_space, spaces.Discrete):
            actions = torch.randint(4, (T, B), generator=random)
        none = torch.zeros(T, B, dtype=torch.bool)
        segment = Segment(
            obs=torch.randn(T, B, 8, generator=random), actions=actions, resets=torch.cat([ended[None], terminated[:-1]]),
            rewards=torch.randn(T, B, generator=random), terminated=terminated, truncated=none, valid=~none,
            start_state={}, final_obs=None,
        )  # fmt: skip
        made.append(segment.to(device).changed(start_state=policy.initial_state(B)))
        ended = terminated[-1]
    return made


def our_step(problem: Problem, device: torch.device, episode: int, core: Any) -> Callable[[], Any]:
    algorithm = algorithm_of(problem, device, core)
    with torch.no_grad():
        for segment in rows(algorithm.policy, episode, device):
            algorithm.buffer.add(segment)
    config = algorithm.config

    def step() -> None:
        algorithm.learn(algorithm.buffer.sample(config.batch_size, config.train_length, config.burn_in))
        algorithm.gradient_steps += 1

    return step


# --- skrl -------------------------------------------------------------------------------------------------------------


def skrl_step(problem: Problem, device: torch.device, episode: int) -> Callable[[], Any]:
    """An `update` of skrl's SAC_RNN on a memory filled with rows like ours."""
    from skrl.agents.torch.sac import SAC_CFG, SAC_RNN
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import DeterministicMixin, GaussianMixin, Model

    hidden, head, length = problem.hidden, problem.head, problem.length

    class Recurrent(Model):  # type: ignore[misc]
        """Encoder, GRU called for each stretch between two ends of episodes, and a head that reads both as ours does."""

        def build(self, more: int, outputs: int) -> None:
            self.trunk, self.gru = (
                nn.Sequential(nn.Linear(8, hidden), nn.ReLU()),
                nn.GRU(hidden, hidden, batch_first=True),
            )
            sizes = [2 * hidden + more, head, head]
            layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
            self.head = nn.Sequential(*layers, nn.Linear(head, outputs))

        def get_specification(self) -> dict[str, Any]:
            return {"rnn": {"sequence_length": length, "sizes": [(1, NUM_ENVS, hidden)]}}

        def remembered(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
            x = self.trunk(inputs["observations"])
            sequences = x.view(-1, length, hidden)
            h = inputs["rnn"][0].view(1, -1, length, hidden)[:, :, 0].contiguous()
            ends = (inputs["terminated"] | inputs["truncated"]).view(-1, length)
            after = ends[:, :-1].any(0).nonzero().flatten() + 1
            edges, ys = [0, *after.tolist(), length], []
            for begin, end in itertools.pairwise(edges):
                if begin:
                    h = h.masked_fill(ends[:, begin - 1].view(1, -1, 1), 0.0)
                y, h = self.gru(sequences[:, begin:end], h)
                ys.append(y)
            return torch.cat([torch.cat(ys, 1).flatten(0, 1), x], 1), h

    class Actor(GaussianMixin, Recurrent):  # type: ignore[misc]
        def __init__(self) -> None:
            Model.__init__(self, observation_space=OBS, state_space=None, action_space=BOX, device=device)
            GaussianMixin.__init__(self, clip_actions=True, clip_log_std=True, min_log_std=-5, max_log_std=2)
            self.build(0, 12)

        def compute(self, inputs: dict[str, Any], role: str = "") -> Any:
            features, h = self.remembered(inputs)
            mean, log_std = self.head(features).chunk(2, -1)
            return torch.tanh(mean), {"log_std": log_std, "rnn": [h]}

    class Critic(DeterministicMixin, Recurrent):  # type: ignore[misc]
        def __init__(self) -> None:
            Model.__init__(self, observation_space=OBS, state_space=None, action_space=BOX, device=device)
            DeterministicMixin.__init__(self)
            self.build(6, 1)

        def compute(self, inputs: dict[str, Any], role: str = "") -> Any:
            features, h = self.remembered(inputs)
            return self.head(torch.cat([features, inputs["taken_actions"]], 1)), {"rnn": [h]}

    torch.manual_seed(1)
    names = ("critic_1", "critic_2", "target_critic_1", "target_critic_2")
    models = {"policy": Actor().to(device), **{name: Critic().to(device) for name in names}}
    memory = RandomMemory(memory_size=SEGMENTS * SEGMENT, num_envs=NUM_ENVS, device=device)
    config = SAC_CFG(batch_size=problem.batch, learning_rate=3e-4, grad_norm_clip=1.0)
    config.experiment.write_interval = config.experiment.checkpoint_interval = 0
    agent = SAC_RNN(
        models=models,
        memory=memory,
        observation_space=OBS,
        state_space=None,
        action_space=BOX,
        device=device,
        cfg=config,
    )
    agent.init()
    agent.enable_models_training_mode(True)
    for segment in rows(hf.SoftActorCritic(OBS, BOX, hidden_size=8, head_sizes=(8,)).to(device), episode, device):
        for t in range(SEGMENT):
            flags = {name: getattr(segment, name)[t].unsqueeze(1) for name in ("terminated", "truncated")}
            memory.add_samples(
                observations=segment.obs[t], next_observations=segment.obs[(t + 1) % SEGMENT], actions=segment.actions[t],
                rewards=segment.rewards[t].unsqueeze(1), **flags, rnn_policy_0=torch.zeros(NUM_ENVS, 1, hidden, device=device),
            )  # fmt: skip
    return lambda: agent.update(timestep=1, timesteps=10)


# --- measuring --------------------------------------------------------------------------------------------------------

CONTENDERS = ("holdfast", "torch.nn.GRU", "skrl")


def step_of(contender: str, problem: Problem, device: torch.device, episode: int) -> Callable[[], Any] | None:
    """None: it has no such algorithm, or it is not installed."""
    if contender != "skrl":
        return our_step(problem, device, episode, "gru" if contender == "holdfast" else LoopedGRU)
    try:
        return skrl_step(problem, device, episode) if problem.algorithm == "sac" else None
    except ModuleNotFoundError as missing:
        if missing.name != "skrl":
            raise
        return None


def seconds_of(step: Callable[[], Any], steps: int, device: torch.device) -> float:
    clock = time.process_time
    if device.type == "cuda":
        torch.cuda.synchronize()
        clock = time.perf_counter
    began = clock()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (clock() - began) / steps


def measure(
    problem: Problem, contenders: list[str], device: torch.device, episode: int, turns: int, steps: int
) -> dict[str, Any]:
    """Gradient steps per second by contender."""
    made = {name: step_of(name, problem, device, episode) for name in contenders}
    table = {name: step for name, step in made.items() if step is not None}
    times: dict[str, list[float]] = {name: [] for name in table}
    for step in table.values():
        seconds_of(step, 3, device)
    for _ in range(turns):
        for name, step in table.items():
            times[name].append(seconds_of(step, steps, device))
    rates = {name: round(1 / statistics.median(found), 2) for name, found in times.items()}
    fastest = {name: round(1 / min(found), 2) for name, found in times.items()}
    return {"problem": str(problem), **asdict(problem), "rates": rates, "fastest": fastest}


def markdown(results: list[dict[str, Any]], contenders: list[str]) -> str:
    def cell(row: dict[str, Any], name: str) -> str:
        rate = row["rates"].get(name)
        if rate is None:
            return ""
        return f"{rate:.1f}" if name == "holdfast" else f"{rate:.1f} ({row['rates']['holdfast'] / rate:.1f}x)"

    lines = [f"| gradient steps per second | {' | '.join(contenders)} |", "|---" * (1 + len(contenders)) + "|"]
    lines += [f"| {row['problem']} | {' | '.join(cell(row, name) for name in contenders)} |" for row in results]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--problems", nargs="+", metavar="NAME", help="some rows of the table, by the names it gives them"
    )
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--episode", type=int, default=200, help="mean steps of an episode")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="gradient steps of a turn")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON; results of other devices in it are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    found = []
    for problem in problems(options.device):
        if options.problems is None or str(problem) in options.problems:
            found.append(measure(problem, options.contenders, device, options.episode, options.turns, options.steps))
            print(found[-1]["problem"], found[-1]["rates"], flush=True)
    print(markdown(found, options.contenders))
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    written = json.loads(options.out.read_text()) if options.out.exists() else {}
    settings = {
        "episode": options.episode,
        "turns": options.turns,
        "steps": options.steps,
        "load": round(os.getloadavg()[0], 1),
    }
    written[options.device] = {
        "commit": this_commit(), "machine": name, "torch": torch.__version__, "threads": 1, **settings, "rows": found,
    }  # fmt: skip
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
