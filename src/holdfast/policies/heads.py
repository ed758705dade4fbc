"""Action distributions for policies: categorical (several heads, masks), Bernoulli, Gaussian, squashed Gaussian, greedy, and
`Factored`, several of them at once.

They do what a policy needs and nothing else: `sample()`, `mode`, `log_prob(action)`, `entropy()`, all with batch
shape [N]. torch.distributions work too; these take several times less time per step, accept action masks, and compile
without a graph break. Which one fits an action space is decided in `actor.py`.

A mask is bool, True = allowed. A forbidden action has probability 0 and contributes no gradient and no entropy.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.checks import values_are_readable, whole_numbers
from holdfast.state import from_leaves, leaves, tree_map

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def _require_shape(action: Tensor, shape: Sequence[int], what: str) -> None:
    """One head in place of two, or one bit in place of several, would be broadcast or left out without a word."""
    if tuple(action.shape) != tuple(shape):
        raise ValueError(
            f"{what} have shape {tuple(action.shape)}, expected {tuple(shape)}: one row per step and environment"
        )


def mask_tensors(mask: Any, device: torch.device) -> Any:
    """An action mask as bool tensors, as `RecurrentPolicy.as_mask` describes it; arrays go to `device`."""
    if mask is None or isinstance(mask, Tensor):
        return mask
    if isinstance(mask, np.ndarray) and mask.dtype.kind in "biuf":
        return torch.as_tensor(mask.astype(bool) if mask.dtype != bool else mask, device=device)
    if isinstance(mask, (tuple, list)) and len(mask):
        if any(part is None or isinstance(part, (Tensor, np.ndarray)) for part in leaves(mask)):
            return [mask_tensors(part, device) for part in mask]
        try:
            return mask_tensors(np.array(mask), device)
        except ValueError:  # rows of different lengths: one mask per head
            if isinstance(leaves(mask[0])[0], (bool, int)) and not isinstance(mask[0], (bool, int)):
                return [mask_tensors(part, device) for part in mask]
    kinds = ", ".join(type(part).__name__ for part in mask[:4]) or "nothing" if isinstance(mask, (tuple, list)) else ""
    raise TypeError(
        f"action_mask is a {type(mask).__name__}{f' of {kinds}' if kinds else ''}, expected bools (True = allowed): an array or "
        "tensor [N, actions], or a list with one per action head"
    )


def check_mask(mask: Tensor, shape: tuple[int, ...], what: str, may_be_empty: Tensor | None = None) -> None:
    """Check the structure always, and that each row allows something where values may be read.

    may_be_empty: rows that need not allow anything, because they cannot be reached.
    """
    _check_mask_structure(mask, shape, what)
    if values_are_readable(mask):
        empty = ~mask.any(-1)
        if may_be_empty is not None:
            empty = empty & ~may_be_empty
        if bool(empty.any()):
            row = empty.nonzero()[0].tolist()
            raise ValueError(
                f"the action mask {what} forbids every action in row {row[0]} ({int(empty.sum())} such rows); "
                "allow at least one, e.g. a no-op"
            )


def _check_mask_structure(mask: Tensor, shape: tuple[int, ...], what: str) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"the action mask {what} is {got}, expected a bool tensor (True = allowed)")
    if tuple(mask.shape) != shape:
        raise ValueError(f"the action mask {what} has shape {tuple(mask.shape)}, expected {shape}")


class Categorical:
    """One choice among n; logits [N, n], mask [N, n] or None. Actions are numbered from `start`."""

    def __init__(self, logits: Tensor, mask: Tensor | None = None, start: int = 0) -> None:
        self.start = start
        self.params = logits
        """What it is made from, [N, n]: also of forbidden actions."""
        if mask is not None:
            check_mask(mask, tuple(logits.shape), f"for {logits.shape[-1]} actions")
            logits = logits.masked_fill(~mask, -torch.inf)
        self.logits = logits
        self.mask = mask
        self.log_probs = F.log_softmax(logits, dim=-1)  # [N, n]

    def sample(self) -> Tensor:
        # Gumbel-max: one pass, no host synchronization, and forbidden actions stay at -inf.
        noise = torch.empty_like(self.log_probs).exponential_().log_()
        return self._number((self.log_probs - noise).argmax(-1))

    @property
    def mode(self) -> Tensor:
        return self._number(self.log_probs.argmax(-1))

    def _number(self, index: Tensor) -> Tensor:
        return index + self.start if self.start else index

    def log_prob(self, action: Tensor) -> Tensor:
        _require_shape(action, self.log_probs.shape[:-1], "discrete actions")
        index = whole_numbers(action, "discrete actions") - self.start
        return self.log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        p = self.log_probs.exp()
        log_p = self.log_probs if self.mask is None else self.log_probs.masked_fill(~self.mask, 0.0)
        return -(p * log_p).sum(-1)

    @property
    def full_log_probs(self) -> Tensor:
        return self.log_probs


class MultiCategorical:
    """Several choices at once; logits [N, sum(nvec)], action [N, len(nvec)].

    mask: [N, sum(nvec)] for all heads, or one entry per head: None, [N, n_j], or [N, n_i, n_j] for a head whose allowed
    actions depend on what head `parents[j]` chose (by default the head just before it). The chosen row is used wherever
    the action comes from, so sampling and evaluation agree.
    """

    def __init__(
        self,
        logits: Tensor,
        nvec: Sequence[int],
        mask: Tensor | Sequence[Tensor | None] | None = None,
        parents: dict[int, int] | None = None,
    ) -> None:
        self.nvec = list(nvec)
        self.logits = logits.split(self.nvec, dim=-1)
        self.masks = self._split_mask(mask)
        self.parents = parents or {}
        self._given: list[Tensor] | None = None  # the action of the last `log_prob`
        self._check_masks()

    def _split_mask(self, mask: Tensor | Sequence[Tensor | None] | None) -> list[Tensor | None]:
        if mask is None:
            return [None] * len(self.nvec)
        if isinstance(mask, Tensor):
            total = sum(self.nvec)
            if mask.dim() != 2 or mask.shape[-1] != total:
                raise ValueError(
                    f"the action mask has shape {tuple(mask.shape)}, expected [N, {total}] "
                    f"(the heads {self.nvec} side by side); "
                    "for a head that depends on another pass a list with one mask per head"
                )
            return list(mask.split(self.nvec, dim=-1))
        if len(mask) != len(self.nvec):
            raise ValueError(
                f"got {len(mask)} action masks for {len(self.nvec)} heads; pass one per head, None where all is allowed"
            )
        return list(mask)

    def _check_masks(self) -> None:
        n = self.logits[0].shape[0]
        for j, (mask, size) in enumerate(zip(self.masks, self.nvec)):
            if mask is None:
                continue
            if isinstance(mask, Tensor) and mask.dim() == 3:
                parent = self.parents.get(j, j - 1)
                if not 0 <= parent < j:
                    raise ValueError(
                        f"head {j} has a mask [N, n_i, n_j] but no earlier head to depend on (parent {parent})"
                    )
                # Choices that head `parent` cannot make need no allowed action here.
                allowed = self.masks[parent]
                unreachable = ~allowed if isinstance(allowed, Tensor) and allowed.dim() == 2 else None
                check_mask(mask, (n, self.nvec[parent], size), f"of head {j} given head {parent}", unreachable)
            else:
                check_mask(mask, (n, size), f"of head {j}")

    def head(self, j: int, chosen: list[Tensor]) -> Categorical:
        """Head j, given the choices of the heads before it."""
        mask = self.masks[j]
        if mask is not None and mask.dim() == 3:
            rows = chosen[self.parents.get(j, j - 1)].long().view(-1, 1, 1).expand(-1, 1, mask.shape[-1])
            mask = mask.gather(1, rows).squeeze(1)
        return Categorical(self.logits[j], mask)

    def _choose(self, how: str) -> Tensor:
        chosen: list[Tensor] = []
        for j in range(len(self.nvec)):
            head = self.head(j, chosen)
            chosen.append(head.sample() if how == "sample" else head.mode)
        return torch.stack(chosen, -1)

    def sample(self) -> Tensor:
        return self._choose("sample")

    @property
    def mode(self) -> Tensor:
        return self._choose("mode")

    def log_prob(self, action: Tensor) -> Tensor:
        _require_shape(action, (len(self.logits[0]), len(self.nvec)), f"actions of the heads {self.nvec}")
        given = self._given = list(action.unbind(-1))
        return torch.stack([self.head(j, given).log_prob(a) for j, a in enumerate(given)]).sum(0)

    def entropy(self) -> Tensor:
        """Of the heads, each given the action of the last `log_prob` (exact where no head depends on another)."""
        return torch.stack([head.entropy() for head in self._heads_given_action()]).sum(0)

    @property
    def full_log_probs(self) -> Tensor:
        """[N, sum(nvec)]; a dependent head's are given the action of the last `log_prob`, or the mode."""
        return torch.cat([head.log_probs for head in self._heads_given_action()], -1)

    def _heads_given_action(self) -> list[Categorical]:
        """All heads, given the action of the last `log_prob`, or the mode."""
        given = list(self.mode.unbind(-1)) if self._given is None else self._given
        return [self.head(j, given) for j in range(len(self.nvec))]


