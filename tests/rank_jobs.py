"""Jobs for several gloo ranks on this machine: `run_ranks(3, job, ...)` gives what `job(...)` returned on each.

The processes come from a fork server that has imported everything already, so that a test pays for it once.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast as hf
from holdfast.algorithms import ppo
from holdfast.algorithms.ppo import PPO, normalize_advantage
from holdfast.distributed.ranks import Ranks, join
from holdfast.envs import make
from holdfast.policies.encoders import Vector
from holdfast.rollout.collector import Collector
from holdfast.rollout.reward_scale import RewardScale
from ppo_parts import make_ppo, update

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["holdfast.training.trainer", "torch.nn.parallel", "torch._dynamo"])


def run_ranks(size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of `size` ranks, in order; an error of any of them is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes, sent = [], [], pickle.dumps(args)
        for rank in range(size):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(target=_work, args=(rank, size, folder, theirs, job, sent), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        results: list[Any] = []
        try:
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(300), f"rank {rank} of {size} gave nothing"
                ok, result = pickle.loads(pipe.recv_bytes())
                assert ok, f"rank {rank} of {size}:\n{result}"
                results.append(result)
        finally:
            for process in processes:
                process.join(10 if len(results) == size else 0)
                process.kill()
        return results


def _work(rank: int, size: int, folder: str, pipe: Any, job: Callable[..., Any], sent: bytes) -> None:
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=size, timeout=timedelta(seconds=280)
        )
        result = job(*pickle.loads(sent))
        dist.barrier()  # nobody leaves while others may still be talking to it
        pipe.send_bytes(pickle.dumps((True, result)))  # by value: the sender is gone when it is read
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def ranks() -> Ranks:
    """This process's place; one rank outside `run_ranks`."""
    return join("cpu")[0]


# --- jobs ------------------------------------------------------------------------------------------------------------


def first_updates(files: list[str], config: hf.TrainConfig, broken: str = "") -> list[dict[str, Any]]:
    """Several problems for the price of one start; `broken`: see `break_ranks`."""
    with break_ranks(broken):
        return [first_update(file, config) for file in files]


def first_updates_broken(file: str, config: hf.TrainConfig) -> dict[str, dict[str, Any]]:
    """One problem, with each thing wrong in turn."""
    return {broken: first_updates([file], config, broken)[0] for broken in BROKEN}


def first_update(file: str, config: hf.TrainConfig) -> dict[str, Any]:
    """PPO on this rank's columns of a stored segment: gradients of each step, metrics, and the weights at the end."""
    mine, stored = ranks(), torch.load(file, weights_only=False)
    policy, segment = stored["policy"], stored["segment"]
    share = mine.share(segment.num_envs)
    segment = segment.select(torch.arange(share.start, share.stop))
    ppo, _ = make_ppo(policy, config, mine)
    gradients: list[torch.Tensor] = []
    step = ppo.optimizer.step

    def spying() -> None:
        gradients.append(torch.cat([p.grad.flatten().clone() for p in policy.parameters()]))
        step()

    ppo.optimizer.step = spying  # type: ignore[method-assign,assignment]
    if "minibatches" in stored:  # which columns of all make up each minibatch: take our part of them
        parts = [
            columns[(columns >= share.start) & (columns < share.stop)] - share.start
            for columns in stored["minibatches"]
        ]
        ppo.minibatches = lambda columns, device: parts  # type: ignore[method-assign]
    metrics = update(ppo, segment)
    weights = torch.cat([p.detach().flatten() for p in policy.parameters()])
    return {"gradients": gradients, "metrics": metrics, "weights": weights}


def update_with(way: str, seed: int, settings: dict[str, Any], policy_options: dict[str, Any]) -> dict[str, Any]:
    """Three updates of one policy, its minibatches "in C" or, since one rank needs it, by "autograd"."""
    mine, num_envs = ranks(), 6 + seed % 2  # of 7 environments the first rank has one more
    config = hf.TrainConfig(**{**dict(num_envs=num_envs, num_steps=16, minibatches=2, epochs=2, seed=seed), **settings})
    torch.manual_seed(seed + 100 * mine.rank)  # engines must start from rank 0's weights
    env = make(config.env, num_envs=len(mine.share(num_envs)))
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, hidden_size=8, **policy_options)
    ppo, engines = make_ppo(policy, config, mine)
    if way == "autograd" and mine.rank == 1:
        policy.core.register_forward_hook(lambda *_: None)
    torch.manual_seed(mine.seed(seed + 7))
    collector = Collector(env, policy, 16, bptt=config.bptt, seed=mine.seed(seed + 3))
    rows = [update(ppo, collector.rollout(), 0.1 * i) for i in range(3)]
    weights = torch.cat([p.detach().flatten() for p in policy.parameters()])
    return {"rows": rows, "weights": weights, "engine": engines.update.engine}


