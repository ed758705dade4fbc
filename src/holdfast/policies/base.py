"""`RecurrentPolicy`: write `encode` and `decode`; memory, resets and both legs are done here.

    obs -> encode -> core -> decode -> (distribution, value)

`step` and `unroll` are that composition, pure: one step, and a whole segment from its start state. Everything else
calls them. `act` is the rollout leg: `step` without gradients, memory read and written. `evaluate` is the training leg:
`unroll`, and the log-probabilities of given actions. Both run the same core on the same reset rule, so with unchanged
weights they agree. Losses and rollouts are not here.
"""

from __future__ import annotations

import inspect
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from holdfast import state as state_ops
from holdfast.checks import is_debug, rows_are, values_are_readable
from holdfast.cores.base import Core
from holdfast.memory import EnvIds, Memory
from holdfast.policies.heads import draw_action, entropy_of, mask_tensors
from holdfast.state import State, leaves, map_tensors, tree_map

if TYPE_CHECKING:
    from holdfast.policies.actor_critic import ValueScale


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The dtype of products for a `TrainConfig.precision`; None: the parameters' own."""
    return torch.bfloat16 if precision == "bf16" else None


def autocast(device: torch.device | str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """`torch.autocast` with this dtype; no-op for None."""
    return nullcontext() if dtype is None else torch.autocast(torch.device(device).type, dtype)


class PolicyOutput(NamedTuple):
    """What `step` and `unroll` return: the distribution of actions, the value, the state afterwards."""

    dist: Any
    value: Any
    """[B] or [T, B]; None if the policy has no critic (`actor_only`)."""
    state: State


class Step(NamedTuple):
    """What `act` returns, each [B, ...]."""

    action: Any
    """Of a Dict or Tuple action space: a dict or tuple, nested as the space is."""
    log_prob: Any
    value: Any


class Evaluation(NamedTuple):
    """What `evaluate` returns, each [T, B]; `state` after the segment if asked for."""

    log_prob: Tensor
    entropy: Tensor
    value: Any
    state: State = None


class RecurrentPolicy(nn.Module):
    """A policy with memory. Subclasses call `super().__init__(core=...)` and write `encode` and `decode`."""

    trained_in: Path | None = None
    """The folder of the run that it was trained in or loaded from."""
    skip: bool = False
    """Whether `decode` receives what `encode` gave after what the core gave."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        if not isinstance(core, Core):
            raise TypeError(f"core must be a holdfast core (hf.LSTM, hf.GRU, ...), got a {type(core).__name__}")
        self.core = core
        self.memory = Memory(core)
        self.value_scale: ValueScale | None = None  # a critic that learns normalized values has one
        self.decode_takes_mask = "action_mask" in inspect.signature(self.decode).parameters

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except AttributeError as error:
            if "before Module.__init__" not in str(error):
                raise
            raise TypeError(
                f"{type(self).__name__}.__init__ sets {name} too early; write super().__init__(core=hf.LSTM(...)) as its first line"
            ) from error

    # --- what users write -------------------------------------------------------------------------------------------

    def encode(self, obs: Any) -> Tensor:
        """Observations with one leading dimension N (B in act, T*B in evaluate) -> features [N, core.input_size]."""
        raise NotImplementedError(
            "write encode(self, obs) in your policy: observations [N, ...] -> [N, core.input_size]"
        )

    def decode(self, features: Tensor, action_mask: Any = None) -> tuple[Any, Tensor | None]:
        """Features [N, core.output_size] -> (distribution with batch shape [N], value [N] or None)."""
        raise NotImplementedError(
            "write decode(self, features) in your policy: [N, core.output_size] -> (distribution, value)"
        )

    def losses(self, features: Tensor, output: PolicyOutput, batch: Any) -> dict[str, Tensor]:
        """Losses that training adds to those of the algorithm, by name: one number each. None by default.

        features: [T * B, O], what `self.features` gave for these sequences; output: what `unroll` made of them; batch: the
        `hf.Segment` [T, B] that is trained on, dummy steps included (`batch.valid`). `loss_weights` of the config names them
        all; they are logged as train/NAME. Nothing in it should look at a number on a GPU.
        """
        return {}

    # --- the one composition: encode, core, decode --------------------------------------------------------------------

    def step(
        self,
        obs: Any,
        state: State,
        resets: Any = None,
        *,
        action_mask: Any = None,
        checked: bool = False,
        in_place: bool = False,
    ) -> PolicyOutput:
        """One step of B environments: obs [B, ...], resets [B] -> dist and value [B], the new state. Pure.

        checked: obs, state, resets and mask are tensors that the caller has checked; they are used as they are.
        in_place: for a rollout that owns `state` and a core that `supports_advance`: its tensors become the new state.
        """
        if not checked:
            obs, resets, action_mask = self.as_tensors(obs), self.as_flags(resets), self.as_mask(action_mask)
        x = self._encode(obs)
        if in_place:
            y = self.core.advance_(x, state, resets)
        else:
            run = self.core.step_unchecked if checked and not is_debug() else self.core
            y, state = run(x, state, resets)  # [B, I] -> [B, O]
        dist, value = self._decode(torch.cat([y, x], -1) if self.skip else y, action_mask)
        return PolicyOutput(dist, value, state)

    def unroll(self, obs: Any, state: State, resets: Any = None, *, action_mask: Any = None) -> PolicyOutput:
        """A segment from its start state: obs [T, B, ...], resets [T, B] -> dist, value [T, B], the final state. Pure.

        `dist` has batch shape [T * B], in the row order of `flatten(0, 1)`.
        """
        return self.unroll_with_features(obs, state, resets, action_mask=action_mask)[1]

    def unroll_with_features(
        self, obs: Any, state: State, resets: Any = None, *, action_mask: Any = None
    ) -> tuple[Tensor, PolicyOutput]:
        """What `features` gives, and what `unroll` makes of it."""
        T, B = segment_shape(obs)
        features, state = self.features(obs, state, resets)
        action_mask = self.as_mask(action_mask)
        mask = None if action_mask is None else merge_time(action_mask, T, B, "an action mask")
        dist, value = self._decode(features, mask)
        return features, PolicyOutput(dist, None if value is None else value.view(T, B), state)

    def features(self, obs: Any, state: State, resets: Any = None) -> tuple[Tensor, State]:
        """What `decode` receives for a segment, [T * B, O], and the final state: the core's outputs, then the encoder's if the
        policy has a `skip`. Pure. For heads and losses of your own."""
        obs, resets = self.as_tensors(obs), self.as_flags(resets)
        T, B = segment_shape(obs)
        x = self._encode(merge_time(obs, T, B, "observations"))
        y, state = self.core(x.reshape(T, B, self.core.input_size), state, resets)  # [T, B, O]
        y = y.flatten(0, 1)
        return (torch.cat([y, x], -1) if self.skip else y), state

    # --- the rollout leg --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(
        self,
        obs: Any,
        resets: Any = None,
        env_ids: EnvIds = None,
        *,
        memory: Memory | None = None,
        action_mask: Any = None,
        deterministic: bool = False,
        noise: Tensor | None = None,
    ) -> Step:
        """One step of B environments: read memory, reset, act, write memory. numpy in, numpy out.

        `resets[b]` is True when `obs[b]` is the first observation of an episode. `env_ids=None` means ids 0..B-1.
        noise: for Box actions, standard normal numbers [B, n] to sample with; None: drawn here.
        """
        first = first_leaf(obs)
        if memory is None:
            memory = self.memory
            memory.expect(first.shape[0], env_ids)
            if env_ids is None and not torch.compiler.is_compiling():
                self._notice_two_users(memory, resets)
        step, _ = self._act(obs, resets, env_ids, memory, action_mask, deterministic, noise)
        return (
            step if isinstance(first, Tensor) else Step(*(None if x is None else tree_map(to_numpy, x) for x in step))
        )

    @torch.no_grad()
    def act_and_decode(
        self,
        obs: Any,
        resets: Any,
        env_ids: EnvIds,
        memory: Memory,
        action_mask: Any,
        noise: Tensor | None,
        deterministic: bool = False,
    ) -> tuple[Step, Any]:
        """As `act`, and the distribution that the actions were drawn from."""
        return self._act(obs, resets, env_ids, memory, action_mask, deterministic, noise)

    def _act(
        self,
        obs: Any,
        resets: Any,
        env_ids: EnvIds,
        memory: Memory,
        action_mask: Any,
        deterministic: bool,
        noise: Tensor | None,
    ) -> tuple[Step, Any]:
        batch = first_leaf(obs).shape[0]
        state, ids = memory.take(batch, env_ids)
        if memory.in_place and ids is None and not is_debug():
            dist, value, state = self.step(obs, state, resets, action_mask=action_mask, in_place=True)
        else:
            dist, value, state = self._step_of_rows(obs, state, resets, action_mask, ids)
        action = dist.mode if deterministic else draw_action(dist, noise)
        log_prob = dist.log_prob(action)
        _check_batch_shape(log_prob, batch)
        memory.put(state, ids)  # last, so that an error above leaves memory as it was
        return Step(action, log_prob, value), dist

    @torch.no_grad()
    def peek_value(self, obs: Any, env_ids: EnvIds = None, *, resets: Any = None, memory: Memory | None = None) -> Any:
        """V(obs) [B] with the current state of each environment; memory does not change."""
        memory = self.memory if memory is None else memory
        first = first_leaf(obs)
        state, ids = memory.take(first.shape[0], env_ids)
        value = self._step_of_rows(obs, state, resets, None, ids).value
        if value is None:
            raise ValueError(f"{type(self).__name__} has no critic, so there is no value; use the full policy")
        return value if isinstance(first, Tensor) else to_numpy(value)

    def _step_of_rows(self, obs: Any, state: State, resets: Any, action_mask: Any, ids: Tensor | None) -> PolicyOutput:
        """`step`, with environments named by their ids in what `hf.debug` reports."""
        if not is_debug():
            return self.step(obs, state, resets, action_mask=action_mask)
        with rows_are(ids):
            return self.step(obs, state, resets, action_mask=action_mask)

    def _notice_two_users(self, memory: Memory, resets: Any) -> None:
        """Warn if a loop in train mode and one in eval mode take turns with the policy's own memory."""
        user = "train mode" if self.training else "eval mode"
        before, memory.last_user = memory.last_user, user
        if before in (None, user) or (resets is not None and _may_all_be_true(resets)):
            return
        warnings.warn(
            f"the policy's own memory was last used in {before} and is now used in {user}, in the middle of episodes: "
            "an evaluation next to a rollout needs its own, policy.act(..., memory=hf.Memory(policy.core)), or starts "
            "with policy.reset_memory()",
            stacklevel=4,
        )

    # --- the training leg -------------------------------------------------------------------------------------------

    def evaluate(
        self,
        obs: Any,
        actions: Any,
        state: State,
        resets: Tensor | None,
        *,
        action_mask: Any = None,
        return_state: bool = False,
    ) -> Evaluation:
        """A segment [T, B, ...] from its start state: log_prob, entropy, value [T, B]. Memory is not involved.

        state: what the segment started from, e.g. `segment.start_state`. None only if every environment begins an
        episode, `resets[0]` all True; `policy.initial_state(B)` says that a fresh state is meant.
        """
        T, B = segment_shape(obs)
        if state is None and self.has_memory():
            _check_starts_with_resets(resets)
        dist, value, state = self.unroll(obs, state, resets, action_mask=action_mask)
        log_prob = dist.log_prob(merge_time(self._on_device(actions), T, B, "actions"))
        _check_batch_shape(log_prob, T * B)
        return Evaluation(log_prob.view(T, B), entropy_of(dist).view(T, B), value, state if return_state else None)

    def evaluate_actions(self, *args: Any, **kwargs: Any) -> Evaluation:
        """`evaluate`, under the name that Stable-Baselines3 uses."""
        return self.evaluate(*args, **kwargs)

    def forward(self, obs: Any, actions: Any, state: State, resets: Any, **options: Any) -> Any:
        """`evaluate`, or `unroll` if actions is None, so that DDP, hooks and `torch.compile(policy)` reach the training leg."""
        if actions is None and options.pop("with_features", False):
            return self.unroll_with_features(obs, state, resets, **options)
        if actions is None:
            return self.unroll(obs, state, resets, **options)
        return self.evaluate(obs, actions, state, resets, **options)

    # --- SB3's way --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict(
        self,
        obs: Any,
        state: State = None,
        episode_start: Any = None,
        deterministic: bool = False,
        action_masks: Any = None,
    ) -> tuple[Any, State]:
        """One step; the caller carries the state, as in Stable-Baselines3. numpy in and out.

        action_masks: bool, True for allowed actions, as `action_mask` of `act`.
        """
        batch, resets = first_leaf(obs).shape[0], self.as_flags(episode_start)
        if resets is not None and resets.shape != (batch,) and resets.numel() == batch:
            resets = resets.reshape(-1)
        if state is not None and not self.has_memory() and leaves(state):
            raise ValueError(
                f"got a state, but this {type(self).__name__} has no memory (core {type(self.core).__name__}); "
                "pass state=None, or what predict returned"
            )
        start = None if state is None else self.core.as_state(state, batch)
        dist, _, new_state = self.step(obs, start, resets, action_mask=action_masks)
        action = dist.mode if deterministic else dist.sample()
        return tree_map(to_numpy, action), tree_map(to_numpy, new_state)

    # --- in use, without a critic ---------------------------------------------------------------------------------

    def actor_only(self) -> RecurrentPolicy:
        """A policy for deployment that shares the actor's weights and has no critic: `value` is None.

        `hf.ActorCritic` has one. Override this method in your own policy to deploy it without its critic.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say which of its parts the actor needs; write actor_only(self): return a "
            "RecurrentPolicy that holds those parts and whose decode returns (distribution, None)"
        )

    def deployed(self) -> RecurrentPolicy:
        """What `predict`, `Runner` and export run: the policy itself, or the actor if only the critic needs more observations."""
        return self

    # --- memory, one-liners ---------------------------------------------------------------------------------------

    def has_memory(self) -> bool:
        """Whether anything is carried from step to step."""
        return len(leaves(self.core.row_shapes())) > 0  # torch 2.11 cannot compile bool() of a list

    def get_memory(self) -> dict[str, Any]:
        """A copy of the memory, to keep or to give to `set_memory`."""
        return self.memory.state_dict()

    def set_memory(self, m: Memory | dict[str, Any]) -> None:
        """Restore a copy from `get_memory`, or use another `hf.Memory` from now on."""
        if isinstance(m, Memory):
            if m.core is not self.core:
                raise ValueError("this Memory belongs to another core; make one with hf.Memory(policy.core)")
            self.memory = m
        else:
            self.memory.load_state_dict(m)

    def reset_memory(self) -> None:
        """Every environment starts from a fresh state."""
        self.memory.reset()

    def reset_env_memory(self, env_id: EnvIds) -> None:
        """This environment (or these) starts from a fresh state."""
        if env_id is None:
            raise TypeError("reset_env_memory takes an environment id; for all of them: reset_memory()")
        self.memory.reset(env_id)

    def initial_state(self, batch_size: int) -> State:
        """A fresh state."""
        return self.core.initial_state(batch_size)

    def detach_state(self, state: State) -> State:
        """The same state without its graph."""
        return state_ops.detach(state)

    # --- statistics -------------------------------------------------------------------------------------------------

    @property
    def normalizes(self) -> bool:
        """Whether it has running statistics of observations."""
        return False

    def update_normalizer(self, obs: Any, ranks: Any = None) -> None:
        """Update the statistics with [N, ...] or [T, B, ...] observations. Not between a rollout and its update."""

    # --- sharing ------------------------------------------------------------------------------------------------------

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload it to "user/name" on the Hugging Face Hub; see `hf.push_to_hub`."""
        from holdfast.deploy.hub import push_to_hub  # upwards: users expect this method here

        return push_to_hub(self, repo_id, **options)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _encode(self, obs: Any) -> Tensor:
        # The compiler needs no explanation, and not every version of it takes a `try`.
        x = self.encode(obs) if torch.compiler.is_compiling() else self._encode_or_explain(obs)
        n = leaves(obs)[0].shape[0]
        if not isinstance(x, Tensor) or x.dim() != 2 or x.shape != (n, self.core.input_size):
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"encode returned {got}, expected [N, core.input_size] = ({n}, {self.core.input_size})")
        return x

    def _encode_or_explain(self, obs: Any) -> Tensor:
        try:
            return self.encode(obs)
        except RuntimeError as error:
            # Subclasses (out of memory, encode not written) and errors of the GPU say enough, and others wait for them.
            if type(error) is not RuntimeError or "CUDA" in str(error):
                raise
            shapes = tree_map(lambda o: list(o.shape), obs)
            raise ValueError(
                f"{type(self).__name__}.encode failed on observations of shape {shapes}, one row per step: "
                f"{' '.join(str(error).split())}; compare encode with the environment's observation_space"
            ) from error

    def _decode(self, y: Tensor, action_mask: Any) -> tuple[Any, Any]:
        if self.decode_takes_mask:
            decoded = self.decode(y, action_mask)
        elif action_mask is not None:
            raise ValueError(
                f"{type(self).__name__}.decode takes no action_mask; write decode(self, features, action_mask=None)"
            )
        else:
            decoded = self.decode(y)
        if not isinstance(decoded, (tuple, list)) or len(decoded) != 2 or not hasattr(decoded[0], "log_prob"):
            raise TypeError(
                f"decode returned {_in_words(decoded)}, expected (distribution, value): wrap logits in "
                "torch.distributions.Categorical(logits=...), and give the value, [N], or None without a critic"
            )
        dist, value = decoded
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(
                f"decode returned a {type(value).__name__} as value, expected a tensor [{y.shape[0]}] or None"
            )
        if value is not None and value.shape != y.shape[:1]:
            if value.shape != (y.shape[0], 1):
                raise ValueError(f"decode returned values of shape {tuple(value.shape)}, expected ({y.shape[0]},)")
            value = value.squeeze(-1)
        return dist, value

    def as_tensors(self, obs: Any) -> Any:
        """Observations (nested dicts, tuples, arrays, tensors) as tensors on the policy's device."""
        return self._on_device(obs)

    def _on_device(self, tree: Any) -> Any:
        device = self.core.device()
        return tree_map(lambda x: torch.as_tensor(x, device=device), tree)

    def as_flags(self, resets: Any) -> Tensor | None:
        """Reset flags as a tensor; arrays go to the policy's device, tensors and None stay."""
        if resets is None or isinstance(resets, Tensor):
            return resets
        return torch.as_tensor(np.asarray(resets), device=self.core.device())

    def as_mask(self, mask: Any) -> Any:
        """An action mask as bool tensors; arrays go to the policy's device, None stays.

        A list of arrays, tensors and None holds one mask per head; lists of flags are one array.
        """
        return mask_tensors(mask, self.core.device())


