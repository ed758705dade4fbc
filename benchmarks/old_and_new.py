"""Whether a change costs speed: two source trees of Holdfast, run alternately on one machine.

    python benchmarks/old_and_new.py --old ../before --new .
    python benchmarks/old_and_new.py --old ../before --new . --only training-64 runner --pairs 15

Each measurement runs in a process of its own, on one thread, in rounds of old, new and old again, in changing order. A round gives
the ratios new/old and old/old (the noise) of the times; the table shows the median over the rounds and its 95% bootstrap interval.
A measurement with several cases (shapes, batch sizes) takes the geometric mean of their ratios in each round.

training-64, training-256   CPU-seconds of an update of `hf.Trainer` at the setting of vs_sb3.py, after a warm-up
sequences, steps            LSTM and GRU of cpu_recurrence.py: forward + backward of a segment; one step without gradients
make-train                  seconds that `make train` reports, another seed in each round
runner                      `hf.Runner.act` for 1 and for 8 environments

Only names that both trees have are used.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "old_and_new.json"
ORDERS = list(itertools.permutations(("old", "new", "old again")))
Seconds = dict[str, float]  # by case


# --- the measurements: each runs in a process that imports one of the trees -------------------------------------------


def training(hidden: int, updates: int) -> Callable[[int, bool], Seconds]:
    """CPU-seconds of an update, the median of `updates`."""

    def measure(seed: int, quick: bool) -> Seconds:
        import holdfast as hf

        warm_up, wanted = (1, 2) if quick else (2, updates)
        clock: list[float] = []

        class Clock(hf.Callback):
            def on_update_end(self, trainer: Any, row: dict[str, float]) -> bool:
                clock.append(time.process_time())
                return len(clock) <= warm_up + wanted

        config = hf.TrainConfig(
            env="CartPole-v1", mask_velocity=True, hidden_size=hidden, critic_core="separate", encoder_sizes=(), head_sizes=(64, 64),
            num_envs=8, num_steps=128, minibatches=8, epochs=10, learning_rate=3e-4, lr_schedule="constant", entropy_coef=0.0,
            total_steps=10**6, seed=seed, device="cpu", threads=1, checkpoint_every=0, final_eval_episodes=1, tensorboard=False,
            run_dir="run", quiet=True,
        )  # fmt: skip
        hf.Trainer(config, callbacks=[Clock()]).run()
        times = [after - before for before, after in itertools.pairwise(clock[warm_up:])]
        return {"update": statistics.median(times)}

    return measure


SHAPES = [(64, 128, 0.01, 128), (8, 128, 0.1, 128), (8, 128, 0.01, 256), (8, 16, 0.1, 64), (1, 128, 0.01, 64)]
"""B, T, P(reset), hidden size. The last two are thin: what is not arithmetic counts most there."""


def sequences(seed: int, quick: bool) -> Seconds:
    """Forward + backward from a state that is not zero; the minimum of the repeats, in CPU-seconds."""
    import torch

    import holdfast as hf

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    runs: dict[str, Callable[[], Any]] = {}
    for cell in (hf.LSTM, hf.GRU):
        for B, T, p, H in SHAPES:
            core = cell(H, H)
            x, dy, resets = torch.randn(T, B, H), torch.randn(T, B, H), torch.rand(T, B) < p
            state = {leaf: torch.randn_like(s) for leaf, s in core.initial_state(B).items()}
            runs[f"{cell.__name__} {B}x{T} p={p:g} H={H}"] = _forward_and_backward(core, x, state, resets, dy)
    return _minimum(runs, repeats=3 if quick else 25, clock=time.process_time)


def _forward_and_backward(core: Any, x: Any, state: Any, resets: Any, dy: Any) -> Callable[[], None]:
    def run() -> None:
        inputs = x.detach().requires_grad_()
        core.zero_grad(set_to_none=True)
        core(inputs, state, resets)[0].backward(dy)

    return run


def steps(seed: int, quick: bool) -> Seconds:
    """One step without gradients, with flags; the minimum over the repeats of 20 calls."""
    import torch

    import holdfast as hf

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    runs: dict[str, Callable[[], Any]] = {}
    for cell, (B, H) in itertools.product((hf.LSTM, hf.GRU), ((1, 64), (8, 64), (64, 128))):
        core = cell(H, H)
        x, state, patterns = torch.randn(B, H), core.initial_state(B), (torch.rand(20, B) < 0.1).unbind(0)
        runs[f"{cell.__name__} B={B} H={H}"] = _steps(core, x, state, patterns)
    return _minimum(runs, repeats=5 if quick else 200, clock=time.perf_counter)


def _steps(core: Any, x: Any, state: Any, patterns: Any) -> Callable[[], None]:
    import torch

    def run() -> None:
        with torch.no_grad():
            for resets in patterns:
                core(x, state, resets)

    return run


def make_train(seed: int, quick: bool) -> Seconds:
    """What `make train` prints as training time."""
    import holdfast as hf

    shorter = {"total_steps": 20_000} if quick else {}
    result = hf.Trainer(hf.TrainConfig.preset("repeat-previous-easy", seed=seed, run_dir="run", **shorter)).run()
    return {"training": result.seconds}


def runner(seed: int, quick: bool) -> Seconds:
    """`Runner.act` on a policy, most likely action; the quietest of many blocks of 50 calls."""
    import torch
    from gymnasium import spaces

    import holdfast as hf

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    policy = hf.ActorCritic(spaces.Box(-1, 1, (8,)), spaces.Discrete(4), "lstm", 64)
    runs: dict[str, Callable[[], Any]] = {}
    for B in (1, 8):
        one, obs, resets = hf.Runner(policy), np.zeros((B, 8), np.float32), np.zeros(B, bool)
        act = (lambda r=one, o=obs[0]: r.act(o, False)) if B == 1 else (lambda r=one, o=obs, f=resets: r.act(o, f))
        runs[f"B={B}"] = _fifty_times(act)
    return {case: seconds / 50 for case, seconds in _minimum(runs, 3 if quick else 60, time.perf_counter).items()}


def _fifty_times(act: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(50):
            act()

    return run


def _minimum(runs: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float]) -> Seconds:
    """The minimum over the repeats, cases in turn; the first round warms up."""
    best = dict.fromkeys(runs, math.inf)
    for repeat in range(repeats + 1):
        for case, run in runs.items():
            begin = clock()
            run()
            if repeat:
                best[case] = min(best[case], clock() - begin)
    return best


MEASUREMENTS: dict[str, Callable[[int, bool], Seconds]] = {
    "training-64": training(64, updates=15),
    "training-256": training(256, updates=5),
    "sequences": sequences,
    "steps": steps,
    "make-train": make_train,
    "runner": runner,
}


# --- running them alternately -----------------------------------------------------------------------------------------


def in_a_process(tree: Path, name: str, seed: int, quick: bool) -> Seconds:
    """Measure with the package of a source tree, in a temporary folder."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        out = Path(folder) / "seconds.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", name, str(tree), str(seed), str(out)]
        done = subprocess.run(
            [*command, *(["--quick"] if quick else [])], cwd=folder, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{name} failed with the package in {tree}:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
        return json.loads(out.read_text())


def work(name: str, tree: str, seed: str, out: str, quick: bool) -> None:
    """The process of one measurement."""
    import holdfast

    if Path(tree, "src").resolve() not in Path(holdfast.__file__).resolve().parents:
        sys.exit(f"imported {holdfast.__file__}, which is not in {tree}")
    Path(out).write_text(json.dumps(MEASUREMENTS[name](int(seed), quick)))


def rounds(name: str, trees: dict[str, Path], pairs: int, quick: bool) -> list[dict[str, Seconds]]:
    done = []
    for i in range(pairs):
        times = {which: in_a_process(trees[which], name, seed=i + 1, quick=quick) for which in ORDERS[i % len(ORDERS)]}
        done.append(times)
        print(f"  {name}, round {i + 1} of {pairs}: new/old {ratio(times, 'new'):.3f}", file=sys.stderr, flush=True)
    return done


def ratio(times: dict[str, Seconds], which: str) -> float:
    """Of `which` to old: the geometric mean over the cases."""
    return math.exp(statistics.fmean(math.log(times[which][case] / times["old"][case]) for case in times["old"]))


def interval(ratios: list[float], draws: int = 10_000) -> list[float]:
    """The 95% bootstrap interval of the median over rounds."""
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(ratios, (draws, len(ratios))), axis=1)
    return [float(end) for end in np.quantile(medians, (0.025, 0.975))]


