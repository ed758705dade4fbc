"""The recurrent PPO of TorchRL's own documentation, with `RecurrentModule` in place of `GRUModule`.

    python examples/torchrl_recurrent_ppo_docs.py                     # CartPole-v1: about a minute on one core
    python examples/torchrl_recurrent_ppo_docs.py --memory torchrl    # the same with GRUModule, to compare

It follows "Minimal recurrent PPO wiring" on the page "Recurrent state lifecycle" of TorchRL's reference
(https://docs.pytorch.org/rl/stable/reference/recurrent_state_lifecycle.html). The environment, the two networks with a
GRU of 32 each, the keys, the collector, the slices from a replay buffer, advantage and loss are the page's, and so are
their numbers. The page ends with one loss. This example adds what training needs: Adam with falling learning rates, several
minibatches per batch, and a loop. Slices may be shorter than 16 steps, because early episodes are.
"""

from __future__ import annotations

import argparse

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import SliceSampler
from torchrl.envs import GymEnv
from torchrl.modules import GRUModule, OneHotCategorical, ProbabilisticActor, ValueOperator, set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import holdfast as hf
from holdfast.integrations.torchrl import RecurrentModule

# The page's numbers, then what it leaves open.
HIDDEN, FRAMES, SLICE_LENGTH, SLICES = 32, 96, 16, 4
MINIBATCHES, ACTOR_RATE, CRITIC_RATE = 8, 1e-3, 5e-3


def make_memory(kind: str, prefix: str):
    """A GRU from `{prefix}_embed` to `{prefix}_features`, with its state in `{prefix}_rs`."""
    in_keys = [f"{prefix}_embed", f"{prefix}_rs", "is_init"]
    out_keys = [f"{prefix}_features", ("next", f"{prefix}_rs")]
    if kind == "holdfast":
        return RecurrentModule(hf.GRU(HIDDEN, HIDDEN), in_keys=in_keys, out_keys=out_keys)
    # The page has "scan" here, which takes about half a second for 64 steps when it is not compiled.
    return GRUModule(HIDDEN, HIDDEN, in_keys=in_keys, out_keys=out_keys, recurrent_backend="pad")


def make_networks(env: GymEnv, kind: str):
    """Actor and critic, each with its own memory."""
    inputs, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]

    def body(prefix: str):
        embed = TensorDictModule(nn.Linear(inputs, HIDDEN), ["observation"], [f"{prefix}_embed"])
        return TensorDictSequential(embed, make_memory(kind, prefix))

    actor = ProbabilisticActor(
        TensorDictSequential(
            body("actor"), TensorDictModule(nn.Linear(HIDDEN, actions), ["actor_features"], ["logits"])
        ),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    return actor, TensorDictSequential(body("critic"), ValueOperator(nn.Linear(HIDDEN, 1), in_keys=["critic_features"]))


class Returns:
    """The return of every finished episode, and the frame it ended at. CartPole pays 1 per step."""

    def __init__(self) -> None:
        self.frames, self.running, self.finished = 0, 0.0, []

    def add(self, data: TensorDictBase) -> None:
        for reward, done in zip(data["next", "reward"].flatten().tolist(), data["next", "done"].flatten().tolist()):
            self.frames += 1
            self.running += reward
            if done:
                self.finished.append((self.frames, self.running))
                self.running = 0.0

    def mean_since(self, frame: float) -> float:
        late = [value for at, value in self.finished if at > frame] or [self.running]
        return sum(late) / len(late)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", choices=["holdfast", "torchrl"], default="holdfast")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    env = GymEnv("CartPole-v1")
    env.set_seed(args.seed)
    actor, critic = make_networks(env, args.memory)
    collector = Collector(
        env, TensorDictSequential(actor, critic), frames_per_batch=FRAMES, total_frames=FRAMES * args.batches,
        auto_register_policy_transforms=True,
    )  # fmt: skip
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(FRAMES),
        sampler=SliceSampler(slice_len=SLICE_LENGTH, strict_length=False),
        batch_size=SLICES * SLICE_LENGTH,
    )
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, deactivate_vmap=True)
    loss_module = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.0)
    # The critic must be quick: as long as its values are too small, every advantage is positive.
    optimizer = torch.optim.Adam(
        [{"params": actor.parameters(), "lr": ACTOR_RATE}, {"params": critic.parameters(), "lr": CRITIC_RATE}]
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, args.batches)

    returns, first_kl = Returns(), None
    for batch, data in enumerate(collector, 1):  # [96], steps of one environment
        returns.add(data)
        buffer.empty()
        buffer.extend(data.exclude("state_value"))
        slices = buffer.sample()  # one after another; is_init is True where each begins
        with set_recurrent_mode(True), torch.no_grad():
            advantage(slices)
        buffer.empty()
        buffer.extend(slices)
        for _ in range(MINIBATCHES):
            with set_recurrent_mode(True):
                losses = loss_module(buffer.sample())
            if first_kl is None:
                first_kl = abs(float(losses["kl_approx"]))  # nothing has been updated yet
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            optimizer.step()
        schedule.step()
        if batch % 20 == 0:
            mean = returns.mean_since(returns.frames - 20 * FRAMES)
            print(f"frames {returns.frames:6d}   mean return since the last line {mean:6.1f}", flush=True)
    collector.shutdown()
    late = returns.mean_since(0.8 * returns.frames)
    print(f"mean return of the last fifth: {late:.1f}")
    with torch.no_grad():
        norm = float(sum(weight.square().sum() for weight in loss_module.parameters()).sqrt())
    return {"first_kl": first_kl, "late_return": late, "weight_norm": norm}


if __name__ == "__main__":
    main()