def _in_words(thing: Any) -> str:
    """What somebody passed, for an error."""
    if isinstance(thing, Tensor):
        return f"a tensor of shape {tuple(thing.shape)}"
    if isinstance(thing, (tuple, list)):
        return f"a {type(thing).__name__} of {', '.join(type(part).__name__ for part in thing[:4]) or 'nothing'}"
    return f"a {type(thing).__name__}"


def first_leaf(obs: Any) -> Any:
    """The first array or tensor of observations."""
    found = leaves(obs)
    first = next((leaf for leaf in found if not isinstance(leaf, str)), found[0])  # texts are left out
    if not hasattr(first, "shape"):
        raise TypeError(
            f"observations hold a {type(first).__name__} outside of any array, expected arrays or tensors with one row per "
            "environment: np.array(obs, np.float32)"
        )
    return first


def to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """On the host; numpy has no bfloat16, float32 holds it exactly."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


def merge_time(tree: Any, T: int, B: int, what: str) -> Any:
    """[T, B, ...] -> [T * B, ...] for every leaf; None stays."""

    def merge(leaf: Tensor) -> Tensor:
        if leaf.shape[:2] != (T, B):
            raise ValueError(
                f"got {what} of shape {tuple(leaf.shape)} in a segment of {T} steps and {B} environments; "
                f"expected [{T}, {B}, ...], time first"
            )
        return leaf.flatten(0, 1)

    return map_tensors(merge, tree)


def segment_shape(obs: Any) -> tuple[int, int]:
    """(T, B) of a segment's observations."""
    shape = leaves(obs)[0].shape
    if len(shape) < 2:
        raise ValueError(f"a segment's observations are [T, B, ...]; got shape {tuple(shape)}")
    return shape[0], shape[1]


def _may_all_be_true(flags: Any) -> bool:
    """False only if a flag is known to be False; flags on a GPU or under the compiler are not read."""
    if isinstance(flags, Tensor):
        return not values_are_readable(flags) or bool(flags.all())
    return bool(np.all(flags))


def _check_starts_with_resets(resets: Any) -> None:
    """Without a start state every row must begin an episode; checked where values may be read."""
    if resets is not None and _may_all_be_true(resets[0]):
        return
    raise ValueError(
        "state is None, but not every environment begins an episode at the first step (resets[0]); pass the state that "
        "the segment started from (segment.start_state), or policy.initial_state(B) if a fresh one is meant"
    )


def _check_batch_shape(log_prob: Tensor, n: int) -> None:
    if log_prob.shape != (n,):
        raise ValueError(
            f"the distribution from decode gives log_prob of shape {tuple(log_prob.shape)}, expected ({n},): "
            "its batch shape must be [N]; wrap several dimensions in torch.distributions.Independent(dist, 1)"
        )
