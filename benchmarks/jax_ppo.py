"""A whole recurrent PPO in one JAX program, as a baseline: environment, policy, GAE and updates compiled together.

RepeatPreviousEasy (k = 4) and PositionOnlyCartPoleEasy, LSTM or GRU, `where(reset, 0, carry)` inside a scan, fp32 with the
device's default matmul precision, Adam, 4 epochs x 4 minibatches of whole environments. Used by gpu_training.py.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

DECK, K = 52, 4


# --- environments -----------------------------------------------------------------------------------------------------


def deal(key: Any, left: Any) -> Any:
    """Draw a card from the number left of each suit [n, 4]: the same odds as a shuffled deck, without a shuffle."""
    u = random.uniform(key, (left.shape[0], 1)) * left.sum(1, keepdims=True)
    suit = (u >= jnp.cumsum(left, 1)).sum(1).clip(0, 3)
    return suit, left - jax.nn.one_hot(suit, 4)


def repeat_previous_begin(key: Any, n: int) -> Any:
    suit, left = deal(key, jnp.full((n, 4), 13.0))
    recent = jnp.zeros((n, K), jnp.int32).at[:, -1].set(suit)
    return {"left": left, "recent": recent, "t": jnp.zeros(n, jnp.int32)}, jax.nn.one_hot(suit, 4)


def repeat_previous_step(key: Any, state: Any, action: Any) -> Any:
    left, recent, t = state["left"], state["recent"], state["t"]
    unit = 1.0 / (DECK - K)
    reward = jnp.where(t >= K - 1, jnp.where(action == recent[:, 0], unit, -unit), 0.0)
    t = t + 1
    done = t == DECK - 1
    suit, left = deal(key, jnp.where(done[:, None], 13.0, left))
    recent = jnp.concatenate([recent[:, 1:], suit[:, None].astype(jnp.int32)], 1)
    obs = jax.nn.one_hot(suit, 4)
    state = {"left": left, "recent": recent, "t": jnp.where(done, 0, t)}
    return state, obs, reward, done, jnp.zeros_like(done), obs


LIMIT = 200


def cartpole_begin(key: Any, n: int) -> Any:
    physics = random.uniform(key, (n, 4), minval=-0.05, maxval=0.05)
    return {"s": physics, "t": jnp.zeros(n, jnp.int32)}, physics[:, ::2]


def cartpole_step(key: Any, state: Any, action: Any) -> Any:
    x, v, a, w = state["s"].T
    force = jnp.where(action == 1, 10.0, -10.0)
    cos, sin = jnp.cos(a), jnp.sin(a)
    temp = (force + 0.05 * w**2 * sin) / 1.1
    acc_a = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    acc_x = temp - 0.05 * acc_a * cos / 1.1
    s = jnp.stack([x + 0.02 * v, v + 0.02 * acc_x, a + 0.02 * w, w + 0.02 * acc_a], 1)
    t = state["t"] + 1
    terminated = (jnp.abs(s[:, 0]) > 2.4) | (jnp.abs(s[:, 2]) > 12 * 2 * jnp.pi / 360)
    truncated = (t >= LIMIT) & ~terminated
    done = terminated | truncated
    final = s[:, ::2]
    fresh, _ = cartpole_begin(key, s.shape[0])
    s = jnp.where(done[:, None], fresh["s"], s)
    return {"s": s, "t": jnp.where(done, 0, t)}, s[:, ::2], jnp.full(len(t), 1.0 / LIMIT), terminated, truncated, final


ENVS = {
    "RepeatPreviousEasy": (repeat_previous_begin, repeat_previous_step, 4, 4, False),
    "PositionOnlyCartPoleEasy": (cartpole_begin, cartpole_step, 2, 2, True),
}


# --- network ----------------------------------------------------------------------------------------------------------


def make_params(key: Any, cell: str, inputs: int, hidden: int, actions: int) -> Any:
    keys = random.split(key, 6)
    gates = 4 if cell == "lstm" else 3
    bound = hidden**-0.5
    uniform = partial(random.uniform, minval=-bound, maxval=bound)
    orthogonal = jax.nn.initializers.orthogonal
    return {
        "enc_w": orthogonal(2**0.5)(keys[0], (inputs, hidden)), "enc_b": jnp.zeros(hidden),
        "w_ih": uniform(keys[1], (hidden, gates * hidden)), "w_hh": uniform(keys[2], (hidden, gates * hidden)),
        "b_ih": uniform(keys[3], (gates * hidden,)), "b_hh": uniform(keys[4], (gates * hidden,)),
        "pi_w": orthogonal(0.01)(keys[5], (hidden, actions)), "pi_b": jnp.zeros(actions),
        "v_w": orthogonal(1.0)(keys[5], (hidden, 1)), "v_b": jnp.zeros(1),
    }  # fmt: skip


def recur(cell: str, p: Any, carry: Any, gates_x: Any, reset: Any) -> Any:
    carry = jax.tree.map(lambda s: jnp.where(reset[:, None], 0.0, s), carry)
    if cell == "lstm":
        h, c = carry
        i, f, g, o = jnp.split(gates_x + h @ p["w_hh"] + p["b_hh"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h
    (h,) = carry
    hr, hz, hn = jnp.split(h @ p["w_hh"] + p["b_hh"], 3, -1)
    xr, xz, xn = jnp.split(gates_x, 3, -1)
    r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
    h = (1 - z) * jnp.tanh(xn + r * hn) + z * h
    return (h,), h


def apply(cell: str, p: Any, carry: Any, obs: Any, resets: Any) -> Any:
    """obs [T, B, I], resets [T, B] -> carry, logits [T, B, A], value [T, B]."""
    gates_x = jnp.tanh(obs @ p["enc_w"] + p["enc_b"]) @ p["w_ih"] + p["b_ih"]
    carry, ys = lax.scan(lambda c, xr: recur(cell, p, c, *xr), carry, (gates_x, resets))
    return carry, ys @ p["pi_w"] + p["pi_b"], (ys @ p["v_w"] + p["v_b"])[..., 0]


# --- PPO --------------------------------------------------------------------------------------------------------------


def make_train(env: str, cell: str, n: int, T: int, hidden: int, lr: float, gamma: float, lam: float, epochs: int = 4,
               minibatches: int = 4, clip: float = 0.2, ent: float = 0.01, vf: float = 0.5, max_norm: float = 0.5) -> Any:  # fmt: skip
    begin, env_step, inputs, actions, truncates = ENVS[env]

    def fresh_carry(size: int) -> Any:
        zeros = jnp.zeros((size, hidden))
        return (zeros, zeros) if cell == "lstm" else (zeros,)

    def init(key: Any) -> Any:
        k1, k2, k3 = random.split(key, 3)
        params = make_params(k1, cell, inputs, hidden, actions)
        state, obs = begin(k2, n)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {
            "params": params, "m": zeros, "v": zeros, "count": jnp.zeros((), jnp.int32), "env": state, "obs": obs,
            "resets": jnp.ones(n, bool), "carry": fresh_carry(n), "key": k3, "ret": jnp.zeros(n), "recent": jnp.zeros(()),
        }  # fmt: skip

    def rollout_step(p: Any, carry: Any, _: Any) -> Any:
        env_state, obs, resets, memory, key, ret = carry
        key, k1, k2 = random.split(key, 3)
        memory, logits, value = apply(cell, p, memory, obs[None], resets[None])
        logits, value = logits[0], value[0]
        action = random.categorical(k1, logits)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
        env_state, next_obs, reward, terminated, truncated, final = env_step(k2, env_state, action)
        done = terminated | truncated
        boot = apply(cell, p, memory, final[None], jnp.zeros_like(done)[None])[2][0] if truncates else jnp.zeros(n)
        ret = ret + reward
        row = (
            obs,
            action,
            resets,
            reward,
            log_prob,
            value,
            terminated,
            truncated,
            boot,
            jnp.where(done, ret, 0.0),
            done,
        )
        return (env_state, next_obs, done, memory, key, jnp.where(done, 0.0, ret)), row

    def loss(p: Any, batch: Any, memory: Any) -> Any:
        obs, action, resets, old, advantage, returns = batch
        _, logits, value = apply(cell, p, memory, obs, resets)
        log_probs = jax.nn.log_softmax(logits)
        log_prob = jnp.take_along_axis(log_probs, action[..., None], -1)[..., 0]
        ratio = jnp.exp(log_prob - old)
        policy = -jnp.minimum(advantage * ratio, advantage * jnp.clip(ratio, 1 - clip, 1 + clip)).mean()
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
        return policy + vf * 0.5 * ((value - returns) ** 2).mean() - ent * entropy

    def adam(s: Any, grads: Any) -> Any:
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, max_norm / (norm + 1e-6)), grads)
        count = s["count"] + 1
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, s["m"], grads)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, s["v"], grads)
        c1, c2 = 1 - 0.9**count, 1 - 0.999**count
        params = jax.tree.map(lambda p, m, v: p - lr * (m / c1) / (jnp.sqrt(v / c2) + 1e-5), s["params"], m, v)
        return {**s, "params": params, "m": m, "v": v, "count": count}

    @jax.jit
    def update(s: Any) -> Any:
        start = s["carry"]
        (env_state, obs, resets, memory, key, ret), rows = lax.scan(
            partial(rollout_step, s["params"]),
            (s["env"], s["obs"], s["resets"], s["carry"], s["key"], s["ret"]),
            None,
            T,
        )
        o, a, r, reward, old, value, terminated, truncated, boot, ended, done = rows
        last = apply(cell, s["params"], memory, obs[None], resets[None])[2][0]
        following = jnp.concatenate([value[1:], last[None]])
        following = jnp.where(truncated, boot, jnp.where(terminated, 0.0, following))
        delta = reward + gamma * following - value

        def back(adv: Any, x: Any) -> Any:
            d, is_done = x
            adv = d + gamma * lam * jnp.where(is_done, 0.0, adv)
            return adv, adv

        _, advantage = lax.scan(back, jnp.zeros(n), (delta, done), reverse=True)
        returns = advantage + value
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        s = {**s, "env": env_state, "obs": obs, "resets": resets, "carry": memory, "ret": ret}
        batch = (o, a, r, old, advantage, returns)

        def epoch(carry: Any, k: Any) -> Any:
            order = random.permutation(k, n).reshape(minibatches, -1)

            def minibatch(s: Any, columns: Any) -> Any:
                part = jax.tree.map(lambda x: x[:, columns], batch)
                grads = jax.grad(loss)(s["params"], part, jax.tree.map(lambda x: x[columns], start))
                return adam(s, grads), None

            return lax.scan(minibatch, carry, order)[0], None

        key, sub = random.split(key)
        s, _ = lax.scan(epoch, s, random.split(sub, epochs))
        mean = ended.sum() / jnp.maximum(done.sum(), 1)
        return {**s, "key": key}, mean, done.sum()

    return init, update


class Program:
    """A compiled training, to be run for as long as asked."""

    def __init__(self, env: str, cell: str, n: int, T: int = 64, hidden: int = 128, lr: float = 3e-3, gamma: float = 0.6,
                 lam: float = 0.9, threshold: float = 0.95, seed: int = 0) -> None:  # fmt: skip
        self.began, self.steps_per_update, self.threshold = time.perf_counter(), n * T, threshold
        init, self._update = make_train(env, cell, n, T, hidden, lr, gamma, lam)
        self._state, self.mean, _ = self._update(jax.jit(init)(random.key(seed)))
        jax.block_until_ready(self._state)
        self.compile_seconds = time.perf_counter() - self.began
        self.solved: float | None = None

    def train(self, seconds: float) -> tuple[int, float]:
        """Train for about `seconds`; steps, and the seconds that they took."""
        updates, timed = 0, time.perf_counter()
        while time.perf_counter() - timed < seconds:
            for _ in range(5):
                self._state, self.mean, ended = self._update(self._state)
            updates += 5
            if float(self.mean) >= self.threshold and int(ended) > 0 and self.solved is None:
                self.solved = time.perf_counter() - self.began
        jax.block_until_ready(self._state)
        return updates * self.steps_per_update, time.perf_counter() - timed


def run(
    env: str, cell: str, n: int, T: int = 64, hidden: int = 128, *, seconds: float = 10.0, **options: Any
) -> dict[str, Any]:
    """Compile, then train for about `seconds`. Returns steps/s and the seconds from the start to the threshold."""
    program, wall = Program(env, cell, n, T, hidden, **options), time.time()
    steps, taken = program.train(seconds)
    return {
        "steps_per_second": steps / taken,
        "compile_seconds": program.compile_seconds,
        "solved_after_seconds": program.solved,
        "last_return": float(program.mean),
        "window": [wall, time.time()],
    }


def serve(program: str) -> None:
    """Compile the program described in JSON (arguments of `Program`) and say so; then train for as many seconds as each line of
    the standard input names, and print steps and seconds. Lets another program take turns with this one."""
    compiled = Program(**json.loads(program))
    print(json.dumps({"compile_seconds": compiled.compile_seconds}), flush=True)
    for line in sys.stdin:
        print(json.dumps(compiled.train(float(line))), flush=True)
