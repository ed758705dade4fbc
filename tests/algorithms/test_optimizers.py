"""Optimizers and schedules by name: what a step does by hand, rates of the memory, saving and resuming, names in files."""

from __future__ import annotations

import json
import sys
from copy import deepcopy

import pytest
import torch

import holdfast as hf
from holdfast.algorithms.optimizers import check_state, clipped_step, make_optimizer, restore
from holdfast.algorithms.ppo import ClippedLoss
from holdfast.cli import main
from holdfast.config import config_class, imports
from holdfast.engines.autograd import Minibatches
from holdfast.kernels.cpu import recurrence as native
from holdfast.runs.checkpoint import CheckpointError
from ppo_parts import make_ppo, update
from whole_runs import record

MODULE = """
import torch

class Drifting(torch.optim.Optimizer):
    '''Momentum, and a size of steps that it moves itself, as learning-rate-free optimizers do.'''

    def __init__(self, groups):
        super().__init__(groups, {"size": 1.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["size"] *= 0.9
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["count"], state["momentum"] = 0, torch.zeros_like(p)
                    state["count"] += 1
                    state["momentum"].mul_(0.5).add_(p.grad)
                    p.add_(state["momentum"], alpha=-group["lr"] * group["size"])

def nothing(groups):
    return list(groups)

def thirds(done):
    return 3.0 if done < 0.5 else 0.5

def below(done):
    return -1
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that is not imported yet, in the current folder."""
    name = f"optimizers_of_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return name


def settings(folder, algorithm="ppo", **more):
    if algorithm in ("sac", "r2d2"):
        more = dict(warmup_steps=0, update_ratio=0.1, buffer_size=1000, train_length=8, batch_size=4, burn_in=0, **more)
    else:
        more = {"minibatches": 2, "epochs": 2, **more}
    return config_class(algorithm)(
        env="holdfast/RepeatPreviousEasy-v0", core="gru", hidden_size=8, num_envs=4, num_steps=16, seed=5, quiet=True, threads=1,
        tensorboard=False, final_eval_episodes=1, run_dir=str(folder), device="cpu", **{"total_steps": 256, **more},
    )  # fmt: skip


def make(**more):
    """A small policy, a segment and the PPO of a config."""
    torch.manual_seed(0)
    config = hf.PPOConfig(num_envs=4, num_steps=8, **{"minibatches": 2, **more})
    env = hf.envs.make("holdfast/TMaze-v0", 4, env_kwargs={"length": 3})
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "gru", 8)
    return policy, hf.Collector(env, policy, 8, seed=1).rollout(), *make_ppo(policy, config)


def weights(trainer):
    return [p.detach().clone() for p in trainer.policy.parameters()]


def made(parameters, name, **more):
    """An optimizer with the rate 0.1."""
    return make_optimizer(
        [{"params": list(parameters), "lr": 0.1}], hf.PPOConfig(optimizer=name, adam_eps=1e-12, **more)
    )


def matrix_and_vector():
    return torch.nn.Parameter(torch.tensor([[2.0, 1.0], [0.0, 2.0]])), torch.nn.Parameter(torch.tensor([1.0, -1.0]))


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_the_memory_moves_with_its_own_rate():
    policy, segment, ppo, _ = make(
        learning_rate=0.1, memory_learning_rate=0.003, adam_eps=1e-20, epochs=1, minibatches=1
    )
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    assert update(ppo, segment, 0.5)["train/learning_rate"] == pytest.approx(0.05)
    moved = {"core": set(), "other": set()}
    for name, p in policy.named_parameters():
        steps = (p.detach() - before[name]).abs()[p.grad != 0]  # Adam's first step is the rate, whatever the gradient
        moved["core" if name.startswith("core") else "other"] |= {round(float(x), 5) for x in steps.flatten()}
    assert moved == {"core": {0.0015}, "other": {0.05}}