class Bernoulli:
    """n independent bits (MultiBinary); logits and action [N, n]. mask [N, n]: a forbidden bit is 0."""

    def __init__(self, logits: Tensor, mask: Tensor | None = None) -> None:
        if mask is not None:
            _check_mask_structure(mask, tuple(logits.shape), "of the bits (True = may be 1)")
            logits = logits.masked_fill(~mask, -torch.inf)
        self.logits = logits
        self.mask = mask

    def sample(self) -> Tensor:
        p = torch.sigmoid(self.logits)
        return (torch.rand_like(p) < p).to(torch.int8)

    @property
    def mode(self) -> Tensor:
        return (self.logits > 0).to(torch.int8)

    def log_prob(self, action: Tensor) -> Tensor:
        _require_shape(action, self.logits.shape, "binary actions")
        logits, action = self.logits, whole_numbers(action, "binary actions")
        sign = torch.where(action > 0, 1.0, -1.0).to(logits.dtype)
        return F.logsigmoid(logits * sign).sum(-1)

    def entropy(self) -> Tensor:
        logits = self.logits if self.mask is None else self.logits.masked_fill(~self.mask, 0.0)
        p = torch.sigmoid(logits)
        bits = F.softplus(logits) - p * logits
        if self.mask is not None:
            bits = bits.masked_fill(~self.mask, 0.0)
        return bits.sum(-1)

    @property
    def full_log_probs(self) -> Tensor:
        return F.logsigmoid(self.logits)


