"""Mutants of checkpoints: structure, sizes and values changed, the digest right. Each is loaded and resumed.

    python tests/checkpoint_mutants.py --count 10000 --seed 1

A mutant must be refused with a `CheckpointError` of one line, or train on. Anything else is a failure: another error, a
message of several lines, a hang, or the death of the process, which is why the work is done in a child. Mutant number n
of a seed is always the same one. HOLDFAST_CACHE and CC choose the compiled kernel, so that it may be a sanitized one.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import selectors
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import holdfast as hf
from holdfast.config.imports import ImportNotAllowedError
from holdfast.envs.bridge import UnknownEnvError
from holdfast.rollout.env_failures import EnvFailedError
from holdfast.runs import checkpoint
from holdfast.runs.checkpoint import CheckpointError
from holdfast.training import run_state
from holdfast.training.nonfinite import NonFiniteError
from holdfast.training.replay_check import ReplayError

TINY = dict(
    hidden_size=4, num_envs=2, num_steps=4, minibatches=2, epochs=1, total_steps=10**6, tensorboard=False, quiet=True,
    device="cpu", threads=1, final_eval_episodes=1, checkpoint_every=0, replay_check_every=0,
)  # fmt: skip
KINDS: list[dict[str, Any]] = [
    dict(env="holdfast/RepeatPreviousEasy-v0", core="lstm"),
    dict(env="holdfast/PositionOnlyCartPoleEasy-v0", core="gru", normalize_obs=True, normalize_reward=True, bptt=2),
    dict(env="holdfast/TMaze-v0", core="lstm", reset="learned", critic_core="separate", env_kwargs={"length": 3}),
    dict(env="CartPole-v1", core="gru", num_layers=2, inputs=("obs", "prev_action", "prev_reward")),
]
SECONDS_PER_MUTANT = 60
SECONDS_TO_START = 600
ENDS = (NonFiniteError, ReplayError, EnvFailedError, ModuleNotFoundError)  # of a run, each one line from the command


def original(kind: int) -> dict[str, Any]:
    """The checkpoint of a tiny run after one update."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = hf.Trainer(hf.TrainConfig(**{**TINY, **KINDS[kind], "total_steps": 8, "run_dir": f"{folder}/run"}))
        trainer.run()
        return run_state.payload(trainer)


