"""The last layers of actor and critic, and what follows them, each as one launch in Triton: PPO's loss with its gradient.

One product gives all outputs of a row: those of the actor, then the value. `loss_and_gradients` goes from the features of
the core to their gradient and to those of both layers, reading features once and writing their gradient once. With many
outputs, whose weights no multiprocessor has room for, the products are cuBLAS's, and the kernels begin and end at the outputs.
`algorithms/ppo.py` and `policies/heads.py` say what is computed. Sums are of fixed order, so repeats are bit-identical.

Rows of a minibatch are read where the rollout left them: row t, column `columns[i]` of [T, B].
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.triton.sums import sum_rows
from holdfast.kernels.triton.tiles import Tile, padded, programs_for

KINDS = {"categorical": 0, "bernoulli": 1, "gaussian": 2}  # KIND in the kernels
FEW = 8  # outputs of actor and critic up to which sums are faster than tensor cores
ONE_TILE = 16  # outputs of actor and critic up to which both layers fit next to a tile of rows; products outside beyond
METRICS = 5  # policy loss, value loss, entropy, approximate KL divergence, clip fraction: sums over rows

HALF_LOG_2PI = tl.constexpr(0.9189385332046727)


@triton.jit
def load_layers(
    actor_w, actor_b, critic_w, critic_b, F: tl.constexpr, FP: tl.constexpr, A: tl.constexpr, KP: tl.constexpr
):
    """Both layers side by side: weights [FP, KP] and bias [1, KP]. Column A is the critic's, those after it are 0."""
    f, k = tl.arange(0, FP)[:, None], tl.arange(0, KP)[None, :]
    w = tl.load(actor_w + k * F + f, mask=(f < F) & (k < A), other=0.0)
    w += tl.load(critic_w + f + 0 * k, mask=(f < F) & (k == A), other=0.0)
    b = tl.load(actor_b + k, mask=k < A, other=0.0) + tl.load(critic_b + 0 * k, mask=k == A, other=0.0)
    return w, b


@triton.jit
def load_scale(log_std, center, half_range, A: tl.constexpr, KP: tl.constexpr):
    """Of Box actions, [1, KP] each: mean = center + half * output, and the logarithm of the deviation."""
    k = tl.arange(0, KP)[None, :]
    spread = tl.load(log_std + k, mask=k < A, other=0.0)
    middle, half = tl.zeros([1, KP], tl.float32), tl.full([1, KP], 1.0, tl.float32)
    if center is not None:
        middle = tl.load(center + k, mask=k < A, other=0.0)
        half = tl.load(half_range + k, mask=k < A, other=1.0)
        spread += tl.log(half)
    return middle, half, spread


@triton.jit
def layer_outputs(features, w, bias, FEW: tl.constexpr):
    """features [BLOCK, FP] times w [FP, KP], plus bias, in fp32: sums where there are few outputs, tensor cores otherwise."""
    if FEW:
        out = tl.sum(features[:, None, :] * tl.trans(w)[None, :, :], 2)
    else:
        out = tl.dot(features, w, input_precision="tf32x3")
    return out + bias


@triton.jit
def log_softmax(out, inside):
    """Over the columns `inside`; -inf elsewhere."""
    z = tl.where(inside, out, float("-inf"))
    top = tl.max(z, 1)
    total = tl.sum(tl.exp(z - top[:, None]), 1)
    return z - (top + tl.log(total))[:, None]


