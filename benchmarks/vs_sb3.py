"""Holdfast and sb3-contrib's RecurrentPPO, alternately in one process: speed and learning.

    python benchmarks/vs_sb3.py                     # speed, then learning, then time to solve
    python benchmarks/vs_sb3.py --part speed

Speed and learning: velocity-masked CartPole-v1 with the same hyperparameters: 8 environments x 128 steps, minibatches of
128 (one environment's 128 steps with full BPTT), 10 epochs, separate actor and critic LSTM, heads 64-64, Adam at 3e-4,
fp32, one thread. Steps per CPU-second of this process (time.process_time).
Time to solve: RepeatPreviousEasy, CPU-seconds until the mean return of 100 episodes is 0.9. sb3-contrib runs at hidden 64,
8 x 128, batch 1024, 10 epochs, with the better of two learning rates, and is stopped after 900 CPU-seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium as gym
import numpy as np
import torch

RESULTS = Path(__file__).parent / "results" / "vs_sb3.json"


# --- Holdfast ---------------------------------------------------------------------------------------------------------


def holdfast_run(config: Any, until: Any) -> dict[str, Any]:
    """Train until `until(steps, recent_returns, cpu_seconds)`. Returns CPU-seconds, steps, returns of finished episodes."""
    from holdfast import envs
    from holdfast.algorithms.base import Progress, RunContext
    from holdfast.algorithms.ppo import PPO
    from holdfast.distributed.ranks import ALONE
    from holdfast.engines.choose import Engines  # which chooses as for the trainer

    torch.manual_seed(config.seed)
    env = envs.make(config.env, config.num_envs, mask_velocity=config.mask_velocity)
    policy = PPO.make_policy(config, env.single_observation_space, env.single_action_space)
    device = torch.device("cpu")
    engines = Engines(config, device)
    ppo = PPO(policy, config, RunContext(ALONE, device, config.seed, engines, config.num_envs, env.single_action_space))
    collector = engines.collector(env, policy, ppo, config.seed)
    returns: list[tuple[int, float]] = []
    steps, began = 0, time.process_time()
    while True:
        segment = collector.rollout()
        ppo.prepare(segment)
        steps += segment.resets.numel()
        returns += [(steps, r) for r in segment.episode_returns]
        fraction = min(1.0, steps / config.total_steps)
        ppo.start_update(segment, Progress(steps, config.total_steps, 0, 1, fraction))()
        seconds = time.process_time() - began
        if until(steps, [r for _, r in returns[-100:]], seconds):
            break
    env.close()
    return {"steps": steps, "cpu_seconds": seconds, "returns": returns}


def cartpole_config(hidden: int, seed: int, total: int) -> Any:
    import holdfast as hf

    return hf.TrainConfig(
        env="CartPole-v1", mask_velocity=True, hidden_size=hidden, critic_core="separate", encoder_sizes=(), head_sizes=(64, 64),
        num_envs=8, num_steps=128, minibatches=8, epochs=10, learning_rate=3e-4, lr_schedule="constant", entropy_coef=0.0,
        gamma=0.99, gae_lambda=0.95, clip_range=0.2, value_coef=0.5, max_grad_norm=0.5, total_steps=total, seed=seed,
    )  # fmt: skip


# --- sb3-contrib ------------------------------------------------------------------------------------------------------


def sb3_run(make_env: Any, seed: int, until: Any, **options: Any) -> dict[str, Any]:
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

    class Watch(BaseCallback):
        def __init__(self) -> None:
            super().__init__()
            self.returns: list[tuple[int, float]] = []

        def _on_step(self) -> bool:
            self.returns += [(self.num_timesteps, i["episode"]["r"]) for i in self.locals["infos"] if "episode" in i]
            return True

    class Stop(Exception):
        pass

    watch = Watch()
    vec = VecMonitor(DummyVecEnv([make_env] * 8))
    model = RecurrentPPO("MlpLstmPolicy", vec, n_steps=128, n_epochs=10, seed=seed, device="cpu", **options)
    train, began = model.train, time.process_time()

    def train_and_look() -> None:
        train()
        if until(model.num_timesteps, [r for _, r in watch.returns[-100:]], time.process_time() - began):
            raise Stop

    model.train = train_and_look
    with contextlib.suppress(Stop):
        model.learn(10**9, callback=watch)
    return {"steps": model.num_timesteps, "cpu_seconds": time.process_time() - began, "returns": watch.returns}


def masked_cartpole() -> gym.Env[Any, Any]:
    from holdfast.envs import VelocityMask

    return VelocityMask(gym.make("CartPole-v1"))


def popgym_repeat_previous() -> gym.Env[Any, Any]:
    from holdfast.envs.bridge import find_spec

    return gym.make(find_spec("popgym:RepeatPreviousEasy"))


# --- the three parts --------------------------------------------------------------------------------------------------


def speed(steps: int, repeats: int) -> list[dict[str, Any]]:
    """Steps per CPU-second: medians over alternating runs."""
    rows = []
    for hidden in (64, 256):
        ours, theirs = [], []
        for seed in range(1, repeats + 1):
            r = holdfast_run(cartpole_config(hidden, seed, steps), lambda n, _r, _s: n >= steps)
            ours.append(r["steps"] / r["cpu_seconds"])
            r = sb3_run(
                masked_cartpole, seed, lambda n, _r, _s: n >= steps, batch_size=128,
                policy_kwargs=dict(lstm_hidden_size=hidden, shared_lstm=False, enable_critic_lstm=True),
            )  # fmt: skip
            theirs.append(r["steps"] / r["cpu_seconds"])
        a, b = float(np.median(ours)), float(np.median(theirs))
        pairs = [x / y for x, y in zip(ours, theirs)]
        rows.append(
            {"hidden": hidden, "holdfast": a, "sb3_contrib": b, "ratio": a / b, "steps": steps, "repeats": repeats,
             "lowest_pair": min(pairs), "highest_pair": max(pairs)}
        )  # fmt: skip
        print(
            f"hidden {hidden:3d}: Holdfast {a:7.0f}, sb3-contrib {b:6.0f} steps per CPU-second: {a / b:.1f}x "
            f"(pairs of runs {min(pairs):.1f}x to {max(pairs):.1f}x)",
            flush=True,
        )
    return rows


def learning(steps: int, seeds: int, hidden: int = 64) -> dict[str, Any]:
    """Mean return of the episodes finished in the last fifth of the same number of steps."""

    def tail(r: dict[str, Any]) -> float:
        return float(np.mean([x for n, x in r["returns"] if n > 0.8 * steps]))

    ours, theirs = [], []
    for seed in range(1, seeds + 1):
        ours.append(tail(holdfast_run(cartpole_config(hidden, seed, steps), lambda n, _r, _s: n >= steps)))
        theirs.append(
            tail(
                sb3_run(masked_cartpole, seed, lambda n, _r, _s: n >= steps, batch_size=128,
                        policy_kwargs=dict(lstm_hidden_size=hidden, shared_lstm=False, enable_critic_lstm=True))
            )
        )  # fmt: skip
        print(f"seed {seed}: Holdfast {ours[-1]:.1f}, sb3-contrib {theirs[-1]:.1f}", flush=True)
    row = {"steps": steps, "hidden": hidden, "holdfast": ours, "sb3_contrib": theirs}
    print(f"mean return after {steps} steps: Holdfast {np.mean(ours):.1f}, sb3-contrib {np.mean(theirs):.1f}")
    return row


def solve(cut: float, seed: int = 1) -> dict[str, Any]:
    """CPU-seconds to a mean return of 0.9 on RepeatPreviousEasy."""
    import holdfast as hf

    def done(_n: int, recent: list[float], seconds: float) -> bool:
        return (len(recent) == 100 and float(np.mean(recent)) >= 0.9) or seconds > cut

    config = hf.TrainConfig.preset("repeat-previous-easy", seed=seed)
    ours = holdfast_run(config, done)
    print(f"Holdfast: {ours['cpu_seconds']:.1f} CPU-seconds, {ours['steps']} steps", flush=True)
    row: dict[str, Any] = {"holdfast": {k: ours[k] for k in ("steps", "cpu_seconds")}, "sb3_contrib": {}, "cut": cut}
    best = None
    for rate in (1e-3, 3e-4):
        limit = cut if best is None else best
        r = sb3_run(
            popgym_repeat_previous, seed,
            lambda n, recent, s, limit=limit: (len(recent) == 100 and float(np.mean(recent)) >= 0.9) or s > limit,
            batch_size=1024, learning_rate=rate, policy_kwargs=dict(lstm_hidden_size=64),
        )  # fmt: skip
        reached = float(np.mean([x for _, x in r["returns"][-100:]])) >= 0.9
        print(
            f"sb3-contrib, learning rate {rate}: {r['cpu_seconds']:.0f} CPU-seconds, {r['steps']} steps, reached: {reached}",
            flush=True,
        )
        row["sb3_contrib"][str(rate)] = {"steps": r["steps"], "cpu_seconds": r["cpu_seconds"], "reached": reached}
        if reached:
            best = r["cpu_seconds"] if best is None else min(best, r["cpu_seconds"])
    row["ratio_at_least"] = (best or cut) / ours["cpu_seconds"]
    print(f"at least {row['ratio_at_least']:.1f}x fewer CPU-seconds")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["all", "speed", "learning", "solve"], default="all")
    parser.add_argument("--speed-steps", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--learning-steps", type=int, default=60_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cut", type=float, default=900.0, help="CPU-seconds after which sb3-contrib is stopped")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results["machine"] = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": 1}
    if args.part in ("all", "speed"):
        results["speed"] = speed(args.speed_steps, args.repeats)
    if args.part in ("all", "learning"):
        results["learning"] = learning(args.learning_steps, args.seeds)
    if args.part in ("all", "solve"):
        results["solve"] = solve(args.cut)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
