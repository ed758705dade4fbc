"""JAX: a pair of functions `step(params, state, obs, done)` and `unroll(params, state, obs, dones)`, or a module of
Flax (linen or nnx) or Equinox. Needs `pip install 'holdfast[jax]'`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.doctor.columns import describe
from holdfast.doctor.subjects.base import RecordedSegment, Replay, Subject, SubjectStep
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


# --- functions -------------------------------------------------------------------------------------------------------
# JAX functions as the doctor needs them: compiled, with PyTorch tensors in and out, and gradients through `jax.vjp`.


def to_jax(tree: Any) -> Any:
    """A pytree of tensors as JAX arrays. Copies, since JAX relies on arrays that never change."""
    import jax
    import jax.numpy as jnp

    def convert(x: Tensor) -> Any:
        x = x.detach().cpu()
        if x.dtype is torch.bfloat16:
            return jnp.array(x.view(torch.int16).numpy()).view(jnp.bfloat16)
        return jnp.array(x.numpy())

    return jax.tree.map(convert, tree)


def to_torch(array: Any) -> Tensor:
    """One JAX array as a tensor of its own."""
    import jax.numpy as jnp

    if array.dtype == jnp.bfloat16:
        return torch.from_numpy(np.array(array.view(jnp.int16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


@dataclass(frozen=True)
class Returns:
    """Which part of a result is the state, and what to compare of the rest."""

    order: str | None
    output: Callable[[Any], Any] | None

    def split(self, result: Any, state: Any, lead: tuple[int, ...]) -> tuple[Any, Any]:
        """(`[*lead, K]` what to compare, the next state)."""
        import jax
        import jax.numpy as jnp

        after, rest = self.parts(result, state)
        picked = rest if self.output is None else self.output(rest)
        arrays = [x for x in jax.tree.leaves(picked) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)]
        arrays = [x for x in arrays if x.shape[: len(lead)] == lead]
        if not arrays:
            raise TypeError(
                f"subjects.JAX found no floating-point arrays with leading shape {lead} in what the function returned; "
                "pass output=, a function that picks logits and value from it"
            )
        return jnp.concatenate([x.reshape(*lead, -1).astype(arrays[0].dtype) for x in arrays], axis=-1), after

    def parts(self, result: Any, state: Any) -> tuple[Any, Any]:
        """(the next state, everything else) of a result; `state`: the one before."""
        place = self._place_of_state(result, state)
        rest = tuple(part for i, part in enumerate(result) if i != place)
        return result[place], rest[0] if len(rest) == 1 else rest

    def _place_of_state(self, result: Any, state: Any) -> int:
        if not isinstance(result, (tuple, list)) or len(result) < 2:
            raise TypeError(
                f"subjects.JAX: the function must return a state and outputs, and returned {describe(result)}"
            )
        last = len(result) - 1
        if self.order is not None:
            return 0 if self.order == "state first" else last
        places = [i for i in (0, last) if _alike(result[i], state)]
        if len(places) != 1:
            raise TypeError(
                f"subjects.JAX: {'both' if places else 'neither'} the first and the last part of the result "
                f"{'have' if places else 'has'} the shapes of the state: pass returns='state first' or 'state last'"
            )
        return places[0]


def _alike(left: Any, right: Any) -> bool:
    import jax

    if jax.tree.structure(left) != jax.tree.structure(right):
        return False
    return all(a.shape == b.shape for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right)))


class PureFunction:
    """`function(params, state, obs, done)`, compiled per shape. Never changes, so copies of a subject share it."""

    def __init__(self, function: Any, params: Any, returns: Returns) -> None:
        import jax

        self.params = params
        leaves = jax.tree.leaves(params)
        self.trainable = [x for x in leaves if _is_float(x)]

        def run(params: Any, state: Any, obs: Any, done: Any, lead: int) -> Any:
            return returns.split(function(params, state, obs, done), state, done.shape[:lead])

        def pullback(inputs: Any, fixed: Any, cotangents: Any) -> Any:
            def outputs(inputs: Any) -> Any:
                params, state, obs, done = _merge(inputs, fixed)
                output, state = run(params, state, obs, done, 2)
                return [output, *[x for x in jax.tree.leaves(state) if _is_float(x)]]

            return jax.vjp(outputs, inputs)[1](cotangents)[0]

        self._run = jax.jit(run, static_argnames="lead")
        self._pullback = jax.jit(pullback)

    def __deepcopy__(self, memo: Any) -> PureFunction:
        return self

    def __call__(self, state: Any, obs: Any, done: Any, *, lead: int) -> tuple[Any, Any]:
        """(`[*lead shape, K]` what to compare, the next state); the first `lead` dimensions are time and batch."""
        with _full_float32():
            return self._run(self.params, state, obs, done, lead=lead)

    def pullback(self, inputs: Any, fixed: Any, cotangents: Any) -> Any:
        """Gradients of the floating-point leaves `inputs`, which stand in `fixed` where that is None."""
        with _full_float32():
            return self._pullback(inputs, fixed, cotangents)

    @staticmethod
    def leaves(tree: Any) -> list[Any]:
        import jax

        return jax.tree.leaves(tree)

    @staticmethod
    def poisoned(state: Any, row: int) -> Any:
        """The state with NaN in one environment's row."""
        import jax

        return jax.tree.map(lambda x: x.at[row].set(float("nan")) if _is_float(x) and x.ndim else x, state)