# --- mutation --------------------------------------------------------------------------------------------------------


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all nodes but the root. Long lists (random generators) count as a few."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    for number, (key, inner) in enumerate(items):
        if number < 4 or isinstance(tree, dict):
            yield (*path, key)
            yield from places(inner, (*path, key))


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def put(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    holder = at(tree, path[:-1])
    if isinstance(holder, tuple):
        put(tree, path[:-1], tuple(value if i == path[-1] else part for i, part in enumerate(holder)))
    else:
        holder[path[-1]] = value


NUMBERS = (
    -1,
    0,
    1,
    3,
    2**31,
    2**40,
    2**63,
    10**30,
    -(2**63),
    1e30,
    0.5,
    float("nan"),
    float("inf"),
    True,
    "x",
    None,
    [],
)
STRINGS = (
    "",
    "x",
    "../../escape",
    "/etc",
    "a" * 5000,
    "lstm\n",
    "holdfast/TMaze-v0",
    7,
    None,
    {},
    "no_such_module:Env-v0",
)


def changed_tensor(x: torch.Tensor, draw: random.Random) -> Any:
    flat = x.reshape(-1)
    floats = x.is_floating_point()
    return draw.choice(
        [
            lambda: torch.zeros(1, dtype=x.dtype),
            lambda: x.new_empty(0),
            lambda: torch.cat([flat, flat[:1]]),
            lambda: flat[:-1].clone(),
            lambda: torch.zeros(*x.shape, 2, dtype=x.dtype),
            lambda: torch.zeros((), dtype=x.dtype),
            lambda: torch.zeros(1, dtype=x.dtype).expand(10**6, 10**6),
            lambda: torch.zeros(3, dtype=x.dtype).expand(7, 3),
            lambda: x.t() if x.dim() == 2 else flat.flip(0),
            lambda: x.to(
                draw.choice([torch.float64, torch.float16, torch.int64, torch.int8, torch.bool, torch.complex64])
            ),
            lambda: torch.full_like(x, float("nan") if floats else 0),
            lambda: torch.full_like(x, float("inf") if floats else 1),
            lambda: torch.full_like(x, 1e30 if floats else 127) if x.dtype is not torch.bool else ~x,
            lambda: torch.full_like(x, -1) if x.dtype not in (torch.bool, torch.uint8) else x,
            lambda: torch.full_like(x, 2**62) if x.dtype is torch.int64 else x * 0,
            lambda: x.to_sparse() if x.dim() and floats else None,
            lambda: torch.nn.Parameter(x) if floats else 3,
            lambda: x.tolist(),
            lambda: None,
            lambda: "x",
            lambda: {},
        ]
    )()


def mutate(payload: dict[str, Any], draw: random.Random) -> tuple[dict[str, Any], str]:
    """A copy with one to three changes, and what they are."""
    mutant, said = copy.deepcopy(payload), []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        known = list(places(mutant))
        path = draw.choice(known)
        value = at(mutant, path)
        how = draw.random()
        if how < 0.1 and isinstance(at(mutant, path[:-1]), dict):
            del at(mutant, path[:-1])[path[-1]]
            said.append(f"without {path}")
            continue
        if how < 0.2:
            other = draw.choice(known)
            new = copy.deepcopy(at(mutant, other))
        elif isinstance(value, torch.Tensor):
            new = changed_tensor(value, draw)
        elif isinstance(value, (bool, int, float)):
            new = draw.choice(NUMBERS)
        elif isinstance(value, str):
            new = draw.choice(STRINGS)
        elif isinstance(value, dict):
            new = draw.choice([{}, None, list(value.values()), {**value, "more": 1}, {0: value}, "x", 5])
        elif isinstance(value, (list, tuple)):
            new = draw.choice([[], None, [*value, *value], list(value[:-1]), [value], {"0": value}, "x", [None] * 1000])
        else:
            new = draw.choice([0, "x", [], {}, torch.zeros(2)])
        put(mutant, path, new)
        said.append(f"{path} = {str(new)[:60]!r}")
    return mutant, "; ".join(said)


# --- what happens ----------------------------------------------------------------------------------------------------


def one_line(error: Exception) -> str:
    """ "refused", or what is wrong with the refusal."""
    if type(error) is not CheckpointError:
        return f"{type(error).__name__}: {error}"
    return "refused" if "\n" not in str(error) and len(str(error)) < 1000 else f"no line: {str(error)[:200]!r}"


def try_load(path: Path) -> str:
    try:
        hf.load(path)
    except ValueError as error:  # own_policy or the space was changed: the file says that the policy is the user's
        return "refused" if "your own policy" in str(error) else f"ValueError: {error}"
    except Exception as error:
        return one_line(error)
    return "accepted"


def try_resume(path: Path, folder: Path) -> str:
    """Resume and train one update."""
    try:
        trainer = hf.Trainer.resume(path, run_dir=str(folder))
    except (UnknownEnvError, ImportError, ImportNotAllowedError):  # the file names an environment that is not there
        return "refused"
    except ValueError as error:
        return "refused" if "your own policy" in str(error) else f"ValueError: {error}"
    except Exception as error:
        return one_line(error)
    config = trainer.config
    if config.num_steps > 64 or config.epochs > 100:
        return "accepted"  # long work, asked for by valid settings
    config.total_steps = (trainer.update + 1) * config.num_envs * config.num_steps
    config.eval_every, config.final_eval_episodes, config.tensorboard, config.quiet = 0, 1, False, True
    try:
        trainer.run()
    except ENDS:
        return "ended"
    except Exception as error:
        return f"while training, {type(error).__name__}: {error}"
    return "accepted"


def work(first: int, last: int, seed: int) -> None:
    """Try mutants and print a line of JSON for each."""
    originals = [original(kind) for kind in range(len(KINDS))]
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        for number in range(first, last):
            draw = random.Random(f"{seed}/{number}")
            mutant, said = mutate(originals[number % len(KINDS)], draw)
            print(json.dumps({"number": number, "mutation": said}), flush=True)
            path = Path(folder) / "mutant.pt"
            try:
                checkpoint.save(path, mutant)
            except Exception:  # torch cannot write every tensor
                print(json.dumps({"number": number, "load": "refused", "resume": "refused"}), flush=True)
                continue
            run = Path(folder) / f"run{number}"
            outcome = {"load": try_load(path), "resume": try_resume(path, run)}
            print(json.dumps({"number": number, **outcome}), flush=True)
            subprocess.run(["rm", "-rf", str(run)], check=True)


def hunt(count: int, seed: int, environment: dict[str, str] | None = None) -> tuple[Counter[str], list[str]]:
    """Try `count` mutants in child processes: how often what happened, and the failures."""
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    next_number = 0
    while next_number < count:
        command = [sys.executable, __file__, "--work", str(next_number), str(count), "--seed", str(seed)]
        with tempfile.TemporaryFile() as errors:
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, **(environment or {})}
            )
            mutation, ended = "before the first mutant", False
            for line in _lines(child):
                if "mutation" in line:
                    mutation = f"mutant {line['number']} of seed {seed}: {line['mutation']}"
                    next_number = line["number"] + 1
                    continue
                for how in ("load", "resume"):
                    usual = line[how] in ("accepted", "refused", "ended")
                    outcomes[f"{how}: {line[how] if usual else 'FAILED'}"] += 1
                    if not usual:
                        failures.append(f"{mutation}; {how}: {line[how]}")
                        print(failures[-1], file=sys.stderr, flush=True)
                ended = line["number"] + 1 == count
                if next_number % 250 == 0:
                    print(f"{next_number} of {count}: {dict(outcomes)}", file=sys.stderr, flush=True)
            if not ended:
                child.kill()
            code = child.wait()
            if not ended:
                errors.seek(0)
                outcomes["CRASHED OR HUNG"] += 1
                failures.append(f"{mutation}; exit code {code}: {errors.read()[-2000:].decode(errors='replace')}")
                if mutation.startswith("before"):
                    break
    return outcomes, failures


def _lines(child: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """What the child prints, until it ends or says nothing for too long."""
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        rest = b""
        timeout = SECONDS_TO_START
        while selector.select(timeout):
            timeout = SECONDS_PER_MUTANT
            data = os.read(child.stdout.fileno(), 65536)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from map(json.loads, lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="mutants to try")
    parser.add_argument("--seed", type=int, default=1, help="which mutants")
    parser.add_argument("--work", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        torch.set_num_threads(1)
        work(*options.work, options.seed)
        return 0
    outcomes, failures = hunt(options.count, options.seed)
    print(f"{options.count} mutants, seed {options.seed}")
    for name, times in sorted(outcomes.items()):
        print(f"  {name:18} {times}")
    print("\n".join(failures[:20]) if failures else "every mutant was refused in one line or trained on")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
