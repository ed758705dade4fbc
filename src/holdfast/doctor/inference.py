"""Finds out what a policy observes when it does not say: which layer its observation reaches first, and what fits it.

Nothing is computed for real: a probe is sent in, and stopped at the first layer with weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.doctor.observations import Observations, device_of

#: sides of square images to try, the usual ones first
SIDES = (84, 64, 96, 32, 28, 128, 16, 8, *range(1, 65))
_PROBES = ((11,), (5, 6, 7), (5, 6), ())  # a vector, an image, rows of a board, a number


class _Reached(Exception):
    def __init__(self, layer: Any, x: Tensor) -> None:
        super().__init__()
        self.layer, self.x = layer, x


def space_of(module: Any, given: Any = None, call: Callable[[Any], Any] | None = None) -> Any:
    """What a policy observes: `given`, its own observation space, or what fits the first layer that an observation reaches.

    `call`: a function of observations `[N, ...]` that runs the policy, if it is known. Without it the first layer is the first
    that was assigned.
    """
    if given is not None:
        return given
    for holder in (module, getattr(module, "policy", None)):
        space = getattr(holder, "observation_space", None)
        if space is not None:
            return space
    if call is not None:
        space = infer_space(call, module)
        if space is None:
            raise UnknownObservation(module)
        return space
    for layer in module.modules() if isinstance(module, nn.Module) else ():
        size = getattr(layer, "in_features", None) or getattr(layer, "input_size", None)
        if size is not None:
            return (int(size),)
        if isinstance(layer, (nn.modules.conv._ConvNd, nn.Embedding)):
            break
    raise UnknownObservation(module)


class UnknownObservation(TypeError):
    """A policy does not say what it observes, and it could not be found out."""

    def __init__(self, module: Any) -> None:
        super().__init__(
            f"{type(module).__name__} does not say what it observes: pass observation_space=, or on the command line "
            "--obs-shape, such as --obs-shape 3 84 84"
        )


def infer_space(call: Callable[[Any], Any], module: nn.Module) -> Any:
    """A shape, or a Discrete space, of observations `[N, ...]` that `call` accepts; None if none was found."""
    for probe in _PROBES:
        reached = _first_layer(call, module, probe)
        if reached is not None:
            for space in _candidates(reached, probe):
                if _accepts(call, module, space):
                    return space
    # Nothing before the core: it refuses a probe of another size before any hook is called.
    cores: list[Any] = [layer for layer in module.modules() if _recurrent(layer)]
    sizes = [(int(core.input_size),) for core in cores]
    return next((space for space in sizes if _accepts(call, module, space)), None)


def _first_layer(call: Callable[[Any], Any], module: nn.Module, probe: tuple[int, ...]) -> _Reached | None:
    """The first layer with a known input size that a probe of this shape reaches."""

    def stop(layer: nn.Module, args: Any) -> None:
        if args and isinstance(args[0], Tensor):
            raise _Reached(layer, args[0])

    layers = [m for m in module.modules() if isinstance(m, (nn.Linear, nn.Embedding, *_CONVOLUTIONS)) or _recurrent(m)]
    with _hooked(layers, stop):
        for dtype in (torch.float32, torch.int64):
            try:
                call(torch.ones(2, *probe, dtype=dtype, device=device_of([module])))
            except _Reached as reached:
                return reached
            except Exception:
                continue
    return None


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _recurrent(layer: nn.Module) -> bool:
    return hasattr(layer, "input_size")


def _candidates(reached: _Reached, probe: tuple[int, ...]) -> Iterator[Any]:
    layer, x = reached.layer, reached.x
    if isinstance(layer, nn.Embedding):
        from gymnasium import spaces

        yield spaces.Discrete(layer.num_embeddings)
        for count in range(2, 17):
            yield spaces.MultiDiscrete([layer.num_embeddings] * count)
    elif isinstance(layer, _CONVOLUTIONS):
        sides = layer.weight.dim() - 2
        last = x.dim() > 1 and len(probe) == sides + 1 and x.shape[1] == probe[-1] and x.shape[1] != probe[0]
        for side in SIDES:
            yield (*[side] * sides, layer.in_channels) if last else (layer.in_channels, *[side] * sides)
    else:
        size = int(getattr(layer, "in_features", None) or layer.input_size)
        yield (size,)


def _accepts(call: Callable[[Any], Any], module: nn.Module, space: Any) -> bool:
    obs = Observations(space).sample(2, torch.Generator().manual_seed(0), device_of([module]))
    training = module.training
    try:
        with torch.no_grad():
            module.eval()
            call(obs)
    except Exception:
        return False
    finally:
        module.train(training)
    return True


@contextlib.contextmanager
def _hooked(layers: list[nn.Module], hook: Any) -> Iterator[None]:
    handles = [layer.register_forward_pre_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
