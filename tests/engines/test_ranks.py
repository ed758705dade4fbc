"""Where minibatches are CUDA graphs PPO averages gradients itself, without DDP: the same weights come of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

JOB = """
import torch
import holdfast as hf
from holdfast import envs
from holdfast.distributed import ranks as distributed
from holdfast.rollout.collector import Collector
from holdfast.engines.choose import make_ppo

torch.set_num_threads(1)
ranks, _ = distributed.join("cpu")
config = hf.TrainConfig(num_envs=6, num_steps=16, hidden_size=8, minibatches=2, epochs=2)
trained = []
for wrapped in (True, False):
    torch.manual_seed(1 if wrapped else 1 + ranks.rank)  # without a wrapper rank 0's weights must reach everybody
    env = envs.make("holdfast/TMaze-v0", num_envs=len(ranks.share(6)))
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, hidden_size=8)
    ppo, engines = make_ppo(policy, config, ranks, capturable=not wrapped)
    assert (engines.ddp_policy is not None) == wrapped
    torch.manual_seed(ranks.seed(7))
    segment = Collector(env, policy, 16, seed=ranks.seed(3)).rollout()
    ppo.update(segment, 0.0, True)
    trained.append(torch.cat([p.detach().flatten() for p in policy.parameters()]))
everybody = [row for row in ranks.all_gather(trained[1].tolist(), torch.device("cpu"))]
assert everybody[0] == everybody[1], "ranks went apart"
gap = float((trained[0] - trained[1]).abs().max())
assert gap < 1e-6, gap
assert float((trained[1] - trained[1].mean()).abs().max()) > 0.1
print("agreed")
"""


def test_two_ranks_without_ddp_train_the_weights_that_they_train_with_it(tmp_path: Path):
    (tmp_path / "job.py").write_text(JOB)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, str(tmp_path / "job.py")], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agreed") == 2
