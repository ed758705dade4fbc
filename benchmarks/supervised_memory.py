"""What each memory can learn to hold, without reinforcement learning: updates until 97.5% of the answers are right.

    python benchmarks/supervised_memory.py                                  # all cells; minutes of CPU
    python benchmarks/supervised_memory.py --tasks "recall 32" --cores lru  # some of them

A policy as the trainer makes it (64 units, `memory_span` as given below) is trained by cross-entropy. `recall k`: name the
symbol, one of four, of k steps ago, at every step. `sign n`: one of two signs, then n to 2 n steps of an empty corridor,
then one question. A core that fails here cannot learn the task by reinforcement either; this takes seconds to find out.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import torch
from this_commit import this_commit
from torch import Tensor
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.cores.named import CORES

RESULTS = Path(__file__).parent / "results" / "supervised_memory.json"
TASKS = ("recall 4", "recall 32", "recall 64", "sign 200")
BATCH, LAST, RIGHT = 16, 10, 0.975


def recall(k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Observations [T, B, 4], the steps that are asked, and what is right there."""
    symbols = torch.randint(0, 4, (max(64, 2 * k), BATCH))
    return torch.eye(4)[symbols], torch.arange(k, len(symbols)), symbols[:-k]


def sign(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """As a maze looks after observations are normalized: what is rare is large, the corridor is small."""
    steps, signs = n + int(torch.randint(0, n, ())), torch.randint(0, 2, (BATCH,))
    obs = torch.full((steps, BATCH, 4), 0.05)
    obs[0] += 10 * torch.eye(4)[signs]
    obs[-1, :, 3] += 10
    return obs, torch.tensor([steps - 1]), signs.unsqueeze(0)


def updates_until_right(task: str, core: str, layers: int, seed: int, rate: float, limit: int) -> dict[str, Any]:
    kind, number = task.split()
    span = int(number) + 1 if kind == "recall" else 2 * int(number)
    torch.manual_seed(seed)
    box, answers = gymnasium.spaces.Box(-9, 9, (4,)), gymnasium.spaces.Discrete(4)
    policy = hf.ActorCritic(box, answers, core=core, hidden_size=64, num_layers=layers, memory_span=span)
    adam = torch.optim.Adam(policy.parameters(), lr=rate, eps=1e-5)
    began, shares, found = time.process_time(), [], None
    for update in range(1, limit + 1):
        obs, asked, right = (recall if kind == "recall" else sign)(int(number))
        logits = policy.unroll(obs, policy.initial_state(BATCH)).dist.logits.view(*obs.shape[:2], 4)[asked]
        loss = cross_entropy(logits.flatten(0, 1), right.flatten())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        adam.step()
        shares.append(float((logits.argmax(-1) == right).float().mean()))
        if len(shares) >= LAST and sum(shares[-LAST:]) / LAST >= RIGHT:
            found = update
            break
    cell = {"task": task, "core": core, "layers": layers, "seed": seed, "updates": found, "limit": limit}
    return cell | {"share_right": sum(shares[-LAST:]) / LAST, "cpu_seconds": time.process_time() - began}


def table(cells: list[dict[str, Any]]) -> str:
    """Cores by tasks: updates, or the share of right answers at the end."""
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    lines = ["| core | " + " | ".join(tasks) + " |", "|---" * (len(tasks) + 1) + "|"]
    for core, layers in dict.fromkeys((cell["core"], cell["layers"]) for cell in cells):
        row = []
        for task in tasks:
            mine = [c for c in cells if (c["task"], c["core"], c["layers"]) == (task, core, layers)]
            row.append(", ".join(f"**{c['updates']}**" if c["updates"] else f"{c['share_right']:.0%}" for c in mine))
        lines.append(f"| {core}{f', {layers} layers' if layers > 1 else ''} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--cores", nargs="+", default=list(CORES), choices=list(CORES))
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--seeds", nargs="+", type=int, default=[11])
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--limit", type=int, default=150, help="updates")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    commit = this_commit()
    command = shlex.join(["python", "benchmarks/supervised_memory.py", *sys.argv[1:]])
    cells: list[dict[str, Any]] = []
    for core in args.cores:
        for task in args.tasks:
            for seed in args.seeds:
                cells.append(updates_until_right(task, core, args.layers, seed, args.learning_rate, args.limit))
                print(cells[-1], flush=True)
                args.output.write_text(
                    json.dumps({"command": command, "commit": commit, "cells": cells}, indent=1) + "\n"
                )
    print(table(cells))


if __name__ == "__main__":
    main()
