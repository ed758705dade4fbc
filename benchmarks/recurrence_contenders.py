"""The ways to run an LSTM or a GRU over a segment with resets: torch alone, TorchRL, what people write by hand, ours.

Each function takes a `Problem` and gives a `Contender` that computes the same thing (`nn`, which knows no resets,
aside). `CONTENDERS` lists them in the order of the table's columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from recurrence_problem import Contender, Problem, by_name
from torch import Tensor

import holdfast as hf


def nn_without_resets(problem: Problem) -> Contender:
    """torch.nn's own sequence: oneDNN, no resets. What the ratios are against."""
    start = [s.unsqueeze(0) for s in problem.start]
    state = tuple(start) if problem.cell == "lstm" else start[0]
    return Contender(lambda x: problem.module(x, state)[0], by_name(problem.module))


def torchrl(backend: str) -> Callable[[Problem], Contender]:
    def build(problem: Problem) -> Contender:
        from tensordict import TensorDict
        from torchrl.modules import GRUModule, LSTMModule, set_recurrent_mode

        hidden, lstm = problem.shape.hidden, problem.cell == "lstm"
        B, T = problem.shape.batch, problem.shape.steps
        names = ["h", "c"] if lstm else ["h"]
        module = (LSTMModule if lstm else GRUModule)(
            hidden,
            hidden,
            in_keys=["x", *names],
            out_keys=["y", *[("next", n) for n in names]],
            recurrent_backend=backend,
        )
        inner = module.lstm if lstm else module.gru
        inner.load_state_dict(problem.module.state_dict())
        first = problem.resets[0].unsqueeze(-1)
        states = {}
        for name, start in zip(names, problem.start):
            # TorchRL keeps one state per step; it reads the first one of each trajectory.
            states[name] = torch.zeros(B, T, 1, hidden)
            states[name][:, 0, 0] = start.masked_fill(first, 0.0)
        is_init = problem.resets.t().unsqueeze(-1).contiguous()

        def forward(x: Tensor) -> Tensor:
            td = TensorDict({"x": x.transpose(0, 1), "is_init": is_init, **states}, [B, T])
            with set_recurrent_mode(True):
                return module(td)["y"].transpose(0, 1)

        return Contender(forward, by_name(inner))

    return build


def loop_of_single_steps(problem: Problem) -> Contender:
    """CleanRL's way: one call of torch.nn's module per step, the state multiplied by (1 - done)."""
    keep = 1.0 - problem.resets.float().unsqueeze(-1)  # [T, B, 1]

    def forward(x: Tensor) -> Tensor:
        state = [s.unsqueeze(0) for s in problem.start]
        ys = []
        for x_t, k in zip(x.unbind(0), keep.unbind(0)):
            masked = [k * s for s in state]
            y, state = problem.module(x_t.unsqueeze(0), tuple(masked) if problem.cell == "lstm" else masked[0])
            state = list(state) if problem.cell == "lstm" else [state]
            ys.append(y)
        return torch.cat(ys)

    return Contender(forward, by_name(problem.module))


def hoisted_loop(problem: Problem) -> Contender:
    """The input product in one GEMM, the gates by hand, autograd through the loop."""
    weights = by_name(problem.module)
    w_ih, w_hh, b_ih, b_hh = weights.values()
    masks = problem.resets.unsqueeze(-1).unbind(0)

    def lstm(x: Tensor) -> Tensor:
        projected = torch.nn.functional.linear(x, w_ih, b_ih + b_hh)
        h, c = problem.start
        ys = []
        for gates, mask in zip(projected.unbind(0), masks):
            h, c = h.masked_fill(mask, 0.0), c.masked_fill(mask, 0.0)
            i, f, g, o = torch.addmm(gates, h, w_hh.t()).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            ys.append(h)
        return torch.stack(ys)

    def gru(x: Tensor) -> Tensor:
        projected = torch.nn.functional.linear(x, w_ih, b_ih)
        (h,) = problem.start
        ys = []
        for gates, mask in zip(projected.unbind(0), masks):
            h = h.masked_fill(mask, 0.0)
            xr, xz, xn = gates.chunk(3, -1)
            hr, hz, hn = torch.addmm(b_hh, h, w_hh.t()).chunk(3, -1)
            z = torch.sigmoid(xz + hz)
            n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
            h = n + z * (h - n)
            ys.append(h)
        return torch.stack(ys)

    return Contender(lstm if problem.cell == "lstm" else gru, weights)


def call_per_span(problem: Problem) -> Contender:
    """One torch.nn call for each span in which no environment resets."""
    starts = [0, *(t for t in problem.resets.any(1).nonzero().squeeze(1).tolist() if t > 0)]
    spans = list(zip(starts, [*starts[1:], problem.shape.steps]))

    def forward(x: Tensor) -> Tensor:
        state = [s.unsqueeze(0) for s in problem.start]
        ys = []
        for begin, end in spans:
            mask = problem.resets[begin].unsqueeze(-1)
            masked = [s.masked_fill(mask, 0.0) for s in state]
            y, state = problem.module(x[begin:end], tuple(masked) if problem.cell == "lstm" else masked[0])
            state = list(state) if problem.cell == "lstm" else [state]
            ys.append(y)
        return torch.cat(ys)

    return Contender(forward, by_name(problem.module))


def holdfast_kernel(kernel: str) -> Callable[[Problem], Contender]:
    """Our core with a named kernel."""

    def build(problem: Problem) -> Contender:
        hidden = problem.shape.hidden
        core = (hf.LSTM if problem.cell == "lstm" else hf.GRU)(hidden, hidden, kernel=kernel)
        core.load_state_dict(problem.module.state_dict())
        state = {leaf: s.unsqueeze(1) for leaf, s in zip(core.leaf_names, problem.start)}
        resets = problem.resets if problem.shape.p > 0 else None
        return Contender(lambda x: core(x, state, resets)[0], by_name(core))

    return build


@dataclass(frozen=True)
class Column:
    """One column of the table. `slow` ones are repeated less often; `max_steps` leaves out what would take minutes;
    `in_grid` ones make up the table of `--grid`, and `only_in_grid` ones appear nowhere else."""

    key: str
    title: str
    build: Callable[[Problem], Contender]
    resets: bool = True
    slow: bool = False
    max_steps: int = 1 << 30
    threads: int = 1
    in_grid: bool = False
    only_in_grid: bool = False


CONTENDERS: tuple[Column, ...] = (
    Column("nn", "torch.nn, no resets", nn_without_resets, resets=False, in_grid=True),
    Column("torchrl-pad", "TorchRL pad", torchrl("pad"), slow=True),
    Column("torchrl-scan", "TorchRL scan", torchrl("scan"), slow=True, max_steps=512),
    Column("loop", "loop of T=1 calls", loop_of_single_steps, slow=True),
    Column("hoisted", "hoisted loop, autograd", hoisted_loop),
    Column("spans", "a call per span", call_per_span),
    Column("portable", "Holdfast portable", holdfast_kernel("portable")),
    Column("native", "Holdfast native", holdfast_kernel("native"), in_grid=True),
    Column(
        "native-2",
        "Holdfast native, 2 threads",
        holdfast_kernel("native"),
        threads=2,
        in_grid=True,
        only_in_grid=True,
    ),
)