@triton.jit
def log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit(do_not_specialize=["rows", "size", "batch", "start"])
def loss_kernel(
    y, actor_w, actor_b, critic_w, critic_b, log_std, center, half_range, bounds, actions, old_log_prob, old_value,
    advantage, returns, valid, columns, weight, clip_range, entropy_coef, dy, partials, rows, size, batch, start, value_coef,
    clip_value,
    F: tl.constexpr, FP: tl.constexpr, A: tl.constexpr, KP: tl.constexpr, HEADS: tl.constexpr, KIND: tl.constexpr,
    CLIP_VALUE: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """MANY: y and dy are outputs [rows, A + 1] and their gradient, not features; the weights' gradients are the caller's."""
    K: tl.constexpr = A + 1
    WEIGHTS: tl.constexpr = 0 if MANY else K * F
    program, programs = tl.program_id(0), tl.num_programs(0)
    k, f = tl.arange(0, KP)[None, :], tl.arange(0, FP)[None, :]
    is_action, is_value = k < A, k == A
    if KIND == 2:
        middle, half, spread = load_scale(log_std, center, half_range, A, KP)
        inverse_std = tl.exp(-spread)
        gaussian_entropy = tl.sum(tl.where(is_action, spread + 0.5 + HALF_LOG_2PI, 0.0), 1)  # [1]
    each, clip, bonus = tl.load(weight), tl.load(clip_range), tl.load(entropy_coef)
    if not MANY:
        w, bias = load_layers(actor_w, actor_b, critic_w, critic_b, F, FP, A, KP)
        d_w = tl.zeros([KP, FP], tl.float32)
    d_b = tl.zeros([BLOCK, KP], tl.float32)
    d_spread = tl.zeros([BLOCK, KP], tl.float32)
    none = tl.zeros([BLOCK], tl.float32)
    policy_sum, value_sum, entropy_sum, kl_sum, clipped_sum = none, none, none, none, none

    for first in range(program * BLOCK, rows, programs * BLOCK):
        row = first + tl.arange(0, BLOCK)
        ok = row < rows
        column = row % size
        if columns is not None:
            column = tl.load(columns + column, mask=ok, other=0).to(tl.int32)
        at = (row // size).to(tl.int64) * batch + column  # in the rollout
        if MANY:
            here = row.to(tl.int64)[:, None] * K + k
            out = tl.load(y + here, mask=ok[:, None] & (k < K), other=0.0)
        else:
            here = row.to(tl.int64)[:, None] * F + f
            features = tl.load(y + here, mask=ok[:, None] & (f < F), other=0.0)
            out = layer_outputs(features, w, bias, FEW)
        value = tl.sum(tl.where(is_value, out, 0.0), 1)

        # log-probability, entropy, and their gradients by outputs
        log_prob, entropy = none, none
        d_log_prob, d_entropy = tl.zeros([BLOCK, KP], tl.float32), tl.zeros([BLOCK, KP], tl.float32)
        if KIND == 0:
            for head in range(HEADS):
                begin, end = tl.load(bounds + head), tl.load(bounds + head + 1)
                inside = (k >= begin) & (k < end)
                choice = (tl.load(actions + at * HEADS + head, mask=ok, other=0) - start).to(tl.int32) + begin
                log_p = tl.where(inside, log_softmax(out, inside), 0.0)
                p = tl.where(inside, tl.exp(log_p), 0.0)
                chosen = k == choice[:, None]
                head_entropy = -tl.sum(p * log_p, 1)
                log_prob += tl.sum(tl.where(chosen, log_p, 0.0), 1)
                entropy += head_entropy
                d_log_prob += tl.where(chosen, 1.0, 0.0) - p
                d_entropy -= p * (log_p + head_entropy[:, None])
        elif KIND == 1:
            bit = tl.load(actions + at[:, None] * A + k, mask=ok[:, None] & is_action, other=0) > 0
            p = tl.sigmoid(out)
            log_prob = tl.sum(tl.where(is_action, log_sigmoid(tl.where(bit, out, -out)), 0.0), 1)
            entropy = tl.sum(tl.where(is_action, -log_sigmoid(-out) - p * out, 0.0), 1)
            d_log_prob = tl.where(bit, 1.0, 0.0) - p
            d_entropy = -out * p * (1.0 - p)
        else:
            action = tl.load(actions + at[:, None] * A + k, mask=ok[:, None] & is_action, other=0.0)
            z = (action - (middle + half * out)) * inverse_std
            log_prob = tl.sum(tl.where(is_action, -0.5 * z * z - spread - HALF_LOG_2PI, 0.0), 1)
            entropy = none + gaussian_entropy
            d_log_prob = z * inverse_std * half

        real = ok
        if valid is not None:
            real = tl.load(valid + at, mask=ok, other=0) != 0
        log_ratio = log_prob - tl.load(old_log_prob + at, mask=ok, other=0.0)
        gain_per_ratio = tl.load(advantage + at, mask=ok, other=0.0)
        error = value - tl.load(returns + at, mask=ok, other=0.0)
        ratio = tl.exp(log_ratio)
        near = tl.where(ratio < 1.0 - clip, 1.0 - clip, tl.where(ratio > 1.0 + clip, 1.0 + clip, ratio))  # keeps a NaN
        gain, clipped_gain = gain_per_ratio * ratio, gain_per_ratio * near
        moves = gain <= clipped_gain
        squared = error * error
        if CLIP_VALUE:
            before = tl.load(old_value + at, mask=ok, other=0.0)
            moved = value - before
            inner = tl.where(moved < -clip_value, -clip_value, tl.where(moved > clip_value, clip_value, moved))
            other = before + inner - (value - error)
            worse = other * other > squared
            squared = tl.where(worse, other * other, squared)
            error = tl.where(worse, tl.where(tl.abs(moved) <= clip_value, other, 0.0), error)

        policy_sum -= tl.where(real, tl.where(moves, gain, clipped_gain), 0.0)
        value_sum += tl.where(real, 0.5 * squared, 0.0)
        entropy_sum += tl.where(real, entropy, 0.0)
        kl_sum += tl.where(real, ratio - 1.0 - log_ratio, 0.0)
        clipped_sum += tl.where(real & (tl.abs(ratio - 1.0) > clip), 1.0, 0.0)

        by_log_prob = tl.where(real & moves, -each * gain, 0.0)
        by_entropy = tl.where(real, -each * bonus, 0.0)
        by_value = tl.where(real, each * value_coef * error, 0.0)
        d_out = by_log_prob[:, None] * d_log_prob + by_entropy[:, None] * d_entropy
        d_out = tl.where(real[:, None] & is_action, d_out, tl.where(is_value, by_value[:, None], 0.0))
        if KIND == 2:
            by_spread = by_log_prob[:, None] * (z * z - 1.0) + by_entropy[:, None]
            d_spread += tl.where(real[:, None] & is_action, by_spread, 0.0)
        d_b += d_out
        if MANY:
            tl.store(dy + here, d_out, mask=ok[:, None] & (k < K))
        else:
            if FEW:
                d_w += tl.sum(d_out[:, :, None] * features[:, None, :], 0)
                d_features = tl.sum(d_out[:, :, None] * tl.trans(w)[None, :, :], 1)
            else:
                d_w += tl.dot(tl.trans(d_out), features, input_precision="tf32x3")
                d_features = tl.dot(d_out, tl.trans(w), input_precision="tf32x3")
            tl.store(dy + here, d_features, mask=ok[:, None] & (f < F))

    # what this program has summed: weights [K, F] unless MANY, biases [K], logarithms of deviations [A], metrics
    mine = partials + program.to(tl.int64) * (WEIGHTS + K + A + 5)
    if not MANY:
        rows_of_w, columns_of_w = tl.arange(0, KP)[:, None], tl.arange(0, FP)[None, :]
        tl.store(mine + rows_of_w * F + columns_of_w, d_w, mask=(rows_of_w < K) & (columns_of_w < F))
    unit = tl.arange(0, KP)
    tl.store(mine + WEIGHTS + unit, tl.sum(d_b, 0), mask=unit < K)
    tl.store(mine + WEIGHTS + K + unit, tl.sum(d_spread, 0), mask=unit < A)
    metrics = mine + WEIGHTS + K + A
    tl.store(metrics, tl.sum(policy_sum, 0))
    tl.store(metrics + 1, tl.sum(value_sum, 0))
    tl.store(metrics + 2, tl.sum(entropy_sum, 0))
    tl.store(metrics + 3, tl.sum(kl_sum, 0))
    tl.store(metrics + 4, tl.sum(clipped_sum, 0))


@triton.jit(do_not_specialize=["batch", "start"])
def act_kernel(
    y, actor_w, actor_b, critic_w, critic_b, log_std, center, half_range, bounds, noise, value_mean, value_std, actions,
    log_probs, values, batch, start,
    F: tl.constexpr, FP: tl.constexpr, A: tl.constexpr, KP: tl.constexpr, HEADS: tl.constexpr, KIND: tl.constexpr,
    FEW: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A step of the rollout. noise [B, A]: exponential, uniform or normal numbers. value_mean, value_std: None if values are
    not normalized. MANY: y is outputs [B, A + 1], not features."""
    k, f = tl.arange(0, KP)[None, :], tl.arange(0, FP)[None, :]
    is_action = k < A
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = row < batch
    if MANY:
        out = tl.load(y + row.to(tl.int64)[:, None] * (A + 1) + k, mask=ok[:, None] & (k <= A), other=0.0)
    else:
        w, bias = load_layers(actor_w, actor_b, critic_w, critic_b, F, FP, A, KP)
        features = tl.load(y + row.to(tl.int64)[:, None] * F + f, mask=ok[:, None] & (f < F), other=0.0)
        out = layer_outputs(features, w, bias, FEW)
    value = tl.sum(tl.where(k == A, out, 0.0), 1)
    if value_mean is not None:
        value = value * tl.load(value_std).to(tl.float32) + tl.load(value_mean).to(tl.float32)
    tl.store(values + row, value, mask=ok)
    drawn = tl.load(noise + row.to(tl.int64)[:, None] * A + k, mask=ok[:, None] & is_action, other=1.0)
    log_prob = tl.zeros([BLOCK], tl.float32)
    if KIND == 0:
        for head in range(HEADS):
            begin, end = tl.load(bounds + head), tl.load(bounds + head + 1)
            inside = (k >= begin) & (k < end)
            log_p = log_softmax(out, inside)
            choice = tl.argmax(tl.where(inside, log_p - tl.log(drawn), float("-inf")), 1)  # Gumbel-max
            log_prob += tl.sum(tl.where(k == choice[:, None], log_p, 0.0), 1)
            tl.store(actions + row.to(tl.int64) * HEADS + head, (choice - begin + start).to(tl.int64), mask=ok)
    else:
        at = row.to(tl.int64)[:, None] * A + k
        if KIND == 1:
            bit = drawn < tl.sigmoid(out)
            log_prob = tl.sum(tl.where(is_action, log_sigmoid(tl.where(bit, out, -out)), 0.0), 1)
            tl.store(actions + at, bit.to(tl.int8), mask=ok[:, None] & is_action)
        else:
            middle, half, spread = load_scale(log_std, center, half_range, A, KP)
            mean = middle + half * out
            action = mean + tl.exp(spread) * drawn
            z = (action - mean) * tl.exp(-spread)
            log_prob = tl.sum(tl.where(is_action, -0.5 * z * z - spread - HALF_LOG_2PI, 0.0), 1)
            tl.store(actions + at, action, mask=ok[:, None] & is_action)
    tl.store(log_probs + row, log_prob, mask=ok)


class Layers(NamedTuple):
    """The last layers of actor and critic, and what their outputs mean. All tensors are float32 unless said."""

    actor_w: Tensor  # [A, F]
    actor_b: Tensor  # [A]
    critic_w: Tensor  # [1, F]
    critic_b: Tensor  # [1]
    kind: str = "categorical"
    bounds: Tensor | None = None  # [heads + 1] int32: where the outputs of each categorical head begin, and the end
    start: int = 0  # the first action of a categorical
    log_std: Tensor | None = None  # [A]
    center: Tensor | None = None  # [A], Box actions in units of their bounds only
    half_range: Tensor | None = None

    @property
    def heads(self) -> int:
        """Numbers in an action."""
        return self.actor_w.shape[0] if self.bounds is None else self.bounds.numel() - 1

    @property
    def _weights(self) -> tuple[Tensor | None, ...]:
        return (
            self.actor_w, self.actor_b, self.critic_w, self.critic_b, self.log_std, self.center, self.half_range,
            self.bounds,
        )  # fmt: skip

    @property
    def few(self) -> bool:
        """Whether there are so few outputs that sums in fp32 are faster than tensor cores, which take 16."""
        return self.actor_w.shape[0] < FEW

    @property
    def many(self) -> bool:
        """Whether there are so many outputs that the products are made outside the kernels."""
        return self.actor_w.shape[0] >= ONE_TILE

    def joined(self) -> tuple[Tensor, Tensor] | None:
        """Weights [A + 1, F] and biases of both layers in one tensor each, where there are many outputs."""
        if not self.many:
            return None
        return torch.cat([self.actor_w.detach(), self.critic_w.detach()]), torch.cat(
            [self.actor_b.detach(), self.critic_b.detach()]
        )

    def _sizes(self, tile: Tile, **own: object) -> dict[str, object]:
        outputs, features = self.actor_w.shape
        few = self.few
        return dict(
            F=features, FP=padded(features), A=outputs, KP=padded(outputs + 1, 2 if few else 16), HEADS=self.heads,
            KIND=KINDS[self.kind], FEW=few, MANY=self.many, BLOCK=tile.rows, num_warps=tile.warps,
            **({"num_stages": 1} if self.many else {}), **own,
        )  # fmt: skip


class Stored(NamedTuple):
    """What a rollout stored, [T, B] each: values and returns in units of the loss."""

    actions: Tensor  # [T, B] or [T, B, numbers]
    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    returns: Tensor
    valid: Tensor | None  # bool; None: every step is real


class Coefficients(NamedTuple):
    """Of the loss. Tensors have no dimensions: a captured launch reads the current numbers."""

    weight: Tensor  # of one real step
    clip_range: Tensor
    clip_value: float | None
    entropy_coef: Tensor
    value_coef: float


class LossGradients(NamedTuple):
    """Gradients of the features [rows, F] and of the layers, and sums over real steps."""

    features: Tensor
    actor_w: Tensor
    critic_w: Tensor
    actor_b: Tensor
    critic_b: Tensor
    log_std: Tensor
    metrics: Tensor  # [5]: policy loss, value loss, entropy, approximate KL divergence, clip fraction


def loss_and_gradients(
    y: Tensor, layers: Layers, stored: Stored, columns: Tensor | None, by: Coefficients, tile: Tile | None = None
) -> LossGradients:  # fmt: skip
    """PPO's loss on features y [rows, F] of these columns of a rollout (None: all), and all gradients."""
    tile = tile or (Tile(4, 1, 8) if layers.few else Tile(32, 4, 4) if layers.many else Tile(64, 4, 4))
    tile = tile.for_sums() if layers.few else tile
    rows, batch = y.shape[0], stored.log_prob.shape[1]
    outputs, features = layers.actor_w.shape
    size = batch if columns is None else columns.numel()
    programs = programs_for(rows, tile.rows, y.device, tile.per_processor)
    joined = layers.joined()
    read = y if joined is None else torch.addmm(joined[1], y, joined[0].t())
    d_read = torch.empty_like(read)
    weights = (outputs * features, features) if joined is None else ()
    parts = (*weights, outputs, 1, outputs, METRICS)
    partials = torch.empty(programs, sum(parts), dtype=torch.float32, device=y.device)
    loss_kernel[(programs,)](
        read, *layers._weights, *stored, columns, by.weight, by.clip_range, by.entropy_coef, d_read, partials, rows, size,
        batch, layers.start, by.value_coef, by.clip_value or 0.0,
        **layers._sizes(tile, CLIP_VALUE=by.clip_value is not None),
    )  # fmt: skip
    flat = sum_rows(partials)
    if joined is None:
        actor_w, critic_w, actor_b, critic_b, log_std, metrics = flat.split(parts)
        dy = d_read
    else:
        actor_b, critic_b, log_std, metrics = flat.split(parts)
        actor_w, critic_w = (d_read.t() @ y).split([outputs, 1])
        dy = d_read @ joined[0]
    return LossGradients(
        dy, actor_w.view(outputs, features), critic_w.view(1, features), actor_b, critic_b, log_std, metrics
    )


def act(
    y: Tensor, layers: Layers, noise: Tensor, scale: tuple[Tensor, Tensor] | None, actions: Tensor, log_prob: Tensor,
    value: Tensor, joined: tuple[Tensor, Tensor] | None = None, tile: Tile | None = None,
) -> None:  # fmt: skip
    """Actions, their log-probabilities and values of features y [B, F], written into the last three.

    noise [B, A]: exponential (categorical), uniform (Bernoulli) or normal numbers. scale: mean and deviation of values, or
    None if they are not normalized. joined: `layers.joined()`, if the caller has it already.
    """
    batch = y.shape[0]
    joined = joined or layers.joined()
    if joined is not None:
        y = torch.addmm(joined[1], y, joined[0].t())
    tile = tile or (Tile(8, 1) if layers.few else Tile(16, 4))
    tile = tile.for_sums() if layers.few else tile
    mean, std = (None, None) if scale is None else scale
    act_kernel[(triton.cdiv(batch, tile.rows),)](
        y, *layers._weights, noise, mean, std, actions, log_prob, value, batch, layers.start, **layers._sizes(tile)
    )  # fmt: skip
