"""Mutants of shared policies: bytes, structure and values of every file changed. Each is loaded with `hf.load`.

    python tests/pretrained_mutants.py --count 10000 --seed 1

Half of them are *tampered*: files are changed and the manifest is not. All must be refused. The other half are *forged*: the
manifest is made again, as an attacker would. They must be refused, or load exactly the numbers that the file holds. No mutant
may run code: modules that mutants name would leave a mark, and an audit hook watches for processes, pickles and files
written. Every refusal is a `CheckpointError` or `ImportNotAllowedError` of one line. Mutant n of a seed is always the same.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

import holdfast as hf
from holdfast.config.imports import ImportNotAllowedError
from holdfast.runs import pretrained
from holdfast.runs.checkpoint import CheckpointError

SECONDS_PER_MUTANT = 20
EXTRA_MEMORY = 4 * 2**30
EVIL = "holdfast_mutant_module"
_DTYPES = {"F32": np.float32, "F64": np.float64, "I64": np.int64, "F16": np.float16, "BOOL": np.bool_, "U8": np.uint8}
_WATCHED = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "pickle.find_class",
    "ctypes.dlopen",
    "socket.connect",
)


def originals(folder: Path) -> list[Path]:
    """Folders of policies that have every kind of part."""
    box = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    parts = spaces.Dict({"a": box, "b": spaces.Tuple([spaces.Discrete(3, start=1), spaces.MultiBinary(2)])})
    policies = [
        hf.ActorCritic(box, spaces.Discrete(4), "lstm", 8, normalize_obs=True, normalize_value=True),
        hf.ActorCritic(parts, spaces.MultiDiscrete([2, 3]), "gru", 4, "separate", num_layers=2, mask_parents={1: 0}),
        hf.ActorCritic(
            box, spaces.Box(-1, np.array([1, 2], np.float32)), "window", 4, memory_span=4, squash_actions=True
        ),
    ]
    found = [hf.save_pretrained(policy, folder / f"original{i}") for i, policy in enumerate(policies)]
    settings = dict(
        env="holdfast/TMaze-v0", env_kwargs={"length": 3}, hidden_size=4, num_envs=4, num_steps=8, total_steps=256
    )
    trainer = hf.Trainer(
        hf.TrainConfig(**settings, run_dir=str(folder / "run"), quiet=True, tensorboard=False, final_eval_episodes=2)
    )
    trainer.run()
    return [*found, hf.save_pretrained(trainer.policy, folder / "original3")]


# --- mutations --------------------------------------------------------------------------------------------------------


def mutated_bytes(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    at, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    change = draw.randrange(8)
    if change == 0 and data:  # one bit
        at = draw.randrange(len(data))
        return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
    if change == 1:
        return data[:at]
    if change == 2:
        return data[:at] + draw.randbytes(draw.randrange(1, 20)) + data[at:]
    if change == 3:
        return data[:at] + data[end:]
    if change == 4:
        return data[:at] + bytes(end - at) + data[end:]
    if change == 5:
        return draw.choice(others)
    if change == 6:
        return data + data[at:end] + b"\n"
    return data[:at] + draw.randbytes(min(8, len(data) - at)) + data[at + 8 :]


STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 2, 64, 2**31, 2**63, 10**30, 1e308, 0.5, -0.0, "", "lstm", "gru", "none", "ActorCritic", "inf",
    "nan", "object", "O", "V8", "../../etc/passwd", f"{EVIL}:Evil", f"{EVIL}:Evil.sub", "os:system", "builtins:eval",
    "subprocess:Popen", "torch:load", [], {}, [[]], [1] * 40, {"kind": "Discrete", "n": 2, "start": 0}, [2**40], [-1], [0],
]  # fmt: skip


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a tree."""
    pairs = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in pairs:
        yield tree, key
        yield from places(value)