class Differentiable:
    """One call of the training leg, as an operation that PyTorch can differentiate.

    `state_like`: any state, for its structure.
    """

    def __init__(self, function: PureFunction, state_like: Any, obs: Any, dones: Any) -> None:
        import jax

        self.function, self.dones = function, dones
        self.state_tree = jax.tree.structure(state_like)
        self.obs_tree = jax.tree.structure(obs)

    def __call__(self, parameters: list[Tensor], state: list[Tensor], obs: Any) -> tuple[Tensor, ...]:
        import jax

        observed = jax.tree.leaves(obs)
        call: Any = _Call
        return tuple(call.apply(self, len(state), *state, *observed, *parameters))

    def forward(self, state: list[Tensor], obs: list[Tensor]) -> tuple[list[Any], Any]:
        """(output and the leaves of the next state, all inputs as one pytree)."""
        import jax

        given = self.state_tree.unflatten(to_jax(state)), self.obs_tree.unflatten(to_jax(obs))
        output, after = self.function(*given, self.dones, lead=2)
        return [output, *jax.tree.leaves(after)], (self.function.params, *given, self.dones)

    def backward(self, inputs: Any, cotangents: list[Any]) -> list[Any]:
        """Gradients of parameters, state and observations, in this order, floating-point leaves only."""
        import jax

        chosen = jax.tree.map(lambda x: x if _is_float(x) else None, inputs)
        fixed = jax.tree.map(lambda x: None if _is_float(x) else x, inputs)
        return jax.tree.leaves(self.function.pullback(chosen, fixed, cotangents))


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Differentiable, states: int, *tensors: Tensor) -> Any:
        observed = call.obs_tree.num_leaves
        outputs, ctx.inputs = call.forward(list(tensors[:states]), list(tensors[states : states + observed]))
        ctx.call, ctx.states, ctx.observed = call, states, observed
        ctx.is_float = [x.is_floating_point() for x in tensors]
        results = tuple(to_torch(x) for x in outputs)
        ctx.mark_non_differentiable(*[x for x in results if not x.is_floating_point()])
        ctx.result_is_float = [x.is_floating_point() for x in results]
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        cotangents = [to_jax(g) for g, is_float in zip(gradients, ctx.result_is_float) if is_float]
        found = [to_torch(g) for g in ctx.call.backward(ctx.inputs, cotangents)]
        count = sum(ctx.is_float[ctx.states + ctx.observed :])  # parameters come first in JAX, last in PyTorch
        remaining = iter([*found[count:], *found[:count]])
        return None, None, *[next(remaining) if is_float else None for is_float in ctx.is_float]


def _full_float32() -> Any:
    """Inside, JAX computes products of float32 numbers in float32; on a GPU its default is TF32, which differs from leg to leg."""
    import jax

    return jax.default_matmul_precision("highest")


def _is_float(x: Any) -> bool:
    import jax.numpy as jnp

    return hasattr(x, "dtype") and bool(jnp.issubdtype(x.dtype, jnp.floating))


def _merge(inputs: Any, fixed: Any) -> Any:
    import jax

    return jax.tree.map(lambda a, b: b if a is None else a, inputs, fixed, is_leaf=lambda x: x is None)
