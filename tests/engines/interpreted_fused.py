"""Runs the fused minibatch and the fused step of a rollout in Triton's interpreter on the CPU; prints errors as JSON.

A script of its own, run by triton_interpreter.run (TRITON_INTERPRET=1, `tests` on the path). It does not set the variable itself,
because pytest imports this file to look for doctests.
"""

import copy
import json
import sys
from typing import Any

import torch
from gymnasium import spaces

import holdfast as hf
import triton_interpreter
from holdfast.algorithms.ppo import ClippedLoss, LossSettings, in_loss_units
from holdfast.engines.fused_policy import FusedPolicy, FusedSteps
from holdfast.engines.fused_update import FusedMinibatches
from holdfast.rollout.segment import Segment
from ppo_parts import terms_of

T, B, COLUMNS = 5, 9, 6
FOUND_BY_ADDRESS: list[Any] = []
"""Tensors that kernels read and write through a table."""
VECTOR = spaces.Box(-1, 1, (3,))
ACTIONS = {
    "one choice": spaces.Discrete(4, start=2),
    "several choices": spaces.MultiDiscrete([3, 2, 5]),
    "bits": spaces.MultiBinary(4),
    "numbers": spaces.Box(-2, 3, (2,)),
    "27 choices": spaces.Discrete(27),
    "two times 12 choices": spaces.MultiDiscrete([12, 12]),
    "16 bits": spaces.MultiBinary(16),
}
CASES: dict[str, dict[str, Any]] = {
    "one choice": {},
    "one choice, dummy steps": {"all_valid": False, "settings": LossSettings(clip_value=0.1)},
    "one choice, normalized values": {"normalize_value": True, "obs": spaces.MultiDiscrete([3, 4])},
    "several choices": {"core": "gru", "settings": LossSettings(entropy_coef=0.2)},
    "bits": {"core": "mingru", "obs": VECTOR, "normalize_obs": True},
    "numbers": {"obs": VECTOR, "activation": "relu"},
    "numbers, no memory": {"obs": VECTOR, "core": None, "encoder_sizes": ()},
    "numbers, in units of their bounds": {"scale_actions": True, "obs": spaces.Dict({"a": VECTOR, "b": spaces.Discrete(3)})},
    "27 choices": {"obs": spaces.MultiDiscrete([9, 5])},
    "two times 12 choices": {
        "normalize_value": True, "all_valid": False,
        "obs": spaces.Dict({"obs": spaces.Discrete(3), "prev_action": spaces.MultiDiscrete([12, 12])}),
    },
    "16 bits": {"core": "gru", "obs": spaces.Dict({"obs": spaces.Discrete(2), "prev_action": spaces.Discrete(4, start=1)})},
    "one choice, after three parts": {
        "activation": "relu", "obs": spaces.Dict({"a": spaces.MultiDiscrete([2, 3]), "b": VECTOR, "c": spaces.Discrete(2)}),
    },
    "one choice, after two vectors": {"normalize_obs": True, "obs": spaces.Dict({"a": VECTOR, "b": VECTOR})},
}  # fmt: skip


def make_policy(name: str, case: dict[str, Any], seed: int) -> hf.ActorCritic:
    torch.manual_seed(seed)
    options = {
        key: case[key]
        for key in ("normalize_value", "normalize_obs", "activation", "scale_actions", "encoder_sizes")
        if key in case
    }
    policy = hf.ActorCritic(
        case.get("obs", spaces.Discrete(4)), ACTIONS[name.split(",")[0]], core=case.get("core", "lstm"), hidden_size=24,
        initial_std=0.7, **options,
    )  # fmt: skip
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.2 * torch.randn_like(p))
    if policy.normalizes:
        seen = observations(policy.observation_space, 50)
        policy.update_normalizer(hf.state.tree_map(lambda x: 2 * x + 1, seen))
    if policy.value_scale is not None:
        policy.update_value_scale(3 * torch.randn(50) + 2)
    return policy


def observations(space: spaces.Space[Any], *shape: int) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: observations(part, *shape) for key, part in space.items()}
    if isinstance(space, spaces.Box):
        return torch.randn(*shape, *space.shape)
    sizes = torch.tensor(space.nvec if isinstance(space, spaces.MultiDiscrete) else [space.n])
    numbers = (torch.rand(*shape, len(sizes)) * sizes).long()
    if isinstance(space, spaces.Discrete):
        numbers += int(space.start)
    return numbers if isinstance(space, spaces.MultiDiscrete) else numbers.squeeze(-1)


