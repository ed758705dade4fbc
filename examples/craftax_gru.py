"""Craftax with a GRU: worlds in JAX, policy in torch, both on one device, without copies between them.

    python examples/craftax_gru.py                                      # a GPU, 20 million steps
    python examples/craftax_gru.py --env craftax:Craftax-Symbolic-v1 --steps 1000000000
    holdfast train --env craftax:Craftax-Classic-Symbolic-v1 --core gru --hidden-size 512 --num-envs 4096

Needs `pip install 'holdfast[craftax]'`, on a GPU also 'jax[cuda13]'. Compiling a step of Craftax takes a minute. The
compiled step is cached for the next run with the same number of environments.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "jax"))

import torch

import holdfast as hf


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="craftax:Craftax-Classic-Symbolic-v1")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=20_000_000)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    flags = parser.parse_args(arguments)
    config = hf.TrainConfig(
        env=flags.env, core="gru", hidden_size=flags.hidden_size, num_envs=flags.num_envs, num_steps=64, epochs=4, minibatches=8,
        learning_rate=2e-4, gae_lambda=0.8, total_steps=flags.steps, device=flags.device, run_dir=tempfile.mkdtemp() + "/craftax",
        final_eval_episodes=flags.num_envs,  # as many as in training, so that nothing else is compiled
    )  # fmt: skip
    gaps: list[float] = []

    class KeepGap(hf.Callback):
        def on_update_end(self, trainer, row):
            gaps.append(row["memory/replay_gap"])

    result = hf.Trainer(config, callbacks=[KeepGap()]).run()
    return {"mean_return": result.mean_return, "steps": result.steps, "first_replay_gap": gaps[0]}


if __name__ == "__main__":
    print(main())