def mutated_tree(tree: Any, draw: random.Random) -> None:
    """One to three changes of a JSON tree, in place."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        found = list(places(tree))
        if not found:
            return
        container, key = draw.choice(found)
        change = draw.randrange(6)
        if change == 0:
            del container[key]
        elif change == 1 and isinstance(container, dict):
            container[draw.choice((f"{key}x", "policy", "core", "env", "class", "__class__"))] = container[key]
        elif change == 2 and isinstance(container[key], (int, float)) and not isinstance(container[key], bool):
            container[key] = container[key] * draw.choice((-1, 2, 1000, 10**6)) + draw.choice((0, 1, -1))
        elif change == 3:
            other, other_key = draw.choice(found)
            with contextlib.suppress(KeyError, IndexError):  # it may be gone
                container[key] = json.loads(json.dumps(other[other_key]))
        else:
            container[key] = copy.deepcopy(draw.choice(STRANGE))


def mutated_weights(data: bytes, draw: random.Random) -> bytes:
    """The header's tree, or the numbers, or how long the header says it is."""
    size = int.from_bytes(data[:8], "little")
    header, numbers = json.loads(data[8 : 8 + size]), data[8 + size :]
    change = draw.randrange(5)
    if change == 0:
        return draw.choice((0, 1, size - 1, size + 1, 2**40, 2**63)).to_bytes(8, "little") + data[8:]
    if change == 1:
        special = draw.choice((np.nan, np.inf, 1e38, 0.0))
        at = 4 * draw.randrange(max(1, len(numbers) // 4))
        numbers = numbers[:at] + np.float32(special).tobytes() + numbers[at + 4 :]
    elif change == 2:
        at = draw.randrange(len(numbers))
        numbers = numbers[:at] + draw.randbytes(1) + numbers[at + 1 :]
    else:
        mutated_tree(header, draw)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + numbers


def forge(files: dict[str, bytes], draw: random.Random) -> None:
    """Change contents as somebody who knows the format would; the manifest is made again."""
    name = draw.choice([pretrained.CONFIG, pretrained.CONFIG, pretrained.WEIGHTS, *files])
    if name == pretrained.MANIFEST:
        tree = json.loads(files[name])
        mutated_tree(tree, draw)
        files[name] = json.dumps(tree, indent=1, sort_keys=True).encode() + b"\n"
        return
    if name == pretrained.CONFIG and draw.random() < 0.8:
        tree = json.loads(files[name])
        mutated_tree(tree, draw)
        files[name] = json.dumps(tree).encode()
    elif name == pretrained.WEIGHTS and draw.random() < 0.8:
        files[name] = mutated_weights(files[name], draw)
    else:
        files[name] = mutated_bytes(files[name], draw, list(files.values()))
    files[pretrained.MANIFEST] = pretrained.manifest_of({k: v for k, v in files.items() if k != pretrained.MANIFEST})


def tamper(files: dict[str, bytes], draw: random.Random) -> None:
    """Change, remove or swap files; the manifest stays, or is the one that is changed."""
    name = draw.choice(list(files))
    change = draw.random()
    if change < 0.05:
        del files[name]
    elif change < 0.1:
        other = draw.choice(list(files))
        files[name], files[other] = files[other], files[name]
    else:
        files[name] = mutated_bytes(files[name], draw, list(files.values()))


# --- what is promised -------------------------------------------------------------------------------------------------


class Watch:
    """Notes what code from a file could do to this process. Audit hooks cannot be removed, so there is one."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.on = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        imports = event == "import" and str(arguments[0]).startswith(EVIL)
        if event in _WATCHED or writes or imports:
            self.seen.append(f"{event} {arguments[0]!r:.80}")


def numbers_in(data: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a safetensors file, read without its library."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    arrays = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = data[8 + size + begin : 8 + size + end]
        arrays[name] = np.frombuffer(raw, _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays


def attempt(folder: Path, files: dict[str, bytes], tampered: bool, watch: Watch) -> tuple[str, str]:
    """(outcome, "" or what was not as promised)."""
    watch.seen, watch.on = [], True
    signal.alarm(SECONDS_PER_MUTANT)
    try:
        policy = hf.load(folder)
        outcome, problem = "loaded", ""
    except (CheckpointError, ImportNotAllowedError) as error:
        outcome, problem = "refused", "" if "\n" not in str(error) else f"several lines: {error}"
    except BaseException as error:
        return "failed", f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        watch.on = False
    if watch.seen:
        return outcome, f"code or files: {watch.seen}"
    if outcome == "loaded" and tampered:
        return outcome, "a tampered policy was loaded"
    if outcome == "loaded":
        weights, wanted = policy.state_dict(), numbers_in(files[pretrained.WEIGHTS])
        same = weights.keys() == wanted.keys() and all(
            np.array_equal(tensor.numpy(), wanted[name]) for name, tensor in weights.items()
        )
        problem = "" if same else "it loaded other numbers than the file holds"
    return outcome, problem


def hunt(count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """(how often which outcome, what was not as promised)."""
    outcomes: Counter[str] = Counter()
    failures = []
    watch = Watch()
    with tempfile.TemporaryDirectory() as text:
        top = Path(text)
        (top / f"{EVIL}.py").write_text(f"open({str(top / 'mark')!r}, 'w')\nclass Evil: pass\n")
        sys.path.insert(0, str(top))
        sources = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in originals(top)]
        for i in range(len(sources)):
            hf.load(top / f"original{i}")  # imports that loading needs are done now
        with _limits():
            for number in range(count):
                draw = random.Random(f"{seed} {number}")
                original = draw.choice(sources)
                files, tampered = dict(original), number % 2 == 0
                while files == original:
                    (tamper if tampered else forge)(files, draw)
                folder = top / f"mutant{number}"
                folder.mkdir()
                for name, data in files.items():
                    (folder / name).write_bytes(data)
                outcome, problem = attempt(folder, files, tampered, watch)
                outcomes[f"{'tampered' if tampered else 'forged'}, {outcome}"] += 1
                failures += [f"mutant {number} of seed {seed}: {problem}"] if problem else []
                shutil.rmtree(folder)
        sys.path.remove(str(top))
        if (top / "mark").exists():
            failures.append("the code of a module that a mutant names was run")
    return outcomes, failures


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Of memory, and a handler for the limit of time."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + EXTRA_MEMORY, before[1]))
    handler = signal.signal(signal.SIGALRM, _too_long)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"longer than {SECONDS_PER_MUTANT} seconds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    outcomes, failures = hunt(flags.count, flags.seed)
    for outcome, times in sorted(outcomes.items()):
        print(f"{times:7}  {outcome}")
    print(f"{len(failures):7}  not as promised")
    print("\n".join(failures[:20]))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
