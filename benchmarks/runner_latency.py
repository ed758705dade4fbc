"""How long one step of one environment takes: the policy in torch, and exported, in microseconds on one thread.

    python benchmarks/runner_latency.py

LSTM of 64 and of 128, 8 numbers in, 4 actions out, most likely action. The contenders take turns in blocks of 50
steps; a cell is the median of the quietest block.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from gymnasium import spaces

import holdfast as hf

RESULTS = Path(__file__).parent / "results" / "runner_latency.json"


def bare_session(path: Path, hidden: int) -> Callable[[], Any]:
    """onnxruntime alone, with the same inputs each time: what a Runner can at best take."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    state = {name: np.zeros((1, 1, hidden), np.float32) for name in ("state_h", "state_c")}
    feed = {"obs": np.zeros((1, 8), np.float32), "resets": np.zeros(1, bool), **state}
    return lambda: session.run(None, feed)


def contenders(hidden: int, folder: Path) -> dict[str, Callable[[], Any]]:
    policy = hf.ActorCritic(spaces.Box(-1, 1, (8,)), spaces.Discrete(4), "lstm", hidden)
    onnx, pt2 = (hf.export_policy(policy, folder / f"policy{hidden}.{suffix}").path for suffix in ("onnx", "pt2"))
    obs, batch, resets = np.zeros(8, np.float32), np.zeros((1, 8), np.float32), np.zeros(1, bool)
    runners = {name: hf.Runner(source) for name, source in (("policy", policy), ("onnx", onnx), ("pt2", pt2))}
    table: dict[str, Callable[[], Any]] = {
        "policy.act, a batch of one": lambda: policy.act(batch, resets, deterministic=True),
        "Runner(policy)": lambda: runners["policy"].act(obs, False),
        'Runner("policy.pt2")': lambda: runners["pt2"].act(obs, False),
        'Runner("policy.onnx")': lambda: runners["onnx"].act(obs, False),
        "onnxruntime alone": bare_session(onnx, hidden),
    }
    return table


def measure(table: dict[str, Callable[[], Any]], blocks: int = 40, steps: int = 50) -> dict[str, float]:
    """Microseconds by contender."""
    best = dict.fromkeys(table, float("inf"))
    for block in range(blocks):
        for name, act in table.items():
            times = []
            for _ in range(steps):
                begin = time.perf_counter()
                act()
                times.append(time.perf_counter() - begin)
            if block:
                best[name] = min(best[name], statistics.median(times) * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = {hidden: measure(contenders(hidden, Path(folder))) for hidden in (64, 128)}
    print(f"{'microseconds per step':30}" + "".join(f"{f'LSTM {hidden}':>10}" for hidden in results))
    for name in results[64]:
        print(f"{name:30}" + "".join(f"{row[name]:10.0f}" for row in results.values()))
    versions = {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__, "machine": platform.processor()}
    out.write_text(json.dumps({"versions": versions, "microseconds": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
