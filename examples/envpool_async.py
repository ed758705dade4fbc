"""EnvPool in asynchronous batches: the policy acts in the environments that are ready first, each with its own memory.

    python examples/envpool_async.py
    holdfast train --env envpool:Pong-v5 --num-envs 64 --vectorization async

Every environment takes the same number of steps per rollout, and no step crosses an update. Needs `pip install envpool`.
"""

from __future__ import annotations

import argparse
import tempfile

import holdfast as hf


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50_000)
    flags = parser.parse_args(arguments)
    config = hf.TrainConfig(
        env=f"envpool:{flags.task}", vectorization="async", env_kwargs={"batch_size": flags.batch_size}, num_envs=flags.num_envs,
        core="gru", hidden_size=64, num_steps=64, total_steps=flags.steps, replay_check_every=1,
        run_dir=tempfile.mkdtemp() + "/envpool",
    )  # fmt: skip
    gaps: list[float] = []

    class KeepGap(hf.Callback):
        def on_update_end(self, trainer, row):
            gaps.append(row["memory/replay_gap"])

    result = hf.Trainer(config, callbacks=[KeepGap()]).run()
    return {"mean_return": result.mean_return, "worst_replay_gap": max(gaps)}


if __name__ == "__main__":
    print(main())
