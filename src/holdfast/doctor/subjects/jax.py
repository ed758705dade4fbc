"""JAX: a pair of functions `step(params, state, obs, done)` and `unroll(params, state, obs, dones)`, or a module of
Flax (linen or nnx) or Equinox. Needs `pip install 'holdfast[jax]'`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from holdfast.doctor.subjects.base import RecordedSegment, Replay, Subject, SubjectStep
from holdfast.doctor.subjects.jax_bridge import Differentiable, PureFunction, Returns, to_jax, to_torch
from holdfast.envs.jax.protocol import keep_jax_from_preallocating

#: a function of (params or module, state, obs, done or dones)
Function = Callable[[Any, Any, Any, Any], Any]


class JAX(Subject):
    """Pure functions over a pytree `params`. Both are compiled once per shape, here and in copies of this subject.

    Rollout: `step(params, state, obs [B, ...], done [B])`. Training: `unroll(params, state, obs [T, B, ...],
    dones [T, B])`. Flags are bool and came with their observation. One of the two suffices: `unroll` is then called with
    one step, or `step` is scanned over a segment. `initial_state(num_envs)` makes the first state. Both return the
    next state and anything else, in either order; `returns` says which if shapes do not. `output` picks what to compare
    from the rest: a pytree of arrays `[T, B, ...]` such as logits and value; by default all floating-point arrays.
    `done(terminated, truncated)` is the flag that the project passes; by default either one.
    """

    framework = "jax"

    def __init__(
        self,
        params: Any,
        unroll: Function | None = None,
        step: Function | None = None,
        *,
        initial_state: Callable[[int], Any],
        observation_space: Any,
        output: Callable[[Any], Any] | None = None,
        returns: Literal["state first", "state last"] | None = None,
        done: Callable[[Tensor, Tensor], Tensor] = torch.logical_or,
        num_envs: int = 5,
        name: str | None = None,
    ) -> None:
        if unroll is None and step is None:
            raise TypeError("subjects.JAX needs unroll=, step= or both: functions of (params, state, obs, done)")
        keep_jax_from_preallocating()
        super().__init__(observation_space, name=name or getattr(unroll or step, "__name__", None))
        self.num_envs, self.done, self.initial_state = num_envs, done, initial_state
        self._one_step = step is None
        how = Returns(returns, output)
        scanned = Returns("state first", output)
        self._training = (
            PureFunction(unroll, params, how) if unroll else PureFunction(_scanned(step, how), params, scanned)
        )
        self._acting = self._training if step is None else PureFunction(step, params, how)
        #: where gradients of the parameters arrive; their values are those inside the compiled functions
        self.parameters = nn.ParameterList([nn.Parameter(to_torch(x)) for x in self._training.trainable])
        self._state: Any = None

    @classmethod
    def linen(cls, module: Any, variables: Any, unroll: Any = None, step: Any = None, **options: Any) -> JAX:
        """A Flax linen module and its variables. `unroll(module, state, obs, dones)` calls the bound module.

        By default `module(state, (obs, dones))` over a sequence, also for one step, as in PureJaxRL.
        """
        import flax.linen

        options.setdefault("name", type(module).__name__)
        unroll = _carry_first if unroll is None and step is None else unroll
        pair = [None if f is None else flax.linen.apply(f, module) for f in (unroll, step)]
        return cls(variables, *pair, **options)

    @classmethod
    def nnx(cls, module: Any, unroll: Any = None, step: Any = None, **options: Any) -> JAX:
        """A Flax nnx module, with functions as in `linen`. Changes of the module inside a call are discarded."""
        from flax import nnx

        definition, params, rest = nnx.split(module, nnx.Param, ...)
        options.setdefault("name", type(module).__name__)
        unroll = _carry_first if unroll is None and step is None else unroll
        pair = [_on_module(f, lambda params: nnx.merge(definition, params, rest)) for f in (unroll, step)]
        return cls(params, *pair, **options)

    @classmethod
    def equinox(cls, module: Any, unroll: Any = None, step: Any = None, **options: Any) -> JAX:
        """An Equinox module, with functions as in `linen`. What works on one environment needs `jax.vmap` in them."""
        import equinox

        params, rest = equinox.partition(module, equinox.is_inexact_array)
        options.setdefault("name", type(module).__name__)
        unroll = _carry_first if unroll is None and step is None else unroll
        pair = [_on_module(f, lambda params: equinox.combine(params, rest)) for f in (unroll, step)]
        return cls(params, *pair, **options)

    def begin(self, num_envs: int) -> None:
        self._state = self.initial_state(num_envs)

    def step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> SubjectStep:
        done = to_jax(self.done(terminated, truncated))
        obs = to_jax(obs)
        if self._one_step:
            output, self._state = self._acting(self._state, _with_time(obs), done[None], lead=2)
            output = output[0]
        else:
            output, self._state = self._acting(self._state, obs, done, lead=1)
        return SubjectStep(to_torch(output))

    def mark(self) -> Any:
        return self.state()

    def state(self) -> Any:
        return tuple(to_torch(leaf) for leaf in self._training.leaves(self._state))

    def replay(self, segment: RecordedSegment) -> Replay:
        dones = self.done(segment.terminated, segment.truncated)
        call = Differentiable(self._training, self._state, segment.obs, to_jax(dones))
        output, *state = call(list(self.parameters), list(segment.start), segment.obs)
        return Replay(output, state=tuple(state))

    def poison(self, row: int) -> None:
        self._state = self._training.poisoned(self._state, row)


def _carry_first(module: Any, state: Any, obs: Any, dones: Any) -> Any:
    return module(state, (obs, dones))


def _on_module(function: Any, rebuild: Callable[[Any], Any]) -> Function | None:
    return None if function is None else lambda params, *args: function(rebuild(params), *args)


def _scanned(step: Any, how: Returns) -> Function:
    """`unroll` of a step function, state first: the stored flags are passed to each step, as in the rollout."""
    import jax

    def unroll(params: Any, state: Any, obs: Any, dones: Any) -> Any:
        def body(state: Any, x: Any) -> Any:
            return how.parts(step(params, state, *x), state)

        return jax.lax.scan(body, state, (obs, dones))

    return unroll


def _with_time(obs: Any) -> Any:
    import jax

    return jax.tree.map(lambda x: x[None], obs)