def statistics(observations: torch.Tensor, rewards: torch.Tensor, dones: torch.Tensor, space: Any) -> Any:
    """Normalisers after two updates with this rank's columns of [T, B, ...] data."""
    mine = ranks()
    share = mine.share(rewards.shape[1])
    vector, scale = Vector(space, True), RewardScale(len(share), 0.9)
    for half in (slice(0, 4), slice(4, None)):
        part = slice(share.start, share.stop)
        vector.update(observations[half, part], mine)
        r, d = rewards[half, part], dones[half, part]
        scale.update(r, d, torch.ones_like(d), mine)
    return vector.mean, vector.var, vector.count, scale.mean, scale.var, scale.count


class Stop(hf.Callback):
    """Stops a run after so many updates."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> bool:
        return trainer.update < self.after


def environments_of(trainer: hf.Trainer) -> dict[str, Any]:
    """What each environment of this rank carries: [B, ...] each."""
    collector, env = trainer.collector, trainer.env
    state = {name: leaf.movedim(env.env_dims.get(name, 0), 0) for name, leaf in env.state.items()}
    return {
        **{f"memory {i}": leaf for i, leaf in enumerate(collector.memory.state_dict()["leaves"])},
        **{f"env {name}": leaf for name, leaf in state.items()},
        "obs": collector.adapter.obs,
        "resets": collector.adapter.resets,
        "open return": collector._open_return,
        "scale": trainer.algorithm.reward_scale.open_return,
    }


def train_with_odd_rank(config: hf.TrainConfig, odd: int, other: dict[str, Any]) -> str:
    """Make a trainer whose rank `odd` has other settings; the error of this rank."""
    try:
        hf.Trainer(replace(config, **other) if ranks().rank == odd else config)
    except ValueError as error:
        return str(error)
    return ""


def train(config: hf.TrainConfig, stop: int = 10**9) -> dict[str, Any]:
    """A run, or the beginning of one; what its environments carry then, its weights and result."""
    trainer = hf.Trainer(config, callbacks=[Stop(stop)])
    return _finish(trainer)


def profile(config: hf.TrainConfig) -> str:
    """The table of a profiled run; "" on all ranks but the first."""
    watch = hf.Profile()
    hf.Trainer(config, callbacks=[watch]).run()
    return watch.report


def resume(folder: Path, run_dir: str, updates: int) -> dict[str, Any]:
    """What the environments carry where a run is taken up, and a few updates more in a folder of their own."""
    trainer = hf.Trainer.resume(folder, run_dir=run_dir)
    found = {name: leaf.clone() for name, leaf in environments_of(trainer).items()}
    trainer.callbacks = [Stop(trainer.update + updates)]
    return {**_finish(trainer), "environments": found, "restarted": trainer.episodes_restarted}


def _finish(trainer: hf.Trainer) -> dict[str, Any]:
    result = trainer.run()
    weights = torch.cat([p.detach().flatten() for p in trainer.policy.parameters()])
    environments = environments_of(trainer) if trainer.algorithm.reward_scale is not None else {}
    return {
        "environments": environments,
        "weights": weights,
        "steps": result.steps,
        "mean_return": result.mean_return,
        "seeds": (trainer.collector.seed, int(torch.randint(10**9, ()))),
    }


def train_from_buffer(config: Any, stop: int = 10**9, env: Any = None) -> dict[str, Any]:
    """A run of SAC or R2D2: all weights, those of the target too, and what the buffer of this rank holds."""
    return _from_buffer(hf.Trainer(config, callbacks=[Stop(stop)], env=env))


def resume_from_buffer(folder: Path, total_steps: int | None = None) -> dict[str, Any]:
    more = {} if total_steps is None else {"total_steps": total_steps}
    return _from_buffer(hf.Trainer.resume(folder, **more))


def _from_buffer(trainer: hf.Trainer) -> dict[str, Any]:
    trainer.run()
    algorithm: Any = trainer.algorithm
    networks = (trainer.policy, algorithm.target)
    return {
        "weights": [p.detach().clone() for network in networks for p in network.parameters()],
        "stored": algorithm.buffer.rows["actions"].clone(),
        "gradient_steps": algorithm.gradient_steps,
    }


def train_unevenly(config: Any) -> dict[str, Any]:
    """Episodes of the last rank are truncated after each step, those of others are long."""
    import gymnasium

    last = ranks().rank == ranks().size - 1

    def make_env() -> Any:
        env = gymnasium.make("CartPole-v1", max_episode_steps=1 if last else 500)
        env.unwrapped.theta_threshold_radians = env.unwrapped.x_threshold = 1e9  # type: ignore[attr-defined]
        return env

    return train_from_buffer(config, env=make_env)


def gradient_of_sequences(seed: int) -> list[torch.Tensor]:
    """Gradients of R2D2's loss on this rank's part of 8 sequences; ranks begin with the weights of the first."""
    from gymnasium import spaces

    from holdfast.algorithms.base import RunContext
    from holdfast.algorithms.r2d2 import R2D2
    from holdfast.engines.choose import Engines
    from holdfast.rollout.segment import Segment

    mine, cpu, space = ranks(), torch.device("cpu"), spaces.Discrete(3)
    torch.manual_seed(seed * mine.rank)
    config = hf.R2D2Config(
        hidden_size=8, head_sizes=(8,), num_envs=8, num_steps=8, burn_in=2, train_length=7, prioritized=False
    )
    policy = R2D2.make_policy(config, spaces.Box(-1, 1, (3,)), space)
    algorithm = R2D2(policy, config, RunContext(mine, cpu, 1, Engines(config, cpu, mine), 8, space))
    random, none = torch.Generator().manual_seed(5), torch.zeros(10, 8, dtype=torch.bool)
    rows = Segment(
        obs=torch.randn(10, 8, 3, generator=random), actions=torch.randint(3, (10, 8), generator=random), resets=none,
        rewards=torch.randn(10, 8, generator=random), terminated=none, truncated=none, valid=~none,
        start_state=policy.initial_state(8),
    )  # fmt: skip
    share = mine.share(8)
    algorithm.learn(rows.select(torch.arange(share.start, share.stop)))
    return [p.grad.clone() for p in policy.parameters() if p.grad is not None]


class Area(hf.Callback):
    """Area under the learning curve: a step's mean reward, over all updates and the environments of this rank."""

    def __init__(self) -> None:
        self.rewards: list[float] = []

    def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
        self.rewards.append(float(segment.rewards.mean()))


