"""The robot of `examples/rsl_rl_robot.py`, small models and a runner, for the tests of rsl_rl's integration."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path

import torch

PATH = Path(__file__).resolve().parents[3] / "examples" / "rsl_rl_robot.py"


def example():
    spec = importlib.util.spec_from_file_location("rsl_rl_robot", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLE = example()
Arm = EXAMPLE.Arm


def make_runner(ours=True, rnn_type="lstm", num_envs=8, seed=0, device="cpu", env=None, log_dir=None, **changes):
    """`changes`: of the algorithm's settings; `actor` and `critic` change those of the models, None removes one."""
    from rsl_rl.runners import OnPolicyRunner

    torch.manual_seed(seed)
    cfg = EXAMPLE.train_cfg(ours, rnn_type, units=8)
    cfg["num_steps_per_env"] = changes.pop("num_steps", 12)
    for name in ("actor", "critic"):
        cfg[name]["hidden_dims"] = [8]
        merged = cfg[name] | changes.pop(name, {})
        cfg[name] = {key: value for key, value in merged.items() if value is not None}
    cfg["torch_compile_mode"] = changes.pop("torch_compile_mode", None)
    cfg["obs_groups"] |= changes.pop("obs_groups", {})
    cfg["algorithm"] |= {"num_learning_epochs": 2, "num_mini_batches": 2, **changes}
    env = Arm(num_envs, device=device, seed=seed) if env is None else env
    with contextlib.redirect_stdout(io.StringIO()):
        return OnPolicyRunner(env, cfg, log_dir=log_dir, device=device)


def learn(runner, iterations):
    with contextlib.redirect_stdout(io.StringIO()):
        runner.learn(iterations)
    return runner


@torch.inference_mode()
def play(alg, env, steps):
    """A rollout as `OnPolicyRunner.learn` plays it, up to the returns; the last observations."""
    obs = env.get_observations()
    for _ in range(steps):
        actions = alg.act(obs)
        obs, rewards, dones, extras = env.step(actions)
        alg.process_env_step(obs, rewards, dones, extras)
    alg.compute_returns(obs)
    return obs
