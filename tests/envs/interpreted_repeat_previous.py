"""Plays RepeatPrevious in Triton's interpreter on the CPU, next to the torch one, and prints where the two differ as JSON.

A script of its own, run by triton_interpreter.run (TRITON_INTERPRET=1, `tests` on the path). It does not set the variable itself,
because pytest imports this file to look for doctests.
"""

import json
import sys

import torch

import triton_interpreter
from holdfast.envs.repeat_previous import RepeatPrevious
from holdfast.state import named_leaves

CASES = {"easy": (70, 1, 4), "last card": (3, 1, 1), "long": (5, 1, 24)}  # environments, decks, k


def differences(num_envs: int, decks: int, k: int, seed: int) -> tuple[list[str], int]:
    """Names of what differed in any of two episodes' steps, and how many episodes ended."""
    env = RepeatPrevious(num_envs, decks, k)
    env.reset(seed=seed)
    differ, ended = set(), 0
    for _ in range(2 * 52 * decks):
        actions, draws = torch.randint(4, (num_envs,)), env.draw()
        wanted = env.transition(env.state, actions, draws)
        got = env._in_one_launch(env.state["deck"], env.state["recent"], actions, draws)
        mine, theirs = named_leaves(got._asdict()), named_leaves(wanted._asdict())
        differ |= {n for n in theirs if mine[n].dtype != theirs[n].dtype or not torch.equal(mine[n], theirs[n])}
        ended += int(wanted.done.sum())
        env.state = got.state
    return sorted(differ), ended


if __name__ == "__main__":
    triton_interpreter.accept_arrays_as_numbers()
    triton_interpreter.check_memory()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    json.dump({name: differences(*case, seed=seed) for seed, (name, case) in enumerate(CASES.items())}, sys.stdout)