class Greedy:
    """The action with the largest Q; q [N, n], mask [N, n] or None. Actions are numbered from `start`.

    Nothing is random unless a rollout brings noise (`rollout/exploration.py`). `log_prob` is Q(action) - max Q: 0 for the greedy
    action, so that both legs of a policy can be compared; it is no probability.
    """

    def __init__(self, q: Tensor, mask: Tensor | None = None, start: int = 0) -> None:
        self.q, self.start = q, start
        if mask is not None:
            check_mask(mask, tuple(q.shape), f"for {q.shape[-1]} actions")
        self.allowed = q if mask is None else q.masked_fill(~mask, -torch.inf)

    @property
    def params(self) -> Tensor:
        """What it is made from, [N, n]."""
        return self.q

    @property
    def value(self) -> Tensor:
        """The largest allowed Q, [N]."""
        return self.allowed.amax(-1)

    @property
    def mode(self) -> Tensor:
        return self.allowed.argmax(-1) + self.start

    def sample(self, noise: Tensor | None = None) -> Tensor:
        """noise [N, 1 + n]: where the first number is negative, the allowed action with the largest of the others."""
        if noise is None:
            return self.mode
        random = noise[:, 1:].masked_fill(self.allowed == -torch.inf, -torch.inf).argmax(-1) + self.start
        return torch.where(noise[:, 0] < 0, random, self.mode)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.of(action) - self.value

    def of(self, action: Tensor) -> Tensor:
        """Q of these actions, [N]."""
        _require_shape(action, self.q.shape[:-1], "discrete actions")
        index = whole_numbers(action, "discrete actions") - self.start
        return self.q.gather(-1, index.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        return torch.zeros_like(self.q[:, 0])


class Gaussian:
    """Independent normals (Box of `shape`); mean [N, n], log_std [n] or [N, n]. Actions are raw, not clipped.

    Actions have the dtype of mean, probabilities that of log_std. unit [n]: what 1 in the network's outputs means in actions.
    """

    def __init__(
        self, mean: Tensor, log_std: Tensor, shape: tuple[int, ...] | None = None, unit: Tensor | float = 1.0
    ) -> None:
        self.mean, self.log_std, self.unit = mean, log_std.expand_as(mean), unit
        self.shape = tuple(mean.shape[1:]) if shape is None else tuple(shape)

    def sample(self, noise: Tensor | None = None) -> Tensor:
        """noise: standard normal numbers [N, n] to use; None: drawn here."""
        noise = torch.randn_like(self.log_std) if noise is None else noise
        return (self.mean + self.log_std.exp() * noise).view(-1, *self.shape)

    @property
    def deviation(self) -> Tensor:
        """In units of the network's outputs, [N, n]."""
        return self.log_std.exp() / self.unit

    @property
    def mode(self) -> Tensor:
        return self.mean.view(-1, *self.shape)

    def log_prob(self, action: Tensor) -> Tensor:
        _require_shape(action, (len(self.mean), *self.shape), "Box actions")
        z = (action.reshape(self.mean.shape) - self.mean).to(self.log_std.dtype) * torch.exp(-self.log_std)
        return (-0.5 * z * z - self.log_std - _HALF_LOG_2PI).sum(-1)

    def entropy(self) -> Tensor:
        return (self.log_std + 0.5 + _HALF_LOG_2PI).sum(-1)


class SquashedGaussian:
    """center + half_range * tanh(u) with u normal: actions that keep their bounds (Box of `shape`).

    mean, log_std: of u, [N, n] and [n] or [N, n]. Actions have the dtype of center. The entropy is a quadrature with fixed points:
    nothing in it is random.
    """

    def __init__(
        self,
        mean: Tensor,
        log_std: Tensor,
        center: Tensor,
        half_range: Tensor,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self.mean, self.log_std = mean, log_std.expand_as(mean)
        self.center, self.half_range = center, half_range
        self.shape = tuple(mean.shape[1:]) if shape is None else tuple(shape)

    def _action(self, u: Tensor) -> Tensor:
        return (self.center + self.half_range * torch.tanh(u)).view(-1, *self.shape)

    def sample(self, noise: Tensor | None = None) -> Tensor:
        """noise: standard normal numbers [N, n] to use; None: drawn here."""
        noise = torch.randn_like(self.mean) if noise is None else noise
        return self._action(self.mean + self.log_std.exp() * noise)

    def rsample(self) -> tuple[Tensor, Tensor]:
        """An action and its log-probability, with gradients. Both come from u: through the action, which float32 rounds to its
        bounds, gradients would be wrong."""
        noise = torch.randn_like(self.mean)
        u = self.mean + self.log_std.exp() * noise
        log_prob = -0.5 * noise * noise - self.log_std - _HALF_LOG_2PI - _log_slope(u) - self._log_range()
        return self._action(u), log_prob.sum(-1)

    @property
    def params(self) -> Tensor:
        """What it is made from, [N, 2 n]: mean and log std of u."""
        return torch.cat([self.mean, self.log_std], -1)

    @property
    def deviation(self) -> Tensor:
        """Of u, [N, n]."""
        return self.log_std.exp()

    @property
    def mode(self) -> Tensor:
        """The most likely u, squashed."""
        return self._action(self.mean)

    def log_prob(self, action: Tensor) -> Tensor:
        _require_shape(action, (len(self.mean), *self.shape), "Box actions")
        squashed = (action.reshape(self.mean.shape) - self.center) / self.half_range
        u = torch.atanh(squashed.clamp(-_INSIDE, _INSIDE)).to(self.mean.dtype)
        z = (u - self.mean) * torch.exp(-self.log_std)
        return (-0.5 * z * z - self.log_std - _HALF_LOG_2PI - _log_slope(u) - self._log_range()).sum(-1)

    def entropy(self) -> Tensor:
        std, slope = self.log_std.exp(), torch.zeros_like(self.mean)
        for point, weight in _QUADRATURE:  # numbers, not a tensor: a captured graph copies nothing from the host
            slope = slope + weight * _log_slope(self.mean + std * point)
        return (self.log_std + 0.5 + _HALF_LOG_2PI + slope + self._log_range()).sum(-1)

    def _log_range(self) -> Tensor:
        return self.half_range.log().to(self.mean.dtype)


_INSIDE = 1 - 1e-6  # float32 rounds tanh to 1 from about 9 on
_QUADRATURE = (
    (-3.7504397177, 0.0005482689),
    (-2.3667594107, 0.0307571240),
    (-1.1544053947, 0.2401231786),
    (0.0000000000, 0.4571428571),
    (1.1544053947, 0.2401231786),
    (2.3667594107, 0.0307571240),
    (3.7504397177, 0.0005482689),
)
"""Gauss-Hermite points and weights for a mean over a standard normal."""


def _log_slope(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2), exact for large u too."""
    return 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))


class Factored:
    """Independent distributions, for a Dict or Tuple action space; parts: a dict or tuple of them, nested as the space is.

    Actions are nested the same way. Log-probabilities and entropies are sums over the parts.
    """

    def __init__(self, parts: Any) -> None:
        self.parts = parts

    def sample(self) -> Any:
        return tree_map(lambda part: part.sample(), self.parts)

    @property
    def mode(self) -> Any:
        return tree_map(lambda part: part.mode, self.parts)

    def log_prob(self, action: Any) -> Tensor:
        pairs = zip(leaves(self.parts), nested_leaves(action, self.parts), strict=True)
        return torch.stack([part.log_prob(chosen) for part, chosen in pairs]).sum(0)

    def entropy(self) -> Tensor:
        return torch.stack([entropy_of(part) for part in leaves(self.parts)]).sum(0)

    @property
    def logits(self) -> list[Any]:
        """Of the parts that have some."""
        return [part.logits for part in leaves(self.parts) if hasattr(part, "logits")]

    @property
    def deviation(self) -> Tensor | None:
        """Of all parts that are normal, [N, n] in units of the network's outputs; None if none is."""
        found = [part.deviation for part in leaves(self.parts) if hasattr(part, "deviation")]
        return torch.cat(found, -1) if found else None


def nested_leaves(action: Any, like: Any) -> list[Any]:
    """The parts of an action, in the order of `leaves(like)`. Raises ValueError if it is not nested as `like` is."""
    if isinstance(like, dict):
        if isinstance(action, dict) and action.keys() == like.keys():
            return [leaf for key in like for leaf in nested_leaves(action[key], like[key])]
        expected = f"a dict with {', '.join(map(repr, like))}"
    elif isinstance(like, (tuple, list)):
        if isinstance(action, (tuple, list)) and len(action) == len(like):
            return [leaf for part, inner in zip(action, like) for leaf in nested_leaves(part, inner)]
        expected = f"a tuple of {len(like)}"
    elif not isinstance(action, (dict, tuple, list)):
        return [action]
    else:
        expected = "one tensor"
    got = f"a dict with {', '.join(map(repr, action))}" if isinstance(action, dict) else f"a {type(action).__name__}"
    raise ValueError(f"actions, or a part of them, came as {got}, expected {expected}: nested as the action space is")


def parameters_of(dist: Any) -> Tensor:
    """What a distribution is made from, [N, ...]: law 1 of rollouts that record no log-probabilities."""
    inner = dist.base_dist if isinstance(dist, torch.distributions.Independent) else dist
    if isinstance(inner, torch.distributions.Normal):
        return torch.stack([inner.loc, inner.scale.log()], -1)
    found = inner.logits if isinstance(inner, torch.distributions.Categorical) else getattr(dist, "params", None)
    if found is None:
        raise TypeError(
            f"decode returns a {type(dist).__name__}, whose parameters are not known; give it a property params, [N, ...], or return "
            "a distribution of hf.heads"
        )
    return found


def draw_action(dist: Any, noise: Tensor | None) -> Tensor:
    """An action of a policy's distribution. noise: standard normal numbers [N, n] for a Gaussian, ours or torch's, or what
    `Greedy` takes; any other distribution draws its own, as without noise. Of a `Factored`, for its Gaussian parts together."""
    if noise is None:
        return dist.sample()
    if isinstance(dist, Factored):
        parts = leaves(dist.parts)
        sizes = [_normal_numbers(part) for part in parts]
        if sum(sizes) != noise.shape[-1]:
            return dist.sample()
        drawn = [draw_action(p, x if n else None) for p, x, n in zip(parts, noise.split(sizes, -1), sizes)]
        return from_leaves(drawn, like=dist.parts)
    if isinstance(dist, (Gaussian, SquashedGaussian, Greedy)):
        return dist.sample(noise)
    if _normal_numbers(dist) * len(noise) == noise.numel():
        return dist.mean + dist.stddev * noise.view_as(dist.mean)
    return dist.sample()


def _normal_numbers(dist: Any) -> int:
    """How many standard normal numbers a row of a Gaussian, ours or torch's, is drawn from; 0 for other distributions."""
    base = dist.base_dist if isinstance(dist, torch.distributions.Independent) else dist
    normal = isinstance(base, (Gaussian, SquashedGaussian, torch.distributions.Normal))
    return int(dist.mean[0].numel()) if normal else 0


ENTROPY_SAMPLES = 16
_estimated: set[str] = set()  # distributions whose entropy was said to be estimated


def entropy_of(dist: Any) -> Tensor:
    """The entropy of a policy's distribution, [N]: its own, or estimated from samples if it has none (said once)."""
    if _has_entropy(dist):
        entropy: Tensor = dist.entropy()
        return entropy
    name = type(dist.base_dist if isinstance(dist, torch.distributions.Independent) else dist).__name__
    if not torch.compiler.is_compiling() and name not in _estimated:
        _estimated.add(name)
        warnings.warn(
            f"{name} has no entropy(); it is estimated from {ENTROPY_SAMPLES} samples (said once)", stacklevel=3
        )
    with_path = bool(getattr(dist, "has_rsample", False))
    samples = [dist.rsample() if with_path else dist.sample() for _ in range(ENTROPY_SAMPLES)]
    surprise = -torch.stack([dist.log_prob(sample) for sample in samples])  # [samples, N]
    if with_path or not surprise.requires_grad:
        return surprise.mean(0)
    # Samples that do not depend on the parameters: the gradient of the mean surprise alone would be 0 on average.
    value = surprise.detach()
    weight = (value - value.mean(0)) * (ENTROPY_SAMPLES / (ENTROPY_SAMPLES - 1))
    return (value - weight * (surprise - value)).mean(0)


def _has_entropy(dist: Any) -> bool:
    if isinstance(dist, torch.distributions.Independent):
        return _has_entropy(dist.base_dist)
    return getattr(type(dist), "entropy", None) not in (None, torch.distributions.Distribution.entropy)
