"""How the doctor talks to a policy: two legs, run the way the policy's own project runs them.

The **rollout leg** is `begin`, then one `step` after another. The **training leg** is `replay` of a stored segment.
The doctor supplies the environments (a script of observations and episode ends), and compares the legs with each other
and with what the policy does when every episode is played alone.

To examine a policy of another form, subclass `Subject` and write four methods:

    class Mine(Subject):
        def __init__(self, net):
            super().__init__(observation_space=(4,))
            self.net = net

        def begin(self, num_envs):
            self.h = torch.zeros(num_envs, 32)

        def step(self, obs, terminated, truncated, env_ids):
            self.h = self.h * ~(terminated | truncated)[:, None]
            with torch.no_grad():
                y, self.h = self.net(obs, self.h)
            return SubjectStep(output=y)

        def mark(self):                       # what your buffer stores of the state before the first step of a segment
            return self.h.clone()

        def replay(self, segment):
            h, ys = segment.start, []
            for obs, first in zip(segment.obs, segment.resets):
                y, h = self.net(obs, h * ~first[:, None])
                ys.append(y)
            return Replay(output=torch.stack(ys))

The other methods are optional; each one lets one more check run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from holdfast.doctor.observations import Observations, device_of
from holdfast.state import map_tensors, tensors_in


class NotOffered(Exception):
    """Raised by an optional method that a subject does not have: the check reports 'not applicable'."""


@dataclass(frozen=True)
class SubjectStep:
    """One step of the rollout leg for B environments.

    `output` `[B, K]`: numbers that depend on the observations and on nothing random (logits, value, features).
    `action` and `log_prob` `[B]`: what was sampled, if anything was; `replay` receives the same actions.
    """

    output: Tensor
    action: Any = None
    log_prob: Tensor | None = None


@dataclass(frozen=True)
class Replay:
    """A segment in the training leg: `output` `[T, B, K]` with the columns of `SubjectStep.output`, `log_prob` `[T, B]`.

    `state`, if given, is the state after the last step, in the form of `Subject.state`.
    """

    output: Tensor
    log_prob: Tensor | None = None
    state: Any = None


@dataclass(frozen=True)
class RecordedSegment:
    """T consecutive steps of B environments, as a project's buffer would hold them. Time first.

    `terminated[t, b]` and `truncated[t, b]` came *with* `obs[t, b]`: True means that the previous step ended an episode
    and that this observation is the first of the next. `begins` is True for the first segment after `begin`.
    `marks[t]` is what `Subject.mark()` returned just before step t. `lengths` `[B]`, if not None, says how many steps
    of each row are real; the rest is padding.
    """

    obs: Any
    actions: Any
    terminated: Tensor
    truncated: Tensor
    marks: tuple[Any, ...]
    begins: bool
    log_prob: Tensor | None = None
    value: Tensor | None = None
    action_mask: Tensor | None = None
    lengths: Tensor | None = None

    @property
    def start(self) -> Any:
        """What the project stored of the state before the first step."""
        return self.marks[0]

    @property
    def resets(self) -> Tensor:
        """`[T, B]` bool: this observation is the first of an episode."""
        resets = self.terminated | self.truncated
        if self.begins:
            resets = resets.clone()
            resets[0] = True
        return resets

    def with_(self, **changes: Any) -> RecordedSegment:
        """A copy with some fields replaced."""
        return replace(self, **changes)


class Subject:
    """A policy to examine. The text of this module shows the shortest useful subclass."""

    name: str = "policy"
    #: how the doctor recognized a policy that came without a subject
    recognized_as: str = ""
    #: whose words fixes are shown in: a file of `holdfast.doctor.report.patches`
    framework: str = "torch"
    #: over how many steps gradients flow on purpose (truncated backpropagation); None: over the whole segment
    bptt: int | None = None
    #: number of environments that the doctor runs; set it for a policy that is built for a fixed number
    num_envs: int = 5
    #: True if the project wants memory to carry on across episodes: isolation checks do not apply
    carries_across_episodes: bool = False
    #: True if training replays whole episodes only, as off-policy projects do: segments then start with episodes
    whole_episodes: bool = False
    #: True if the rollout leg receives the ids of the environments it steps, and finds their memory by id
    takes_env_ids: bool = False
    #: True if `step` accepts None for both flags
    flags_optional: bool = False
    #: True if `replay` honors `RecordedSegment.lengths`
    pads: bool = False
    #: False if the training leg works on the live state by design, as in a module that keeps its own state
    trains_apart: bool = True
    #: True if the policy makes its first state itself, so that its dtype must follow the weights
    makes_own_state: bool = False
    #: `[B, ...]` the mask of the next step, for subjects with `action_masks`
    action_mask: Tensor | None = None

    def __init__(self, observation_space: Any = None, *, name: str | None = None) -> None:
        if observation_space is not None:
            self.space = Observations(observation_space)
        self.name = name or type(self).__name__

    def __setattr__(self, name: str, value: Any) -> None:
        if callable(getattr(Subject, name, None)) and not callable(value):
            raise AttributeError(
                f"`{name}` is a method of a subject; call the attribute something else, such as `_{name}`"
            )
        super().__setattr__(name, value)

    # --- what every subject has ------------------------------------------------------------------------
    def begin(self, num_envs: int) -> None:
        """Start a new run with this many environments and an empty memory."""
        raise NotImplementedError

    def step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> SubjectStep:
        """One step of the rollout leg. Flags as in `RecordedSegment`; right after `begin` both are False."""
        raise NotImplementedError

    def replay(self, segment: RecordedSegment) -> Replay:
        """The training leg, with gradients."""
        raise NotImplementedError

    def mark(self) -> Any:
        """What the project stores of the state when a segment starts (called before every step). None: nothing."""
        return None

    def begin_rollout(self) -> None:
        """What the project does before the first step of each rollout of `STEPS` steps, such as clearing the state."""

    # --- what a subject may have -----------------------------------------------------------------------
    def observations(self, count: int, generator: torch.Generator) -> Any:
        """`count` random observations, stacked, on the policy's device."""
        return self.space.sample(count, generator, device_of(self.modules()))

    def minibatches(self, segment: RecordedSegment) -> Replay:
        """The training leg on the same segment, cut into minibatches the way the project does it."""
        raise NotOffered("its minibatches are not offered")

    def training_call(self, segment: RecordedSegment) -> Any:
        """The training leg without anything that only the doctor needs, for torch.compile."""
        return self.replay(segment)

    def action_masks(self, count: int, generator: torch.Generator) -> Tensor | None:
        """`[count, ...]` bool masks of the allowed actions, for policies that take them."""
        return None

    def modules(self) -> list[nn.Module]:
        """The torch modules of the policy, with its buffers, parameters and modes."""
        return [value for value in vars(self).values() if isinstance(value, nn.Module)]

    def state(self) -> Any:
        """What is carried to the next step, as a pytree of tensors; for inspection only."""
        return None

    def poison(self, row: int) -> None:
        """Put NaN into the carried state of one environment."""
        raise NotOffered("its state cannot be set from outside")

    def change_batch(self, num_envs: int) -> None:
        """What the project does if the number of environments changes, as between training and evaluation."""
        self.begin(num_envs)

    def live_step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> SubjectStep:
        """A step as in a script that trains through live steps: with gradients, if the project ever does that."""
        return self.step(obs, terminated, truncated, env_ids)

    def end_segment(self) -> None:
        """What the project does between two training segments of live steps, such as detaching the state."""

    def peek_value(self, obs: Any, env_ids: Tensor) -> Tensor:
        """`[n]` the value of a final observation of these environments, without acting."""
        raise NotOffered("it has no bootstrap value call")

    def value_column(self) -> int:
        """Which column of `SubjectStep.output` is the value (needed with `peek_value`)."""
        return -1

    def evaluation(self) -> Subject:
        """The play/evaluation leg as a subject of its own (`begin` and `step`), sharing the weights."""
        raise NotOffered("it has no separate evaluation leg")

    def second_agent(self) -> Subject:
        """Another agent with the same weights, which must not share this one's memory."""
        raise NotOffered("it is one agent with one memory")

    def reset_memory(self) -> None:
        """Clear all memory, the way users of the policy do it."""
        raise NotOffered("it has no reset call")

    def save(self) -> Any:
        """A checkpoint, taken in the middle of an episode."""
        raise NotOffered("it has no checkpoint that includes memory")

    def load(self, checkpoint: Any) -> None:
        """Resume from a checkpoint."""
        raise NotOffered("it has no checkpoint that includes memory")

    def alternatives(self) -> list[tuple[Any, Subject]]:
        """(cause, the same subject without it): tried if the policy has errors or does not run, to name the cause.

        A tuple of causes stands for mistakes that are removed together.
        """
        return []

    def notes(self) -> list[tuple[str, str]]:
        """(cause, evidence) of notes about this form of policy, though nothing is wrong."""
        return []

    def isolated(self) -> Subject:
        """A copy that can be examined without touching the original."""
        return copy.deepcopy(self, memo_without_graphs(self))


