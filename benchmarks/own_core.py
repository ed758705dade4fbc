"""A core of one's own: a loop over time in Python next to the same cell on `hf.linear_recurrence`, next to a GRU.

    python benchmarks/own_core.py                            # one thread; 64 units, the trainer's own sizes
    python benchmarks/own_core.py --compiled --updates 5     # also the loop with compiled_steps = 8 (compiles first)

The cell is the recurrent trace unit of examples/own_memory.py. Each contender is a whole PPO training (rollouts, 4 epochs, the
optimizer) on RepeatPreviousEasy. They take turns, an update each; a figure is the median of its updates, the first left out. Before
anything is timed, outputs and gradients of the two forms are compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from this_commit import this_commit

import holdfast as hf
from holdfast.training.iteration import Iteration

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from own_memory import RTU, Loop

ENV = "holdfast/RepeatPreviousEasy-v0"
SIZES = ("num_envs", "num_steps", "minibatches")


class Compiled(Loop):
    compiled_steps = 8


class Turns:
    """One training, an update at a time, and the seconds of each."""

    def __init__(self, core: Any, args: argparse.Namespace) -> None:
        sizes = {name: value for name in SIZES if (value := getattr(args, name)) is not None}
        config = hf.PPOConfig(
            **sizes, env=ENV, quiet=True, tensorboard=False, threads=1, seed=1, run_dir=tempfile.mkdtemp(), total_steps=10**9, checkpoint_every=0,
        )  # fmt: skip
        env = hf.envs.make(ENV, num_envs=1)
        torch.manual_seed(1)
        policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, core, args.hidden_size)
        trainer = hf.Trainer(config, policy=policy)
        self.iteration = Iteration(trainer.config, trainer.parts, trainer.progress, trainer.hooks, lambda: False)
        self.seconds: list[float] = []

    def update(self) -> None:
        began = time.perf_counter()
        self.iteration.run()
        self.seconds.append(time.perf_counter() - began)


def require_equal(hidden: int) -> None:
    """Both forms give the same outputs and gradients, with resets, from a state that is not zero."""
    loop, scan = Loop(5, hidden).double(), RTU(5, hidden).double()
    scan.load_state_dict(loop.state_dict())
    x, resets = torch.randn(20, 3, 5, dtype=torch.float64), torch.rand(20, 3) < 0.2
    start = {name: leaf.detach() for name, leaf in loop(x, resets=resets)[1].items()}
    found = []
    for core in (loop, scan):
        y, _ = core(x, start, resets)
        found.append((y, *torch.autograd.grad(y.square().sum(), list(core.parameters()), retain_graph=True)))
    torch.testing.assert_close(*found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int)
    parser.add_argument("--num-steps", type=int)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--minibatches", type=int)
    parser.add_argument("--updates", type=int, default=5, help="timed, of each contender")
    parser.add_argument("--compiled", action="store_true", help="also the loop through torch.compile")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "own_core.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    require_equal(args.hidden_size)
    kinds: dict[str, Any] = {"loop over time": Loop, "hf.linear_recurrence": RTU, "hf.GRU, in C": "gru"}
    if args.compiled:
        kinds["compiled_steps = 8"] = Compiled
    turns = {name: Turns(kind, args) for name, kind in kinds.items()}
    for _ in range(args.updates + 1):
        for run in turns.values():
            run.update()
    config = turns["loop over time"].iteration.config
    steps = config.num_envs * config.num_steps
    speed = {name: steps / statistics.median(run.seconds[1:]) for name, run in turns.items()}
    ratios = [a / b for a, b in zip(turns["loop over time"].seconds[1:], turns["hf.linear_recurrence"].seconds[1:])]
    for name, value in speed.items():
        print(f"{name:<22} {value:>9,.0f} steps/s   {value / speed['loop over time']:.1f}x")
    print(f"linear_recurrence over loop, update by update: {min(ratios):.1f}x to {max(ratios):.1f}x")
    settings = {
        "hidden_size": args.hidden_size,
        "updates": args.updates,
        **{name: getattr(config, name) for name in (*SIZES, "epochs")},
    }
    print(", ".join(f"{name} {value}" for name, value in settings.items()))
    result = {
        "command": " ".join(["python", *sys.argv]), "commit": this_commit(), "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__, "settings": settings, "steps_per_second": {k: round(v) for k, v in speed.items()},
        "ratio_per_update": [round(ratio, 2) for ratio in ratios],
        "first_update_seconds": {name: round(run.seconds[0], 2) for name, run in turns.items()},
    }  # fmt: skip
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
