"""How the doctor talks to a policy: two legs, run the way the policy's own project runs them.

The **rollout leg** is `begin`, then `step` after `step`. The **training leg** is `replay` of a stored segment.
The doctor supplies the environments (a script of observations and episode ends), and compares the legs with
each other and with what the policy does when every episode is played alone.

To examine a policy of an unusual form, subclass `Subject` and write four methods:

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
            return Step(output=y)

        def mark(self):                       # what your buffer keeps of the state at the first step of a segment
            return self.h.clone()

        def replay(self, segment):
            h, ys = segment.start, []
            for obs, first in zip(segment.obs, segment.resets):
                y, h = self.net(obs, h * ~first[:, None])
                ys.append(y)
            return Replay(output=torch.stack(ys))

The other methods are optional; each one that is written lets one more check run.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.doctor.observations import Observations, device_of


class NotOffered(Exception):
    """Raised by an optional method of a subject that does not have it: the check reports 'not applicable'."""


@dataclass(frozen=True)
class Step:
    """One step of the rollout leg for B environments.

    `output` `[B, K]`: numbers that depend on what was observed and on nothing random (logits, value, features).
    `action` and `log_prob` `[B]`: what was sampled, if anything was; `replay` is handed the same actions.
    """

    output: Tensor
    action: Any = None
    log_prob: Tensor | None = None


@dataclass(frozen=True)
class Replay:
    """A segment in the training leg: `output` `[T, B, K]` with the columns of `Step.output`, `log_prob` `[T, B]`.

    `state`, if given, is the state after the last step, in the form that `Subject.state` has.
    """

    output: Tensor
    log_prob: Tensor | None = None
    state: Any = None


@dataclass(frozen=True)
class Segment:
    """T consecutive steps of B environments, as a project's buffer would hold them. Time first.

    `terminated[t, b]` and `truncated[t, b]` came *with* `obs[t, b]`: True means that the step before ended an episode
    and that this observation is the first of the next. `begins` is True for the first segment after `begin`.
    `marks[t]` is what `Subject.mark()` gave just before step t. `lengths` `[B]`, when not None, says how many steps
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
        """What the project stored of the state at the first step."""
        return self.marks[0]

    @property
    def resets(self) -> Tensor:
        """`[T, B]` bool: this observation is the first of an episode."""
        resets = self.terminated | self.truncated
        if self.begins:
            resets = resets.clone()
            resets[0] = True
        return resets

    def with_(self, **changes: Any) -> Segment:
        """A copy with some fields replaced."""
        return replace(self, **changes)


