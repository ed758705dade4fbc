"""Whole training on one GPU with and without the fused layers around the core, next to a whole-loop JAX program, in one run.

    python benchmarks/gpu_engines.py                                   # benchmarks/results/gpu_engines.json
    python benchmarks/gpu_engines.py --seconds 100 --only "lstm 8192"  # some cases, in bounded time
    python benchmarks/gpu_engines.py --profile --only "lstm 8192 4x4 fused"

Two settings of PPO with T = 64 and hidden 128, resets, bootstrap and replay check included: 4 epochs x 4 minibatches, as in
gpu_training.py, and one epoch in minibatches of 65,536 steps, as in PufferLib v4. "fused" is what the trainer chooses;
"autograd" has the layers around the core and the loss through autograd, in CUDA graphs too. JAX (jax_ppo.py, TF32) runs the same
4 x 4 in a process of its own that waits while Holdfast trains: the two take turns, `--rounds` times each.

--profile adds what the GPU and the host do in an iteration (gpu_timeline.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from gpu_training import CARTPOLE as CARTPOLE_SETTINGS
from gpu_training import holdfast_run
from this_commit import this_commit

RESULTS = Path(__file__).parent / "results" / "gpu_engines.json"
EASY, CARTPOLE = "RepeatPreviousEasy", "PositionOnlyCartPoleEasy"


class Case(NamedTuple):
    env: str
    cell: str
    num_envs: int
    setting: str = "4x4"
    engine: str = "fused"

    def __str__(self) -> str:
        return " ".join(map(str, self))


CASES = [
    *(Case(EASY, "lstm", n, setting) for setting in ("4x4", "one epoch") for n in (8192, 32768)),
    *(Case(EASY, "mingru", n, "one epoch") for n in (8192, 32768)),
    *(Case(EASY, "gru", n) for n in (8192, 32768)),
    Case(CARTPOLE, "lstm", 8192),
    *(Case(EASY, "lstm", 8192, setting, "autograd") for setting in ("4x4", "one epoch")),
    Case(EASY, "mingru", 8192, "one epoch", "autograd"),
    Case(CARTPOLE, "lstm", 8192, "4x4", "autograd"),
]


class JaxProgram:
    """jax_ppo.py in a process of its own: compiles at once, trains when asked."""

    def __init__(self, case: Case) -> None:
        own = CARTPOLE_SETTINGS if "CartPole" in case.env else {}
        renamed = {"learning_rate": "lr", "gae_lambda": "lam", "gamma": "gamma"}
        program = dict(env=case.env, cell=case.cell, n=case.num_envs, **{renamed[k]: v for k, v in own.items()})
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import jax_ppo; jax_ppo.serve(sys.argv[1])"
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 it lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=self._said, env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        )  # fmt: skip
        self.windows: list[tuple[int, float]] = []
        self.compile_seconds = 0.0

    def wait_until_compiled(self) -> None:
        self.compile_seconds = self._answer()["compile_seconds"]

    def train(self, seconds: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        self.windows.append(tuple(self._answer()))

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._said.seek(0)
            said = self._said.read().strip().splitlines()
            raise RuntimeError(f"JAX ended with code {code}: {said[-1] if said else 'it said nothing'}")
        return json.loads(line)

    def result(self) -> dict[str, Any]:
        steps, seconds = (sum(parts) for parts in zip(*self.windows))
        rounds = [steps / taken for steps, taken in self.windows]
        return {"steps_per_second": steps / seconds, "rounds": rounds, "compile_seconds": self.compile_seconds}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def has_jax_program(case: Case) -> bool:
    return case.engine == "fused" and case.setting == "4x4" and case.cell in ("lstm", "gru")


def run(case: Case, jax: JaxProgram | None, window: float, rounds: int, callbacks: list[Any]) -> dict[str, Any]:
    from holdfast.engines import fused_policy

    own = {} if case.setting == "4x4" else {"epochs": 1, "minibatches": case.num_envs * 64 // 65536}
    chosen = fused_policy.obstacle
    if case.engine == "autograd":
        fused_policy.obstacle = lambda *_: "switched off"  # type: ignore[assignment]
    try:
        row = holdfast_run(
            case.env, case.cell, case.num_envs, 128, window, rounds=rounds, callbacks=callbacks,
            between=lambda trainer: None if jax is None else jax.train(window), **own,
        )  # fmt: skip
    finally:
        fused_policy.obstacle = chosen
    row.pop("window")
    if jax is not None:
        row["jax"] = jax.result()
        row["ratio"] = row["steps_per_second"] / row["jax"]["steps_per_second"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="for everything; no case starts when they are over"
    )
    parser.add_argument("--window", type=float, default=1.5, help="seconds of each measured turn")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each program")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose words contain one of these")
    parser.add_argument("--no-jax", action="store_true")
    parser.add_argument("--profile", action="store_true", help="add a timeline of the GPU and the host's phases")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    import torch
    from gpu_timeline import Timeline

    began = time.perf_counter()
    cases = [case for case in CASES if any(words in str(case) for words in args.only)]
    programs: dict[Case, JaxProgram] = {}
    if not args.no_jax:
        programs = {case: JaxProgram(case) for case in cases if has_jax_program(case)}
        for case, program in list(programs.items()):
            try:
                program.wait_until_compiled()
            except RuntimeError as error:
                print(f"{case}: {error}", flush=True)
                del programs[case]
        print(f"JAX programs compiled after {time.perf_counter() - began:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": args.commit or this_commit()}
    about["command"] = " ".join(["python", "benchmarks/gpu_engines.py", *sys.argv[1:]])
    for case in cases:
        if time.perf_counter() - began > args.seconds:
            print(f"{case}: out of time", flush=True)
            continue
        gc.collect()
        torch.cuda.empty_cache()
        timeline = Timeline(updates=3) if args.profile else None
        try:
            row = run(case, programs.get(case), args.window, args.rounds, [timeline] if timeline else [])
        except Exception as error:  # the other cases still count
            print(f"{case}: {type(error).__name__}: {error}", flush=True)
            rows.append({**case._asdict(), "error": f"{type(error).__name__}: {error}"})
            continue
        finally:
            if case in programs:
                programs.pop(case).close()
        beside = f", JAX {row['jax']['steps_per_second'] / 1e6:.2f}M/s ({row['ratio']:.2f}x)" if "jax" in row else ""
        print(
            f"{case}: {row['steps_per_second'] / 1e6:.2f}M/s{beside}, {row['ms_per_update']:.2f} ms, rollout "
            f"{row['rollout_share']:.0%}, update {row['update_share']:.0%}, replay gap {row['replay_gap']:.1e}, return "
            f"{row['last_return']:.3f}", flush=True,
        )  # fmt: skip
        if timeline is not None:
            row["timeline"] = timeline.result()
            print(timeline.text(), flush=True)
        rows.append({**case._asdict(), **row})
        args.out.parent.mkdir(exist_ok=True, parents=True)
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    for program in programs.values():
        program.close()


if __name__ == "__main__":
    main()
