"""The code in docs/frameworks.md runs as it is printed."""

import re
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[3] / "docs" / "frameworks.md").read_text()


def test_python_blocks_run():
    for package in ("jax", "rsl_rl", "skrl", "ray.rllib"):
        pytest.importorskip(package)
    from doctor.subjects import test_packed, test_rllib, test_rsl_rl, test_skrl

    class Layer(test_packed.Layer):
        def forward(self, x, seq_idx=None, **told):
            self.boundaries = "cu_seqlens" if seq_idx is None else "segment_ids"
            return super().forward(x, **(told if seq_idx is None else {"segment_ids": seq_idx}))

    torch.manual_seed(0)
    names = {"layer": Layer(), "alg": test_rsl_rl.ppo(), "agent": test_skrl.agent(), "module": test_rllib.example()}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(compile(block, "docs/frameworks.md", "exec"), names)