class Subject:
    """A policy on the examination table. See the module's text for the shortest useful subclass."""

    name: str = "policy"
    #: rows that the doctor runs; a policy built for a fixed number of environments says so here
    num_envs: int = 5
    #: True when the project wants memory to go on across episodes: isolation checks do not apply
    carries_across_episodes: bool = False
    #: True when the rollout leg is told *which* environments it steps, and finds their memory by id
    takes_env_ids: bool = False
    #: True when `step` accepts None for both flags
    flags_optional: bool = False
    #: True when `replay` honours `Segment.lengths`
    pads: bool = False
    #: False when the training leg works on the live state by design, as that of a module that keeps its own does
    trains_apart: bool = True
    #: True when the policy itself makes its first state, so that its dtype must follow the weights
    makes_own_state: bool = False
    #: `[B, ...]` the mask of the step about to be played, for subjects with `action_masks`
    action_mask: Tensor | None = None

    def __init__(self, observation_space: Any = None, *, name: str | None = None) -> None:
        if observation_space is not None:
            self.space = Observations(observation_space)
        self.name = name or type(self).__name__

    # --- what every subject has ------------------------------------------------------------------------
    def begin(self, num_envs: int) -> None:
        """A new run with this many environments: nothing is remembered."""
        raise NotImplementedError

    def step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> Step:
        """One step of the rollout leg. Flags as in `Segment`; right after `begin` both are False."""
        raise NotImplementedError

    def replay(self, segment: Segment) -> Replay:
        """The training leg, with gradients."""
        raise NotImplementedError

    def mark(self) -> Any:
        """What the project keeps of the state when a segment starts (asked before every step). None: nothing."""
        return None

    # --- what a subject may have -----------------------------------------------------------------------
    def observations(self, count: int, generator: torch.Generator) -> Any:
        """`count` random observations, stacked, on the policy's device."""
        return self.space.sample(count, generator, device_of(self.modules()))

    def minibatches(self, segment: Segment) -> Replay:
        """The training leg on the same segment, cut into minibatches the way the project does it."""
        raise NotOffered("its minibatches are not offered")

    def training_call(self, segment: Segment) -> Any:
        """The training leg without the doctor's own trappings, for torch.compile."""
        return self.replay(segment)

    def action_masks(self, count: int, generator: torch.Generator) -> Tensor | None:
        """`[count, ...]` bool masks of the allowed actions, for policies that take them."""
        return None

    def modules(self) -> list[nn.Module]:
        """The torch modules of the policy: their buffers, parameters and modes are watched."""
        return [value for value in vars(self).values() if isinstance(value, nn.Module)]

    def state(self) -> Any:
        """What is carried to the next step, as a pytree of tensors; for audits and graphs only."""
        return None

    def poison(self, row: int) -> None:
        """Put NaN into one environment's carried state. Needed only where observations cannot hold NaN."""
        raise NotOffered("its state cannot be set from outside")

    def change_batch(self, num_envs: int) -> None:
        """What the project does when the number of environments changes, as between training and evaluation."""
        self.begin(num_envs)

    def live_step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> Step:
        """A step as a script takes it that trains through live steps: with gradients, if it ever does that."""
        return self.step(obs, terminated, truncated, env_ids)

    def end_segment(self) -> None:
        """What the project does between two training segments of live steps, such as a call that detaches."""

    def peek_value(self, obs: Any, env_ids: Tensor) -> Tensor:
        """`[n]` the value of a final observation of these environments, without acting."""
        raise NotOffered("it has no bootstrap value call")

    def value_column(self) -> int:
        """Which column of `Step.output` is the value (needed with `peek_value`)."""
        return -1

    def evaluation(self) -> Subject:
        """The play/evaluation leg as a subject of its own (`begin` and `step`), sharing the weights."""
        raise NotOffered("it has no separate evaluation leg")

    def second_agent(self) -> Subject:
        """Another agent with the same weights, which must not share this one's memory."""
        raise NotOffered("it is one agent with one memory")

    def reset_memory(self) -> None:
        """Forget everything, the way users of the policy are told to."""
        raise NotOffered("it has no reset call")

    def save(self) -> Any:
        """A checkpoint taken in mid-episode."""
        raise NotOffered("it has no checkpoint that includes memory")

    def load(self, checkpoint: Any) -> None:
        """Continue from a checkpoint."""
        raise NotOffered("it has no checkpoint that includes memory")

    def alternatives(self) -> list[tuple[str, Subject]]:
        """(cause, the same subject without it): tried when the policy cannot even run, to say why."""
        return []

    def notes(self) -> list[tuple[str, str]]:
        """(cause, evidence) of what is worth saying about this form of policy, though nothing is wrong."""
        return []

    def isolated(self) -> Subject:
        """A copy that can be examined without touching the original."""
        return copy.deepcopy(self, _memo_without_graphs(self))


def _memo_without_graphs(subject: Subject) -> dict[int, Any]:
    """A deepcopy memo in which tensors that hold a graph (which deepcopy refuses) are replaced by detached copies."""
    memo: dict[int, Any] = {}

    def look(value: Any) -> None:
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
        elif isinstance(value, (list, tuple)):
            for item in value:
                look(item)
        elif isinstance(value, dict):
            for item in value.values():
                look(item)

    for holder in [subject, *(m for module in subject.modules() for m in module.modules())]:
        look(list(vars(holder).values()))
    return memo