def memo_without_graphs(subject: Subject) -> dict[int, Any]:
    """A deepcopy memo that replaces tensors with a graph, which deepcopy refuses, by detached copies."""
    holders = [subject, *(m for module in subject.modules() for m in module.modules())]
    tensors = [x for holder in holders for x in tensors_in(list(vars(holder).values()))]
    return {id(x): x.detach().clone() for x in tensors if x.grad_fn is not None}


# --- states that the caller carries ----------------------------------------------------------------------------------


class CarriesState(Subject):
    """A subject that carries the policy's state from step to step itself, in `_state`."""

    #: the dimension of environments in the tensors of a state
    batch_dim = 0
    _state: Any = None

    def mark(self) -> Any:
        return map_tensors(torch.clone, self._state)

    def state(self) -> Any:
        return self._state

    def poison(self, row: int) -> None:
        self._state = self.mark()
        numbers = [x for x in tensors_in(self._state) if x.is_floating_point()]
        if not numbers:
            raise NotOffered("it has no state of floating-point numbers before its first step")
        with torch.no_grad():
            for tensor in numbers:
                tensor.select(self.batch_dim, row).fill_(float("nan"))


# --- copies ----------------------------------------------------------------------------------------------------------
# Copies of agents that hold more than a policy: optimizers, buffers, the distribution of their last call.