@pytest.mark.parametrize("name", ["ppo", "pqn", "sac", "r2d2"])
def test_every_algorithm_gives_the_memory_its_rate_in_the_order_of_the_policy(name, tmp_path):
    optimizers = []
    for more in ({}, {"memory_learning_rate": 0.5}):
        algorithm = hf.Trainer(settings(tmp_path, name, learning_rate=0.25, **more)).algorithm
        found = getattr(algorithm, "optimizers", None) or [algorithm.optimizer]
        optimizers.append(found)
        of_core = {id(p) for p in algorithm.policy.core.parameters()}
        for group in (group for optimizer in found for group in optimizer.param_groups):
            for p in group["params"]:
                assert group["lr"] == (0.5 if more and id(p) in of_core else 0.25)
    for one, other in zip(*optimizers):
        shapes = [[p.shape for group in o.param_groups for p in group["params"]] for o in (one, other)]
        assert shapes[0] == shapes[1] and len(one.param_groups) == 1


def test_adamw_lets_matrices_decay_and_nothing_else():
    matrix, vector = matrix_and_vector()
    optimizer = made([vector, matrix], "adamw", weight_decay=0.5)
    for p in (matrix, vector):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.allclose(matrix, torch.tensor([[1.9, 0.95], [0.0, 1.9]]))  # x (1 - 0.1 x 0.5)
    assert torch.equal(vector, torch.tensor([1.0, -1.0]))


def rounded(x):
    """To bfloat16, in which torch computes Muon's steps."""
    return float(torch.tensor(x).bfloat16())


