"""What one of several ranks does in `test_ranks.py`: play, then update alone, then together with the others."""

from __future__ import annotations

import copy
import os

import torch

from integrations.rsl_rl.arm import Arm, make_runner, play


def update_alone_and_together(settings):
    """How far the weights move in an update of this rank's rollout alone, and of all ranks' together."""
    rank = torch.distributed.get_rank()
    world = os.environ.pop("WORLD_SIZE", None)  # rsl_rl's runner would insist on a GPU
    env = Arm(8, seed=rank)
    alone = make_runner(env=env, seed=0, num_mini_batches=1, num_learning_epochs=1, **settings).alg
    if world is not None:
        os.environ["WORLD_SIZE"] = world
    torch.manual_seed(100 + rank)
    play(alone, env, 12)
    ranks = {"global_rank": rank, "local_rank": rank, "world_size": torch.distributed.get_world_size()}
    actor, critic = copy.deepcopy(alone.actor), copy.deepcopy(alone.critic)
    together = type(alone)(
        actor, critic, alone.storage, multi_gpu_cfg=ranks, num_mini_batches=1, num_learning_epochs=1, **settings
    )
    if rank:  # weights come from rank 0
        with torch.no_grad():
            for p in actor.parameters():
                p.add_(1.0)
    together.broadcast_parameters()
    start = [p.detach().clone() for p in actor.parameters()]
    moves = {"rank": rank}
    for name, alg in (("together", together), ("alone", alone)):
        together._start = alone._start
        alg.update()
        moves[name] = [(p.detach() - q).clone() for p, q in zip(alg.actor.parameters(), start)]
        moves[f"{name} rate"] = alg.learning_rate
    moves["statistics"] = together.actor.obs_normalizer.mean
    return moves