CURVE = dict(
    env="holdfast/RepeatPreviousEasy-v0", env_kwargs={"k": 1}, gamma=0.5, hidden_size=8, num_envs=12, num_steps=8,
    minibatches=1, epochs=2, learning_rate=0.03, total_steps=12 * 8 * 20, replay_check_every=0, checkpoint_every=0,
    final_eval_episodes=1, tensorboard=False, quiet=True, device="cpu", threads=1,
)  # fmt: skip
"""A task on which the curve depends on how much is collected for an update.

Area under the curve in thousandths, mean ± deviation over 40 seeds of one process: -4.0 ± 1.3 with its 12 environments,
-5.7 ± 1.5 with 6, -7.5 ± 1.4 with 3; -9.7 for a policy that is not trained."""


def areas(seeds: range, broken: str = "", **settings: Any) -> list[float]:
    """The area under the curve of a CURVE per seed, over all ranks; `broken` does one thing wrong: `break_ranks`."""
    config = hf.TrainConfig(**{**CURVE, **settings})
    with tempfile.TemporaryDirectory() as folder, break_ranks(broken):
        found = []
        for seed in seeds:
            area = Area()
            hf.Trainer(replace(config, seed=seed, run_dir=f"{folder}/{seed}"), callbacks=[area]).run()
            mine = 1000 * sum(area.rewards) / len(area.rewards)
            found.append([a for (a,) in ranks().all_gather([mine], torch.device("cpu"))])
    return [sum(of_ranks) / len(of_ranks) for of_ranks in found]


BROKEN = (
    "own gradients",
    "own advantages",
    "unweighted",
)  # of each rank; ranks that count alike, however few their steps


@contextmanager
def break_ranks(how: str) -> Iterator[None]:
    """Train as several ranks must not: with the "same seeds" on all, or as BROKEN says."""
    with pytest.MonkeyPatch.context() as patch:
        if how == "same seeds":
            patch.setattr(Ranks, "seed", lambda self, seed, *salt: seed)
        elif how == "own gradients":
            patch.setattr("holdfast.engines.autograd.average_gradient", lambda gradient, ranks: None)
        elif how == "own advantages":
            patch.setattr(ppo, "normalize_advantage", lambda segment, ranks: normalize_advantage(segment))
        elif how == "unweighted":
            patch.setattr(PPO, "_rank_weights", lambda self, valid, minibatches: [1.0] * len(minibatches))
        else:
            assert not how, how
        yield