Kind = TypeVar("Kind", bound=Subject)


def copy_without(subject: Kind, dropped: Iterable[Any], shared: Iterable[Any] = ()) -> Kind:
    """A deep copy. `dropped` becomes None, and so does the last distribution of each module, which may hold a graph.

    `shared`: what the copy never writes to.
    """
    memo = memo_without_graphs(subject)
    held = [x for model in subject.modules() for m in model.modules() for x in vars(m).values()]
    last = [x for x in held if isinstance(x, torch.distributions.Distribution)]
    memo.update({id(x): None for x in (*last, *dropped) if x is not None})
    memo.update({id(x): x for x in shared})
    return copy.deepcopy(subject, memo)


# --- the play loop ---------------------------------------------------------------------------------------------------
# The play loop of Stable-Baselines3: `predict(obs, state, episode_start)`; the caller keeps the state.


class PredictLeg(Subject):
    """An evaluation leg. `watching()` collects what the policy computes on the way; `output` turns it into columns."""

    def __init__(
        self,
        name: str,
        predict: Callable[..., Any],
        watching: Callable[[], AbstractContextManager[list[Any]]],
        output: Callable[[Any], Tensor],
    ) -> None:
        super().__init__(name=name)
        self.predict, self.watching, self.output = predict, watching, output
        self._state: Any = None

    def begin(self, num_envs: int) -> None:
        self._state = None

    def step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> SubjectStep:
        first = (terminated | truncated).cpu().numpy() | (self._state is None)
        arrays = map_tensors(lambda x: x.cpu().numpy(), obs)
        with self.watching() as seen:
            _, self._state = self.predict(arrays, self._state, first, deterministic=True)
        return SubjectStep(self.output(seen[0]))