def summarize(done: list[dict[str, Seconds]]) -> dict[str, Any]:
    new, noise = ([ratio(times, which) for times in done] for which in ("new", "old again"))
    cases = {
        case: statistics.median(times["new"][case] / times["old"][case] for times in done) for case in done[0]["old"]
    }
    return {
        "new/old": {"median": statistics.median(new), "interval": interval(new), "rounds": new},
        "old/old": {"median": statistics.median(noise), "interval": interval(noise), "rounds": noise},
        "cases": cases,
        "seconds": {
            which: {case: statistics.median(times[which][case] for times in done) for case in done[0]["old"]}
            for which in ("old", "new")
        },
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'time, new over old':22}{'median':>8}{'95% interval':>18}{'old over old':>18}{'rounds':>8}"]
    for name, row in rows.items():
        low_high = ["{:.3f} to {:.3f}".format(*row[which]["interval"]) for which in ("new/old", "old/old")]
        count = len(row["new/old"]["rounds"])
        lines.append(f"{name:22}{row['new/old']['median']:8.3f}{low_high[0]:>18}{low_high[1]:>18}{count:8}")
    return "\n".join(lines)


def commit(tree: Path) -> str | None:
    done = subprocess.run(["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or None


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        return work(*sys.argv[2:6], quick="--quick" in sys.argv[6:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--old", type=Path, required=True, help="source tree to compare with: a folder that has src/holdfast"
    )
    parser.add_argument("--new", type=Path, required=True, help="source tree that changed")
    parser.add_argument("--only", nargs="+", choices=list(MEASUREMENTS), default=list(MEASUREMENTS), metavar="NAME",
                        help=f"measurements to make: {', '.join(MEASUREMENTS)}")  # fmt: skip
    parser.add_argument("--pairs", type=int, default=9, help="rounds of old, new and old again")
    parser.add_argument("--quick", action="store_true", help="much shorter measurements, to try the program out")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="JSON; measurements that are not made now stay in it"
    )
    args = parser.parse_args()
    for tree in (args.old, args.new):
        if not (tree / "src" / "holdfast" / "__init__.py").exists():
            parser.error(f"{tree} has no src/holdfast")
    old, new = args.old.resolve(), args.new.resolve()
    results = json.loads(args.output.read_text()) if args.output.exists() else {"measurements": {}}
    for name in args.only:
        done = rounds(name, {"old": old, "new": new, "old again": old}, args.pairs, args.quick)
        results["measurements"][name] = summarize(done)
    results["machine"] = {
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "threads": 1,
    }
    results["commits"] = {"old": commit(old), "new": commit(new)}
    print(table({name: results["measurements"][name] for name in args.only}))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
