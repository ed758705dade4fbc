"""SIGKILL inside commands, at random moments; what is left behind must be usable. docs/reliability.md has the figures.

    python tests/killed_commands.py save push pull ranks sweep bench --count 20 --seed 1
    python tests/killed_commands.py envs --env gymnax:CartPole-v1 --count 5        # needs gymnax; also envpool:, pettingzoo:, ...

    save    hf.save_pretrained over an earlier policy: the folder is one of the two or refused in one line, and can be saved again
    push    policy.push_to_hub: the hub has the old policy or the new one, and pushing again works
    pull    hf.load("hub:...") with an empty cache: loading again gives the policy
    ranks   one of two ranks: the other ends in seconds with one line, and the job resumes bit for bit
    sweep   holdfast sweep, with or without its helpers: the same command finishes all trials, each once
    bench   holdfast bench, with its workers: the same command gives the results of one that was never killed
    envs    a run in any environment: it resumes bit for bit, or says that episodes were restarted
    workers a run with environments in workers: any signal to it, to one of them or to all. It goes on or ends as it should,
            no process is left, and the run resumes

The exit code is 1 if a promise did not hold.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces

import holdfast as hf
from deploy.hub_server import HubServer
from holdfast.runs import checkpoint
from holdfast.runs.checkpoint import CheckpointError
from whole_runs import record

os.environ["HF_HUB_DISABLE_XET"] = "1"  # the server in tests/deploy speaks plain HTTP
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["holdfast.deploy.hub", "huggingface_hub", "safetensors.torch"])
Round = Callable[[Path, random.Random, int, str], Iterator[str]]
"""Yields "" for each try that went as promised, otherwise what happened."""
SETTINGS = """--core {core} --hidden-size 16 --num-envs {envs} --num-steps 32 --minibatches 2 --epochs 2 --threads 1
    --device cpu --no-tensorboard --final-eval-episodes 2 --checkpoint-every 5 --total-steps {steps}"""


# --- sharing ----------------------------------------------------------------------------------------------------------


def policy_of(seed: int) -> hf.ActorCritic:
    torch.manual_seed(seed)
    return hf.ActorCritic(spaces.Box(-1.0, 1.0, (6,)), spaces.Discrete(3), core="lstm", hidden_size=96)


def same(policy: Any, seed: int) -> bool:
    return all(torch.equal(a, b) for a, b in zip(policy.state_dict().values(), policy_of(seed).state_dict().values()))


def one_line(error: Exception) -> bool:
    return "\n" not in str(error) and bool(str(error))


def _work(job: Callable[..., None], arguments: tuple[Any, ...], began: Any) -> None:
    began.set()
    job(*arguments)


def killed(job: Callable[..., None], arguments: tuple[Any, ...], after: float) -> None:
    """Run a job in a process of its own, and kill it so many seconds after its beginning."""
    began = _context.Event()
    process = _context.Process(target=_work, args=(job, arguments, began))
    process.start()
    began.wait(60)
    process.join(after)
    process.kill()
    process.join()


def seconds_of(job: Callable[..., None], *arguments: Any) -> float:
    before = time.monotonic()
    killed(job, arguments, 60.0)
    return time.monotonic() - before


def _save(folder: str, seed: int) -> None:
    hf.save_pretrained(policy_of(seed), folder)


def _push(endpoint: str, seed: int) -> None:
    os.environ |= {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_x"}
    policy_of(seed).push_to_hub("user/name")


def _pull(endpoint: str, cache: str, result: str | None = None) -> None:
    os.environ |= {"HF_ENDPOINT": endpoint, "HF_HOME": cache}
    policy = hf.load("hub:user/name")
    if result is not None:
        torch.save(policy.state_dict(), result)


def save(folder: Path, draw: random.Random, count: int, env: str) -> Iterator[str]:
    seconds = seconds_of(_save, str(folder / "whole"), 1)
    for number in range(count):
        target = folder / f"policy{number}"
        earlier = draw.random() < 0.5
        if earlier:
            hf.save_pretrained(policy_of(1), target)
        killed(_save, (str(target), 2), draw.uniform(0, seconds))
        problem = ""
        try:
            found = hf.load(target)
            if not (same(found, 2) or (earlier and same(found, 1))):
                problem = "another policy was loaded"
        except (CheckpointError, FileNotFoundError, ValueError) as error:
            problem = "" if one_line(error) else f"a refusal of several lines: {error}"
        try:
            again = hf.load(hf.save_pretrained(policy_of(3), target))
            left = [file.name for file in target.glob(".*")]
            problem = problem or ("" if same(again, 3) and not left else f"saved again: wrong, or {left} is left")
        except Exception as error:
            problem = f"it could not be saved again: {error}"
        yield problem


def push(folder: Path, draw: random.Random, count: int, env: str) -> Iterator[str]:
    os.environ |= {"HF_HOME": str(folder / "home"), "HF_TOKEN": "hf_x"}
    with HubServer() as hub:
        seconds = seconds_of(_push, hub.endpoint, 1)
        os.environ["HF_ENDPOINT"] = hub.endpoint
        for number in range(count):
            hub.commits.pop("user/name", None)
            earlier = draw.random() < 0.5
            if earlier:
                _push(hub.endpoint, 1)
            killed(_push, (hub.endpoint, 2), draw.uniform(0, seconds))
            is_there = bool(hub.commits.get("user/name"))
            problem = _pulled(hub.endpoint, folder / f"cache{number}", [1, 2]) if is_there else "it is gone" * earlier
            _push(hub.endpoint, 3)
            yield problem or _pulled(hub.endpoint, folder / f"again{number}", [3])


def pull(folder: Path, draw: random.Random, count: int, env: str) -> Iterator[str]:
    os.environ["HF_HOME"] = str(folder / "home")
    with HubServer() as hub:
        _push(hub.endpoint, 1)
        seconds = seconds_of(_pull, hub.endpoint, str(folder / "whole"))
        for number in range(count):
            cache = folder / f"cache{number}"
            killed(_pull, (hub.endpoint, str(cache)), draw.uniform(0, seconds))
            yield _pulled(hub.endpoint, cache, [1])


def _pulled(endpoint: str, cache: Path, seeds: list[int]) -> str:
    """Loads in another process; what is loaded must be one of these policies."""
    result = cache.with_suffix(".pt")
    process = _context.Process(target=_pull, args=(endpoint, str(cache), str(result)))
    process.start()
    process.join(60)
    if not result.exists():
        return "the policy could not be loaded"
    found = list(torch.load(result).values())
    wanted = [list(policy_of(seed).state_dict().values()) for seed in seeds]
    return "" if any(all(map(torch.equal, found, one)) for one in wanted) else "another policy was loaded"


# --- runs -------------------------------------------------------------------------------------------------------------


def start(folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast", *words], cwd=folder, env={**os.environ, **more}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def finish(folder: Path, *words: str) -> tuple[str, str]:
    process = start(folder, *words)
    out, err = process.communicate(timeout=600)
    return (out, "") if process.returncode == 0 else (out, f"`holdfast {' '.join(words)}` failed: {err[-500:]}")


def wait_for_checkpoint(run: Path, *processes: subprocess.Popen[str]) -> None:
    while not checkpoint.rolling(run) and all(process.poll() is None for process in processes):
        time.sleep(0.01)


def ranks(folder: Path, draw: random.Random, count: int, env: str) -> Iterator[str]:
    cores = ["lstm", "gru", "mingru", "window"]
    for number in range(count):
        core = cores[number % len(cores)]
        settings = SETTINGS.format(core=core, envs=8, steps=256 * 60).split()
        flags = ["train", "--env", "holdfast/RepeatPreviousEasy-v0", *settings, "--quiet"]
        whole, run = folder / f"whole-{core}", folder / f"run{number}"
        if not whole.exists():
            problem = _finish_ranks(folder, flags, whole)
            if problem:
                yield problem
                return
        jobs = _start_ranks(folder, flags, run)
        wait_for_checkpoint(run, *jobs)
        time.sleep(draw.uniform(0, 1.5))
        victim, other = draw.sample(jobs, 2)
        victim.kill()
        killed_at = time.monotonic()
        try:
            _, error = other.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            other.kill()
            yield "the other rank goes on without the first"
            continue
        victim.communicate()
        seconds, lines = time.monotonic() - killed_at, error.strip().splitlines()
        if other.returncode == 0:  # the run was finished
            yield ""
            continue
        if len(lines) != 1 or "lost another rank" not in lines[0] or seconds > 15:
            yield f"the other rank took {seconds:.1f} s and said: {error[-300:]}"
            continue
        problem = _finish_ranks(folder, ["train", "--resume", str(run), "--quiet"], None)
        yield problem or ("" if record(run) == record(whole) else f"{core}: the record differs from one never stopped")


def _start_ranks(folder: Path, flags: list[str], run: Path | None) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    words = [*flags, *(["--run-dir", str(run)] if run else [])]
    shared = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    return [start(folder, *words, RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in range(2)]


def _finish_ranks(folder: Path, flags: list[str], run: Path | None) -> str:
    ends = [(process.communicate(timeout=300), process.returncode) for process in _start_ranks(folder, flags, run)]
    return next((f"ranks failed: {error[-500:]}" for (_, error), code in ends if code), "")


def envs(folder: Path, draw: random.Random, count: int, env: str) -> Iterator[str]:
    flags = ["train", "--env", env, *SETTINGS.format(core="gru", envs=12, steps=384 * 30).split()]
    whole = folder / "whole"
    _, problem = finish(folder, *flags, "--run-dir", str(whole))
    if problem:
        yield problem
        return
    for number in range(count):
        run = folder / f"run{number}"
        process = start(folder, *flags, "--run-dir", str(run))
        wait_for_checkpoint(run, process)
        time.sleep(draw.uniform(0, 1))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        out, problem = finish(folder, "train", "--resume", str(run), "--allow-imports")
        rows = record(run)
        if problem or "all episodes were restarted" in out:
            good = [row["update"] for row in rows] == [row["update"] for row in record(whole)]
            yield problem or ("" if good else "rows are missing, or there twice")
        else:
            yield "" if rows == record(whole) else "the record differs from one never stopped"


def workers(folder: Path, draw: random.Random, count: int, env: str) -> Iterator[str]:
    settings = SETTINGS.format(core="lstm", envs=5, steps=160 * 4000).split()
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP]
    for number in range(count):
        run = folder / f"run{number}"
        flags = ["--env-failure", draw.choice(["stop", "rebuild"]), "--vectorization", "workers", "--run-dir", str(run)]
        process = start(folder, "train", "--env", "CartPole-v1", *settings, *flags)
        wait_for_checkpoint(run, process)
        time.sleep(draw.uniform(0, 1))
        whom, what = draw.choice(["the run", "a worker", "all"]), draw.choice(signals)
        forked = _group_of(process.pid)
        if whom == "all":
            os.killpg(process.pid, what)
        else:
            os.kill(process.pid if whom == "the run" else draw.choice(forked), what)
        if whom == "a worker" and (flags[1] == "rebuild" or what in (signal.SIGTERM, signal.SIGINT)):
            time.sleep(1.5)
            if process.poll() is not None:
                yield f"{what.name} to {whom} ended the run: {process.communicate()[1][-300:]}"
                continue
            os.kill(process.pid, what := signal.SIGTERM)
            whom = "the run"
        try:
            _, error = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            yield f"{what.name} to {whom} did not end the run"
            continue
        codes = {signal.SIGTERM: 143, signal.SIGINT: 0, signal.SIGKILL: -9, signal.SIGHUP: -1}
        expected = 2 if whom == "a worker" else codes[what]
        time.sleep(1)
        if process.returncode != expected or len(error.strip().splitlines()) > 1 or _group_of(process.pid):
            left = len(_group_of(process.pid))
            yield f"{what.name} to {whom}: exit code {process.returncode}, {left} left, said {error[-300:]}"
            continue
        _, problem = finish(folder, "train", "--resume", str(run), "--stop-at", "1")
        yield problem


def _group_of(leader: int) -> list[int]:
    """The processes that run in a process group, but for its first."""
    lines = subprocess.run(
        ["ps", "-eo", "pid,pgid,stat"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    rows = [line.split() for line in lines[1:]]
    return [int(pid) for pid, group, stat in rows if int(group) == leader != int(pid) and "Z" not in stat]


# --- many runs --------------------------------------------------------------------------------------------------------


def sweep(folder: Path, draw: random.Random, count: int, env: str) -> Iterator[str]:
    words = ["sweep", "--env", "holdfast/TMaze-v0", "--trials", "6", "--workers", "2", "--confirm", "1",
             *SETTINGS.format(core="gru", envs=8, steps=256 * 12).split()]  # fmt: skip
    for number in range(count):
        place = folder / f"sweep{number}"
        place.mkdir()
        for _ in range(draw.randrange(1, 3)):
            process = start(place, *words)
            time.sleep(draw.uniform(4, 16))
            if draw.random() < 0.5:
                os.killpg(process.pid, signal.SIGKILL)  # with its helper
            else:
                process.kill()
            process.communicate()
        out, problem = finish(place, *words)
        yield problem or _trials_of(place, out)


def _trials_of(place: Path, out: str) -> str:
    from holdfast.sweep.database import require_optuna

    studies = place / "runs/sweeps/TMaze-v0"
    optuna = require_optuna()
    study = optuna.load_study(study_name="TMaze-v0", storage=f"sqlite:///{studies / 'study.db'}")
    done = [t for t in study.trials if t.state in (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)]
    indices = sorted(trial.user_attrs.get("index", trial.number) for trial in done)
    if len(indices) != 6 or len(set(indices)) != 6:
        return f"finished trials are {indices}: {out[-300:]}"
    return "" if (studies / "best.json").is_file() else "there is no best.json"


SUITE = """
name = "small"
steps = 12800
cores = ["gru", "lstm"]
seeds = 2
device = "cpu"
tasks = [{ name = "TMaze", env = "holdfast/TMaze-v0" }]
[settings]
num_envs = 8
num_steps = 16
hidden_size = 16
minibatches = 2
epochs = 2
"""


def bench(folder: Path, draw: random.Random, count: int, env: str) -> Iterator[str]:
    (folder / "small.toml").write_text(SUITE)
    words = ["bench", "small.toml", "--jobs", "2", "--quiet"]
    _, problem = finish(folder, *words, "--out", "whole")
    if problem:
        yield problem
        return
    whole = _results(folder / "whole")
    for number in range(count):
        out = f"bench{number}"
        for _ in range(draw.randrange(1, 3)):
            process = start(folder, *words, "--out", out)
            time.sleep(draw.uniform(3, 10))
            os.killpg(process.pid, signal.SIGKILL) if draw.random() < 0.5 else process.kill()
            process.communicate()
        _, problem = finish(folder, *words, "--out", out)
        yield problem or ("" if _results(folder / out) == whole else "the results differ from those of a whole bench")


def _results(out: Path) -> list[tuple[Any, ...]]:
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines() if line.startswith("{")]
    return sorted((row["task"], row["core"], row["seed"], str(row["final"])) for row in rows)


ROUNDS: dict[str, Round] = dict(
    save=save, push=push, pull=pull, ranks=ranks, sweep=sweep, bench=bench, envs=envs, workers=workers
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="+", choices=list(ROUNDS))
    parser.add_argument("--count", type=int, default=10, help="kills per round")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--env", default="holdfast/TMaze-v0", help="the environment of the round envs")
    options = parser.parse_args()
    failed = 0
    for name in options.rounds:
        began, tries, failures = time.monotonic(), 0, []
        folder = Path(tempfile.mkdtemp(prefix="holdfast-killed-"))
        for outcome in ROUNDS[name](folder, random.Random(f"{options.seed}/{name}"), options.count, options.env):
            tries += 1
            failures += [outcome] if outcome else []
        print(f"{name:6} {tries:4} killed, {len(failures)} failed ({time.monotonic() - began:.0f} s)", flush=True)
        print("".join(f"    {failure}\n" for failure in failures[:5]), end="", flush=True)
        failed += len(failures)
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
