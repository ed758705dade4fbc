"""skrl 2: `PPO_RNN` and agents like it, with recurrent models. Needs `pip install 'holdfast[skrl]'`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.doctor.columns import columns
from holdfast.doctor.script import STEPS
from holdfast.doctor.subjects.base import NotOffered, RecordedSegment, Replay, Subject, SubjectStep, copy_without
from holdfast.state import map_tensors, tensors_in


class Skrl(Subject):
    """An agent with recurrent models, driven through its own calls.

    Rollout: `act`, then `record_transition` with the flags that come with the next observation. Training: the same two
    calls fill a `RandomMemory`, its `sample_all` gives sequences, and the models get them as in the agent's `update`.
    `preprocessors_learn`: the preprocessors learn from a training call before they are applied, as in the first epoch of
    `update`. That alone makes training differ from the rollout and hides the rest, so by default they are held still.
    A `sequence_length` that does not divide the doctor's segments of 12 steps is set to 12 in the copy that is examined.
    """

    framework = "skrl"

    def __init__(self, agent: Any, *, preprocessors_learn: bool = False, name: str | None = None) -> None:
        super().__init__(agent.observation_space, name=name or type(agent).__name__)
        self.agent, self.preprocessors_learn = agent, preprocessors_learn
        self.policy, self.value = agent.policy, agent.value
        scaler = getattr(agent, "_observation_preprocessor", None)
        self.observation_preprocessor = scaler if isinstance(scaler, nn.Module) else None
        sizes = agent.policy.get_specification().get("rnn", {}).get("sizes", [])
        if not sizes:
            raise TypeError(
                f"subjects.Skrl: the specification of {type(agent.policy).__name__} has no 'rnn' with 'sizes'"
            )
        self.num_envs = int(sizes[0][1])
        length = agent.policy.get_specification()["rnn"]["sequence_length"]
        if STEPS % length and not hasattr(agent.policy, "sequence_length"):
            raise TypeError(
                f"subjects.Skrl: sequences of {length} steps do not divide {STEPS}: build the models with {STEPS}"
            )
        self.bptt = length if STEPS % length == 0 and length < STEPS else None  # sequences start from stored states
        #: what `alternatives` tries: a dict of its own for the states before a step; time limits passed as terminations
        self._apart = self._ends_alike = False
        self._plays = False
        self._last: tuple[Tensor, Tensor] | None = None  # observation and action of the step that is not recorded yet

    def begin(self, num_envs: int) -> None:
        self._start(num_envs, 1)
        self._last = None

    def step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> SubjectStep:
        rows = len(env_ids)
        with torch.no_grad():
            self._record(obs, terminated, truncated)
            action, outputs = self._act(obs)
            value = self._value(obs)
            self._last = obs, action
            output = columns((self.policy.distribution(role="policy"), value), rows)
        return SubjectStep(output, action, outputs["log_prob"].reshape(rows))

    def mark(self) -> Any:
        agent = self.agent
        one = agent._rnn_initial_states is agent._rnn_final_states  # the same dict since the first step was recorded
        return {
            "final": map_tensors(torch.clone, agent._rnn_final_states),
            "initial": None if one else map_tensors(torch.clone, agent._rnn_initial_states),
            "last": self._last,
        }

    def state(self) -> Any:
        return tensors_in(self.agent._rnn_final_states) or tensors_in(self.agent._rnn_initial_states)

    def replay(self, segment: RecordedSegment) -> Replay:
        agent, (steps, rows) = self.agent, segment.terminated.shape
        if steps % agent._rnn_sequence_length:
            raise NotOffered(f"its training leg takes sequences of {agent._rnn_sequence_length} steps")
        kept = self._last, agent.memory, agent._rnn_initial_states, agent._rnn_final_states
        try:
            with torch.no_grad():
                self._collect(segment)
            agent.enable_models_training_mode(True)
            return self._train(segment.obs.reshape(steps * rows, -1), steps, rows)
        finally:
            agent.enable_models_training_mode(False)
            self._last, agent.memory, agent._rnn_initial_states, agent._rnn_final_states = kept

    def evaluation(self) -> Subject:
        """As `trainer.eval()` does it: the same calls, with the agent's training mode off."""
        played = copy.copy(self)
        played._plays = True
        return played

    def poison(self, row: int) -> None:
        for tensor in self.state():
            tensor[:, row] = float("nan")

    def alternatives(self) -> list[tuple[Any, Subject]]:
        late, ignored = copy.copy(self), copy.copy(self)
        late._apart = ignored._ends_alike = True
        both = copy.copy(late)
        both._ends_alike = True
        return [
            ("late-by-one", late),
            ("truncation-ignored", ignored),
            (("late-by-one", "truncation-ignored"), both),
        ]

    def isolated(self) -> Skrl:
        agent = self.agent
        unused = [getattr(agent, key, None) for key in ("optimizer", "scheduler", "scaler", "memory", "writer")]
        copied = copy_without(self, unused)
        for model in (copied.policy, copied.value):
            if STEPS % model.get_specification()["rnn"]["sequence_length"]:
                model.sequence_length = STEPS
        return copied

    def _start(self, rows: int, steps: int) -> None:
        """As a trainer does: a memory, and the agent's `init`. States for another number of environments, if need be."""
        from skrl.memories.torch import RandomMemory

        agent = self.agent
        agent.memory = RandomMemory(memory_size=steps, num_envs=rows, device=agent.device)
        agent.init()
        agent.enable_training_mode(not self._plays)
        agent.enable_models_training_mode(False)
        agent._rnn_initial_states = {
            key: [x.new_zeros(x.shape[0], rows, x.shape[2]) for x in states]
            for key, states in agent._rnn_initial_states.items()
        }

    def _act(self, obs: Any) -> tuple[Tensor, dict[str, Any]]:
        agent = self.agent
        if self._apart and agent._rnn_initial_states is agent._rnn_final_states:
            agent._rnn_initial_states = dict(agent._rnn_final_states)
        result: tuple[Tensor, dict[str, Any]] = agent.act(obs, None, timestep=0, timesteps=1)
        return result

    def _record(self, obs: Any, terminated: Tensor, truncated: Tensor) -> None:
        """The step before, with the flags that came with this observation."""
        if self._last is None:
            return
        then, action = self._last
        self.agent.record_transition(
            observations=then,
            states=None,
            actions=action,
            rewards=torch.zeros(len(terminated), 1, device=then.device),
            next_observations=obs,
            next_states=None,
            terminated=terminated[:, None],
            truncated=truncated[:, None],
            infos={},
            timestep=0,
            timesteps=1,
        )

    def _value(self, obs: Any) -> Tensor:
        inputs = {"observations": self.agent._observation_preprocessor(obs), "states": None}
        value: Tensor = self.value.act({**inputs, "rnn": self.agent._rnn_initial_states["value"]}, role="value")[0]
        return value

    def _collect(self, segment: RecordedSegment) -> None:
        """Fill the agent's memory with the steps of a segment."""
        agent, (steps, rows) = self.agent, segment.terminated.shape
        memory = self._states_of(segment.start, rows, steps)
        for t in range(steps):
            self._record(segment.obs[t], segment.terminated[t], segment.truncated[t])
            agent.memory = memory  # the step before the segment is in another one
            self._act(segment.obs[t])
            self._last = segment.obs[t], segment.actions[t]
        none = torch.zeros_like(segment.terminated[0])
        self._record(segment.obs[-1], none, none)

    def _states_of(self, mark: Any, rows: int, steps: int) -> Any:
        """Continue from what was marked. Returns an empty memory for this many steps."""
        agent = self.agent
        self._start(rows, steps)
        memory = agent.memory
        self._start(rows, 1)
        agent._rnn_final_states = map_tensors(torch.clone, mark["final"])
        same = mark["initial"] is None
        agent._rnn_initial_states = agent._rnn_final_states if same else map_tensors(torch.clone, mark["initial"])
        self._last = mark["last"]
        return memory

    def _train(self, obs: Tensor, steps: int, rows: int) -> Replay:
        """As `update` does it in its first epoch, in one minibatch and without a loss."""
        agent, memory = self.agent, self.agent.memory
        how = {"mini_batches": 1, "sequence_length": agent._rnn_sequence_length}
        stored = dict(zip(agent._tensors_names, memory.sample_all(names=agent._tensors_names, **how)[0]))
        names = agent._rnn_tensors_names
        states = dict(zip(names, memory.sample_all(names=names, **how)[0]))
        order = memory.all_sequence_indexes if agent._rnn_sequence_length > 1 else slice(None)
        learn = self.preprocessors_learn  # gradients of observations pass through a preprocessor that does not learn
        how_scaled = {} if self.observation_preprocessor is None else {"train": learn, "no_grad": learn}
        observed = agent._observation_preprocessor(obs[order], **how_scaled)
        inputs = {"observations": observed, "states": None}
        flags = {"terminated": stored["terminated"], "truncated": stored["truncated"]}
        if self._ends_alike:
            flags["terminated"] = flags["terminated"] | flags["truncated"]

        def of(role: str) -> dict[str, Any]:
            mine = role if self.policy is not self.value else "policy"
            return {**inputs, **flags, "rnn": [x.transpose(0, 1) for key, x in states.items() if mine in key]}

        _, outputs = self.policy.act({**of("policy"), "taken_actions": stored["actions"]}, role="policy")
        distribution = self.policy.distribution(role="policy")
        value, _ = self.value.act(of("value"), role="value")
        output = columns((distribution, value), steps * rows)
        return Replay(
            _time_first(output, order, steps, rows), _time_first(outputs["log_prob"], order, steps, rows)[..., 0]
        )


def _time_first(x: Tensor, order: Any, steps: int, rows: int) -> Tensor:
    """From the order in which sequences were sampled to `[T, B, ...]`."""
    if isinstance(order, slice):
        return x.reshape(steps, rows, -1)
    back = torch.as_tensor(order, device=x.device).argsort()
    return x[back].reshape(steps, rows, -1)
