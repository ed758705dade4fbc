"""What saving a buffer of sequences costs a run of SAC.

    python benchmarks/buffer_saving.py                  # 1,000,000 rows: 17 observed numbers, 6 actions, a reward
    python benchmarks/buffer_saving.py --rows 200_000 --saves 5

A run with default settings on a CPU, whose buffer is full; its policy also sees the previous 6 actions. Measured are updates (a segment is played, then gradient steps) and
checkpoints with all that belongs to them: rows that were added since the last one, weights, optimizers, a SHA-256, fsync. The
part of a run that goes into saving is one checkpoint per `checkpoint_every` updates. The first one writes the whole buffer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from gymnasium import spaces
from this_commit import this_commit

import holdfast as hf
from holdfast.envs.base import TorchVectorEnv, Transition
from holdfast.state import leaves

RESULTS = Path(__file__).parent / "results" / "buffer_saving.json"
EPISODE = 1000


class Noise(TorchVectorEnv):
    """Random observations of 17 numbers; episodes are truncated after 1,000 steps."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, spaces.Box(-np.inf, np.inf, (17,), np.float32), spaces.Box(-1, 1, (6,)), {})

    def draw(self) -> torch.Tensor:
        return torch.randn(self.num_envs, 17)

    def begin(self, draws: torch.Tensor) -> tuple[Any, Any]:
        return {"step": torch.zeros(self.num_envs)}, draws

    def transition(self, state: Any, actions: torch.Tensor, draws: torch.Tensor) -> Transition:
        step = state["step"] + 1
        over = step >= EPISODE
        never = torch.zeros(self.num_envs, dtype=torch.bool)
        return Transition({"step": torch.where(over, 0.0, step)}, draws, actions[:, 0], never, over, over, draws)


def fill(buffer: hf.SequenceBuffer, segment: hf.Segment) -> None:
    """With copies of a segment, until every row was written."""
    copies = 64
    states = (segment.chunk_states or [segment.start_state]) * copies
    steps = segment.map_steps(lambda x: x.repeat(copies, *(1,) * (x.dim() - 1)))
    long = segment.changed(**steps, chunk_states=states)
    while int(buffer.written.min()) < buffer.stream_rows:
        buffer.add(long)


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds by the clock and of the CPU."""
    clock, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - cpu


def measure(rows: int, updates: int, saves: int, folder: Path) -> dict[str, Any]:
    config = hf.SACConfig(
        env="", num_envs=4, buffer_size=rows, device="cpu", threads=1, tensorboard=False, quiet=True, total_steps=10**8,
        warmup_steps=0, run_dir=str(folder / "run"), replay_check_every=0,
    )  # fmt: skip
    trainer = hf.Trainer(config, env=Noise(4))
    config, buffer = trainer.config, trainer.algorithm.buffer
    segment = trainer.collector.rollout()
    fill(buffer, segment)
    played: list[tuple[float, float]] = []
    clock, cpu = time.perf_counter(), time.process_time()

    class Watch(hf.Callback):
        def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> bool:
            nonlocal clock, cpu
            played.append((time.perf_counter() - clock, time.process_time() - cpu))
            clock, cpu = time.perf_counter(), time.process_time()
            return len(played) < updates + 2

    trainer.hooks.callbacks.append(Watch())
    config.checkpoint_every, config.final_eval_episodes = 0, 1
    first = timed(lambda: trainer.algorithm.save_files(folder / "whole"))
    trainer.run()
    per_update = [statistics.median(part) for part in zip(*played[2:])]  # the first ones warm up

    every, saved = hf.SACConfig.checkpoint_every, []
    for number in range(saves):
        for _ in range(every):
            buffer.add(segment)
        trainer.progress.update = 10**6 + number
        saved.append(timed(lambda: trainer.folder.save(trainer.progress.update)))
    per_save = [statistics.median(part) for part in zip(*saved[1:])]  # the first one writes the whole buffer
    files = [path for path in (folder / "run" / "checkpoints" / "buffer-rank0").iterdir()]
    newest = max((folder / "run" / "checkpoints").glob("update_*.pt"))
    return {
        "rows": len(buffer),
        "row_bytes": sum(x[0].numel() * x.element_size() for x in leaves(buffer.rows)),
        "first_save_seconds": first[0],
        "rows_between_saves": every * config.steps_per_segment,
        "gradient_steps_per_update": config.gradient_steps,
        "update_seconds": per_update[0],
        "update_cpu_seconds": per_update[1],
        "updates_between_saves": every,
        "save_seconds": per_save[0],
        "save_cpu_seconds": per_save[1],
        "longest_save_seconds": max(clock for clock, _ in saved[1:]),
        "part_of_the_run": per_save[0] / (per_save[0] + every * per_update[0]),
        "part_of_its_cpu_seconds": per_save[1] / (per_save[1] + every * per_update[1]),
        "steps_per_second_with_2_percent": 0.02 * every * config.steps_per_segment / per_save[0],
        "megabytes_on_disk": sum(path.stat().st_size for path in files) / 1e6,
        "checkpoint_megabytes": newest.stat().st_size / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the buffer")
    parser.add_argument("--updates", type=int, default=4, help="that are timed")
    parser.add_argument("--saves", type=int, default=12, help="that are timed")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.rows, options.updates, options.saves, Path(folder))
    between = found["updates_between_saves"] * found["update_seconds"]
    print(f"a buffer of {found['rows']:,} rows of {found['row_bytes']} bytes, SAC's defaults on one CPU thread\n")
    print("| | |\n|---|---|")
    print(f"| first save: the whole buffer | {found['first_save_seconds']:.2f} s |")
    print(f"| each save: {found['rows_between_saves']:,} rows and a checkpoint | {found['save_seconds']:.3f} s |")
    print(f"| longest save | {found['longest_save_seconds']:.3f} s |")
    print(f"| from save to save: {found['updates_between_saves']} updates | {between:.1f} s |")
    print(f"| part of the run | {found['part_of_the_run']:.3%} (CPU-seconds: {found['part_of_its_cpu_seconds']:.3%}) |")
    print(f"| 2% of a run that plays | {found['steps_per_second_with_2_percent']:,.0f} steps/s |")
    print(f"| on disk | {found['megabytes_on_disk']:.0f} MB, a checkpoint {found['checkpoint_megabytes']:.1f} MB |")
    machine = {"processor": platform.machine(), "cpus": os.cpu_count(), "torch": torch.__version__}
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps({"commit": this_commit(), "machine": machine, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