def test_muon_steps_matrices_by_its_rule_and_the_rest_as_adamw():
    matrix, vector = matrix_and_vector()
    optimizer = made([vector, matrix], "muon", weight_decay=0.5)
    matrix.grad, vector.grad = torch.tensor([[0.0, 7.0], [7.0, 0.0]]), torch.tensor([5.0, -0.01])
    optimizer.step()
    size = rounded(0.5**0.5)  # both singular values, once the norm is 1
    for _ in range(5):  # Newton-Schulz brings them near 1: 3.4445 s - 4.775 s^3 + 2.0315 s^5
        square = rounded(size**2)
        size = rounded(3.4445 * size + rounded(-4.775 * square + 2.0315 * square**2) * size)
    turned = torch.tensor([[0.0, size], [size, 0.0]])
    expected = (
        torch.tensor([[1.9, 0.95], [0.0, 1.9]]) - 0.1 * 0.2 * 2**0.5 * turned
    )  # scaled to the size of Adam's steps
    torch.testing.assert_close(matrix.detach(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(vector.detach(), torch.tensor([0.9, -0.9]))


def test_muon_takes_filters_and_scalars_alone():
    filters, scalar = torch.nn.Parameter(torch.ones(2, 1, 3, 3)), torch.nn.Parameter(torch.ones(()))
    optimizer = made([filters, scalar], "muon", weight_decay=0.5)
    filters.grad, scalar.grad = torch.zeros_like(filters), torch.zeros_like(scalar)
    optimizer.step()
    assert torch.allclose(filters, torch.tensor(0.95)) and float(scalar) == 1.0


@pytest.mark.parametrize("name", ["adam", "adamw", "muon", "torch.optim:SGD"])
def test_gradients_are_clipped_and_steps_that_are_not_finite_are_left_out(name):
    steps = []
    for size in (300.0, 0.3):
        matrix, vector = matrix_and_vector()
        optimizer = made([matrix, vector], name, weight_decay=0.0)
        matrix.grad, vector.grad = torch.zeros(2, 2), torch.tensor([size, 0.0])
        clipped_step(optimizer, torch.tensor(size), 0.3, torch.tensor(0.0))
        steps.append(float(1 - vector[0]))
        before = deepcopy(optimizer.state_dict())
        clipped_step(optimizer, torch.tensor(torch.inf), 0.3, torch.tensor(1.0))
        assert str(optimizer.state_dict()) == str(before)
    assert steps[0] == pytest.approx(0.03 if "SGD" in name else 0.1, rel=1e-5) and steps[0] == pytest.approx(
        steps[1], rel=1e-5
    )


# --- runs -------------------------------------------------------------------------------------------------------------


PAIRS = [("ppo", "adamw"), ("pqn", "adamw"), ("sac", "adamw"), ("r2d2", "adamw"), ("ppo", "muon"), ("sac", "muon")]


@pytest.mark.parametrize(("name", "optimizer"), PAIRS)
def test_every_algorithm_trains_and_resumes_to_the_same_weights(name, optimizer, tmp_path):
    more = dict(optimizer=optimizer, lr_schedule="constant")
    if name == "ppo":
        more |= dict(clip_schedule="constant", entropy_schedule="constant")
    if name == "pqn":
        more |= dict(epsilon_start=0.1, epsilon_end=0.1)
    whole = hf.Trainer(settings(tmp_path / "whole", name, **more))
    first = weights(whole)
    whole.run()
    assert not all(torch.equal(a, b) for a, b in zip(first, weights(whole)))
    hf.Trainer(settings(tmp_path / "part", name, total_steps=128, **more)).run()
    again = hf.Trainer.resume(tmp_path / "part", total_steps=256)
    again.run()
    assert all(torch.equal(a, b) for a, b in zip(weights(again), weights(whole)))
    with pytest.raises(ValueError, match="optimizer='adam' cannot change when a run is resumed"):
        hf.Trainer.resume(tmp_path / "part", optimizer="adam")


class Crash(hf.Callback):
    def on_update_end(self, trainer, row):
        if trainer.update == 3:
            raise RuntimeError("killed here")


@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_an_optimizer_and_a_schedule_of_ones_own_continue_where_a_run_was_killed(name, module, tmp_path):
    more = dict(optimizer=f"{module}:Drifting", lr_schedule=f"{module}:thirds", learning_rate=0.01, checkpoint_every=2)
    whole = hf.Trainer(settings(tmp_path / "whole", name, **more))
    whole.run()
    with pytest.raises(RuntimeError, match="killed here"):
        hf.Trainer(settings(tmp_path / "killed", name, **more), callbacks=[Crash()]).run()
    again = hf.Trainer.resume(tmp_path / "killed", allow_imports=True)
    again.run()
    assert record(tmp_path / "killed") == record(tmp_path / "whole")
    assert all(torch.equal(a, b) for a, b in zip(weights(again), weights(whole)))
    rates = [float(row["train/learning_rate"]) for row in record(tmp_path / "whole")]
    assert rates == pytest.approx([0.03, 0.03, 0.005, 0.005])


def test_another_rate_of_the_memory_fits_a_saved_state(tmp_path):
    trainer = hf.Trainer(settings(tmp_path, optimizer="muon"))
    trainer.run()
    again = hf.Trainer.resume(tmp_path, memory_learning_rate=1e-5, total_steps=512)
    moments = [[t.optimizer.state[p] for p in t.policy.parameters()] for t in (trainer.algorithm, again.algorithm)]
    for one, other in zip(*moments):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert {group["lr"] for group in again.algorithm.optimizer.param_groups} == {1e-5, trainer.config.learning_rate}


def test_updates_in_c_leave_the_step_to_other_optimizers(tmp_path):
    found = []
    for accelerators in ("on", "off"):
        more = dict(optimizer="adamw", memory_learning_rate=1e-4, weight_decay=0.1, accelerators=accelerators)
        trainer = hf.Trainer(settings(tmp_path / accelerators, **more))
        trainer.run()
        found.append(torch.cat([p.flatten() for p in weights(trainer)]))
        if native.in_use() and accelerators == "on":
            assert trainer.engines["update"] == "C, without autograd"
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


def test_what_cannot_be_captured_goes_through_autograd_on_a_gpu():
    for name, because in {"adamw": "", "muon": "steps of the optimizer muon are not captured"}.items():
        _, segment, ppo, engines = make(optimizer=name)
        engines.on_gpu = True  # as if
        ppo.engine_for._choose(4, masked=False, loss=ClippedLoss())
        assert engines.update.because == because
    assert type(ppo.engine_for(segment, ClippedLoss())) is Minibatches


# --- states of a file -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "adamw", "muon", "torch.optim:RMSprop"])
def test_a_state_is_checked_against_what_the_optimizer_keeps(name):
    matrix, vector = matrix_and_vector()
    optimizer, config = made([matrix, vector], name), hf.PPOConfig(optimizer=name)
    check_state(deepcopy(optimizer.state_dict()), optimizer, config)  # before the first step
    matrix.grad, vector.grad = torch.ones_like(matrix), torch.ones_like(vector)
    optimizer.step()
    saved = deepcopy(optimizer.state_dict())
    check_state(saved, optimizer, config)
    other = made(matrix_and_vector(), name)
    restore(other, saved, config)
    assert str(other.state_dict()) == str(saved)
    for index, state in saved["state"].items():
        for key in state:
            for bad in ("missing", "shape", "dtype"):
                damaged = deepcopy(saved)
                value = damaged["state"][index].pop(key)
                if bad != "missing":
                    damaged["state"][index][key] = value.double() if bad == "dtype" else torch.zeros(3, 3)
                with pytest.raises(ValueError, match=rf"optimizer state {index}.* {key}"):
                    check_state(damaged, optimizer, config)
    saved["state"][7] = saved["state"][0]
    with pytest.raises(ValueError, match="expected an integer from 0 to 1"):
        check_state(saved, optimizer, config)


# --- names ------------------------------------------------------------------------------------------------------------


def test_what_a_name_gives_must_fit(module, tmp_path):
    with pytest.raises(TypeError, match=r"made a list, expected a torch.optim.Optimizer"):
        hf.Trainer(settings(tmp_path / "a", optimizer=f"{module}:nothing"))
    with pytest.raises(ValueError, match=r"below' gave -1 at 0, expected a number from 0 on"):
        hf.Trainer(settings(tmp_path / "b", lr_schedule=f"{module}:below")).run()
    with pytest.raises(
        ValueError, match="optimizer='adams' must be one of adam, adamw, muon, or my_module:MyOptimizer"
    ):
        hf.PPOConfig(optimizer="adams")
    with pytest.raises(ValueError, match="lr_schedule='step' must be one of constant, linear, cosine, or my_module:"):
        hf.R2D2Config(lr_schedule="step")
    with pytest.raises(ValueError, match=r'the class SGD, expected a name: optimizer="my_module:MyOptimizer"$'):
        hf.PPOConfig(optimizer=torch.optim.SGD)


def test_a_file_that_names_one_needs_permission_to_train_and_none_to_play(module, tmp_path, capsys):
    schedule = hf.PPOConfig(lr_schedule=f"{module}:thirds")
    with pytest.raises(imports.ImportNotAllowedError, match=rf"names schedule '{module}:thirds'"):
        imports.require_allowed(schedule, tmp_path, allowed=False)
    imports.require_allowed(schedule, tmp_path, allowed=False, training=False)
    config = settings(tmp_path / "run", total_steps=64, optimizer=f"{module}:Drifting")
    (tmp_path / "named.json").write_text(json.dumps(config.to_dict()))
    arguments = ["train", "--config", "named.json", "--run-dir", "run"]
    assert main(arguments) == 2
    assert f"the code of the module '{module}'; if you trust this file, add --allow-imports" in capsys.readouterr().err
    assert main([*arguments, "--allow-imports"]) == 0
    sys.modules.pop(module)
    assert main(["train", "--resume", "run", "--total-steps", "128"]) == 2
    assert "add --allow-imports" in capsys.readouterr().err
    hf.load("run")
    assert main(["eval", "run", "--episodes", "1"]) == 0
    assert module not in sys.modules
    assert main(["train", "--resume", "run", "--total-steps", "128", "--allow-imports"]) == 0


def test_an_optimizer_of_torch_needs_no_permission(tmp_path):
    hf.Trainer(settings(tmp_path, optimizer="torch.optim:RMSprop", total_steps=64)).run()
    hf.Trainer.resume(tmp_path, total_steps=128).run()


def test_a_checkpoint_of_another_optimizer_is_refused_in_one_line(tmp_path):
    from holdfast.runs import checkpoint

    hf.Trainer(settings(tmp_path, total_steps=64)).run()
    file = checkpoint.find(tmp_path)
    saved = checkpoint.load(file)
    saved["config"]["optimizer"] = "muon"
    checkpoint.save(file, saved)
    with pytest.raises(CheckpointError, match="optimizer state 0 has no momentum_buffer"):
        hf.Trainer.resume(tmp_path)


def test_a_name_of_a_run_says_its_optimizer():
    assert hf.PPOConfig(optimizer="muon").automatic_name == "lstm-muon-seed1"
