"""`RecurrentModule` and TorchRL's `LSTMModule` on the same batch: forward + backward with resets, on the CPU.

    python benchmarks/vs_torchrl.py

Batches [B, T] with input = hidden = 128 and P(is_init) as given, float32, one thread, interleaved, minimum of several.
Outputs and gradients of both are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tensordict import TensorDict

RESULTS = Path(__file__).parent / "results" / "vs_torchrl.json"
SHAPES = [(64, 128, 0.0), (64, 128, 0.01), (64, 128, 0.1), (8, 128, 0.01)]
SIZE = 128


def make_batch(rows: int, steps: int, p: float) -> TensorDict:
    init = torch.rand(rows, steps, 1) < p
    init[:, 0] = True
    zeros = torch.zeros(rows, steps, 1, SIZE)
    entries = {"x": torch.randn(rows, steps, SIZE), "is_init": init}
    entries |= {"recurrent_state_h": zeros, "recurrent_state_c": zeros.clone()}
    return TensorDict(entries, batch_size=[rows, steps])


def pass_over(module: Any, batch: TensorDict) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One forward and backward; the output and the gradients of the weights."""
    module.zero_grad(set_to_none=True)
    y = module(batch.clone(recurse=False))["y"]
    y.sum().backward()
    return y.detach(), [p.grad for p in module.parameters()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    from torchrl.modules import LSTMModule, set_recurrent_mode

    import holdfast as hf
    from holdfast.integrations.torchrl import RecurrentModule

    torch.set_num_threads(1)
    torch.manual_seed(0)
    ours = RecurrentModule(hf.LSTM(SIZE, SIZE), in_key="x", out_key="y")
    theirs = LSTMModule(input_size=SIZE, hidden_size=SIZE, in_key="x", out_key="y", recurrent_backend="pad")
    theirs.lstm.load_state_dict(ours.core.state_dict())
    rows = []
    print("| B, T, P(is_init) | TorchRL pad, ms | Holdfast, ms | ratio |\n|---|---|---|---|")
    for shape in SHAPES:
        batch = make_batch(*shape)
        times: dict[str, list[float]] = {"torchrl_pad": [], "holdfast": []}
        with set_recurrent_mode(True):
            (a, da), (b, db) = pass_over(ours, batch), pass_over(theirs, batch)
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
            for x, y in zip(da, db):
                torch.testing.assert_close(x, y, atol=1e-3 * float(y.abs().max()), rtol=0)
            for _ in range(args.repeats):
                for name, module in (("torchrl_pad", theirs), ("holdfast", ours)):
                    began = time.perf_counter()
                    pass_over(module, batch)
                    times[name].append(time.perf_counter() - began)
        best = {name: 1e3 * min(t) for name, t in times.items()}
        ratio = best["torchrl_pad"] / best["holdfast"]
        rows.append({"shape": shape, **best, "ratio": ratio})
        print(
            f"| {', '.join(map(str, shape))} | {best['torchrl_pad']:.1f} | {best['holdfast']:.1f} | {ratio:.1f}x |",
            flush=True,
        )
    machine = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": 1}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
