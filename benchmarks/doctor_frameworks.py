"""Examine recurrent policies of other projects as they are.

    python benchmarks/doctor_frameworks.py rsl_rl
    python benchmarks/doctor_frameworks.py rllib
    python benchmarks/doctor_frameworks.py jaxmarl JaxMARL/baselines/IPPO/ippo_rnn_mpe.py
    python benchmarks/doctor_frameworks.py skrl skrl/examples/gymnasium/torch_gymnasium_pendulumnovel_ppo_lstm.py

The last two take a file of a checkout: of JaxMARL's its network classes are used, of skrl's everything before training.
Runs in the environment of `make test-peers` (JaxMARL's classes need distrax as well). docs/frameworks.md has the results.
"""

from __future__ import annotations

import argparse
import ast
import functools
import sys
import typing
from pathlib import Path
from typing import Any

import torch

from holdfast import doctor
from holdfast.doctor import subjects


def rsl_rl(_: Path | None) -> list[doctor.Subject]:
    """`RNNModel` with its own default sizes, LSTM and GRU."""
    from rsl_rl.algorithms import PPO
    from rsl_rl.models import RNNModel
    from rsl_rl.storage import RolloutStorage
    from tensordict import TensorDict

    obs = TensorDict({"policy": torch.zeros(5, 12)}, [5])
    groups = {"actor": ["policy"], "critic": ["policy"]}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0}
    made = []
    for kind in ("lstm", "gru"):
        actor = RNNModel(obs, groups, "actor", 4, distribution_cfg=gaussian, rnn_type=kind)
        critic = RNNModel(obs, groups, "critic", 1, rnn_type=kind)
        alg = PPO(actor, critic, RolloutStorage("rl", 5, 24, obs, [4]))
        made.append(subjects.RslRl(alg, name=f"RNNModel, {kind}"))
    return made


def rllib(_: Path | None) -> list[doctor.Subject]:
    """The LSTM module among RLlib's examples, with its default sizes."""
    import numpy as np
    from gymnasium import spaces
    from ray.rllib.examples.rl_modules.classes.lstm_containing_rlm import LSTMContainingRLModule

    space = spaces.Box(-1.0, 1.0, (12,), np.float32)
    module = LSTMContainingRLModule(observation_space=space, action_space=spaces.Discrete(4), model_config={})
    return [subjects.RLlib(module)]


def jaxmarl(path: Path | None) -> list[doctor.Subject]:
    """`ScannedRNN` and `ActorCriticRNN` of a script."""
    import distrax
    import flax.linen
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax.linen.initializers import constant, orthogonal

    names: dict[str, Any] = {**vars(typing), "jax": jax, "jnp": jnp, "np": np, "nn": flax.linen, "functools": functools}
    names |= {"distrax": distrax, "constant": constant, "orthogonal": orthogonal}
    body = _parsed(path).body
    classes = [x for x in body if isinstance(x, ast.ClassDef) and x.name in ("ScannedRNN", "ActorCriticRNN")]
    exec(compile(ast.Module(classes, []), str(path), "exec"), names)
    start = functools.partial(names["ScannedRNN"].initialize_carry, hidden_size=64)
    network = names["ActorCriticRNN"](4, config={"FC_DIM_SIZE": 64, "GRU_HIDDEN_DIM": 64})
    variables = network.init(jax.random.key(0), start(2), (jnp.zeros((1, 2, 12)), jnp.zeros((1, 2))))
    return [
        subjects.JAX.linen(
            network,
            variables,
            initial_state=start,
            observation_space=(12,),
            output=lambda rest: (rest[0].logits, rest[1]),
        )
    ]


def skrl(path: Path | None) -> list[doctor.Subject]:
    """The agent of a script, with five environments and with one."""
    made = []
    for count in ("5", "1"):
        sys.argv = [str(path), "--num_envs", count, "--headless", "--eval", "--seed", "0"]
        script = _parsed(path)
        names: dict[str, Any] = {"__name__": "example"}
        exec(compile(ast.Module(script.body[:-1], []), str(path), "exec"), names)  # the last statement trains
        made.append(subjects.Skrl(names["agent"], name=f"PPO_RNN, {count} environments"))
    return made


def _parsed(path: Path | None) -> ast.Module:
    if path is None:
        raise SystemExit("this project's policy is read from a file: pass its path")
    return ast.parse(path.read_text())


PROJECTS = {"rsl_rl": rsl_rl, "rllib": rllib, "jaxmarl": jaxmarl, "skrl": skrl}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", choices=PROJECTS)
    parser.add_argument("path", type=Path, nargs="?", help="the script of a checkout")
    args = parser.parse_args()
    torch.manual_seed(0)
    for subject in PROJECTS[args.project](args.path):
        doctor.examine(subject)  # compiles what is compiled
        for seed in range(3):
            report = doctor.examine(subject, seed=seed)
            causes = [f"{f.severity} {f.cause}" for f in report.findings] or ["no finding"]
            print(f"{subject.name}, seed {seed}: {', '.join(causes)} ({report.seconds:.1f} s)")


if __name__ == "__main__":
    main()