def played(policy: hf.ActorCritic) -> Segment:
    """A segment as the policy could have played it; a fifth of the steps are dummy steps."""
    obs, resets = observations(policy.observation_space, T, B), torch.rand(T, B) < 0.2
    start = hf.state.tree_map(torch.randn_like, policy.initial_state(B))
    with torch.no_grad():
        dist, value, _ = policy.unroll(obs, start, resets)
        actions = dist.sample()
        log_prob = dist.log_prob(actions).view(T, B) + 0.2 * torch.randn(T, B)
    flags = torch.zeros(T, B, dtype=torch.bool)
    return Segment(
        obs=obs, actions=actions.unflatten(0, (T, B)), resets=resets, rewards=flags, terminated=flags, truncated=flags,
        start_state=start, log_prob=log_prob, value=value + 0.3 * torch.randn(T, B), advantage=torch.randn(T, B),
        returns=torch.randn(T, B), valid=torch.rand(T, B) < 0.8,
    )  # fmt: skip


def exactly(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def in_float64(segment: Segment, core: hf.Core) -> Segment:
    wide = segment.changed(**segment.map_steps(exactly), start_state=core.as_state(segment.start_state, B))
    return wide.mark_all_valid() if segment.all_valid else wide


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm().clamp(min=1e-12))


def minibatch_errors(name: str, case: dict[str, Any], seed: int) -> dict[str, float]:
    """Gradients, metrics and the weights after a step, against the page in float64."""
    policy = make_policy(name, case, seed)
    exact = copy.deepcopy(policy).double()
    settings, all_valid = case.get("settings", LossSettings()), case.get("all_valid", True)
    segment = in_loss_units(played(policy), policy.value_scale)
    if all_valid:
        segment.mark_all_valid()
    columns = torch.randperm(B)[:COLUMNS]
    terms = terms_of(exact, in_float64(segment, exact.core).select(columns), settings)
    terms.loss.backward()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2, eps=1e-5)
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)
    engine = FusedMinibatches(policy, hf.TrainConfig(max_grad_norm=0.5), optimizer)
    engine.load(segment, ClippedLoss(settings))
    sums = engine.columns_backward(columns)
    wanted = {key: p.grad for key, p in exact.named_parameters()}
    errors = {f"gradient of {key}": error(p.grad, wanted[key]) for key, p in policy.named_parameters()}
    engine.find_gradients()
    FOUND_BY_ADDRESS[:] = [
        tensor
        for p in policy.parameters()
        for tensor in (p, p.grad, *optimizer.state[p].values())
        if tensor is not None
    ]
    report = engine.finish_step(sums)
    norm = torch.nn.utils.clip_grad_norm_(exact.parameters(), 0.5)
    torch.optim.Adam(exact.parameters(), lr=1e-2, eps=1e-5).step()
    reported = {
        **{name: float(term) for name, term in terms._asdict().items()},
        "grad_norm": float(norm),
        "skipped": 0.0,
    }
    errors["metrics"] = max(abs(got - reported[name]) for name, got in zip(engine.names, report.tolist(), strict=True))
    after = dict(exact.named_parameters())
    errors["weights"] = max(float((p - after[key]).detach().abs().max()) for key, p in policy.named_parameters())
    return errors


def step_errors(name: str, case: dict[str, Any], seed: int) -> dict[str, float]:
    """A step of a rollout against `policy.step`: log-probabilities of the actions it drew, values, the state."""
    policy = make_policy(name, case, seed)
    obs, resets = observations(policy.observation_space, B), torch.rand(B) < 0.3
    start = hf.state.tree_map(torch.randn_like, policy.initial_state(B))
    steps = FusedSteps(FusedPolicy(policy), 2, resets, drawn=False)
    with torch.no_grad():
        action, log_prob, value, state = steps.act(1, obs, start, resets, None)
        again = steps.value(obs, start, resets)
    exact = policy.double()
    dist, wanted, wanted_state = exact.step(hf.state.tree_map(exactly, obs), exact.core.as_state(start, B), resets)
    pairs = zip(hf.state.leaves(state), hf.state.leaves(wanted_state))
    return {
        "log_prob": float((log_prob - dist.log_prob(exactly(action))).abs().max()),
        "value": float((value - wanted).abs().max()),
        "value again": float((again - value).abs().max()),
        "state": max((float((a - b).abs().max()) for a, b in pairs), default=0.0),
        "not in place": float(not torch.equal(steps.written()["actions"][1], action)),
    }


if __name__ == "__main__":
    triton_interpreter.accept_arrays_as_numbers()
    FOUND_BY_ADDRESS = triton_interpreter.check_memory()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for seed, (name, case) in enumerate(CASES.items()):
        found[name] = {"minibatch": minibatch_errors(name, case, seed), "step": step_errors(name, case, seed)}
    json.dump(found, sys.stdout)
