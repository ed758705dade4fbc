"""A buffer on disk: saved in parts, loaded whole; killed between any two operations on files; damaged and forged in every way."""

from __future__ import annotations

import builtins
import io
import itertools
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import buffer_mutants
import holdfast as hf
from buffer_mutants import content
from holdfast.rollout import buffer_files
from holdfast.rollout.buffer_files import most_bytes_on_disk
from holdfast.runs import checkpoint
from holdfast.runs.checkpoint import CheckpointError
from holdfast.runs.log import read_progress
from holdfast.state import leaves
from rollout.streams import Stream, check_sample, same, segment, streams

pytestmark = pytest.mark.filterwarnings("ignore:states were kept every")
quick = settings(max_examples=10, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))
KINDS: dict[str, Any] = dict(obs="dict", actions="heads", masked=True, odd=0.05)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small buffers have many."""
    monkeypatch.setattr(buffer_files, "_SMALLEST_FILE", 1000)


def make(seed: int = 1, **options: Any) -> tuple[hf.SequenceBuffer, list[Stream]]:
    return hf.SequenceBuffer(100, 2, seed=seed, prioritized=True, **options), streams(2, seed, **KINDS)


def samples(buffer: hf.SequenceBuffer) -> list[Any]:
    """What it will give next; the buffer is as before then."""
    state = buffer.generator.get_state()
    batch = buffer.sample(20, 4, 2)
    buffer.generator.set_state(state)
    return [batch.obs, batch.actions, batch.rewards, batch.resets, batch.terminated, batch.truncated, batch.valid,
            batch.action_mask, batch.start_state, batch.index]  # fmt: skip


def loaded(folder: Path, manifest: Any, **options: Any) -> hf.SequenceBuffer:
    buffer, _ = make(99, **options)
    buffer.load_files(folder, manifest)
    return buffer


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


# --- saved in parts, loaded whole -------------------------------------------------------------------------------------


@given(
    acts=st.lists(st.sampled_from(("add", "add", "add", "save", "save and prune", "resume")), min_size=4, max_size=30),
    seed=st.integers(0, 10**6),
    adds=st.booleans(),
)
@quick
def test_what_is_loaded_is_what_was_saved_and_goes_on_like_it(
    tmp_path_factory: Any, acts: list[str], seed: int, adds: bool
):
    folder = tmp_path_factory.mktemp("buffer")
    envs = streams(2, seed, adds=adds, **KINDS)
    buffer = hf.SequenceBuffer(100, 2, seed=1, prioritized=True)
    for act in ["add", "add", *acts]:
        if act == "add":
            buffer.add(segment(envs, 12, 3))
            chosen = buffer.sample(5, 4, 2)
            buffer.update_priorities(chosen.index, torch.rand(5) + 0.1)
            continue
        manifest = buffer.save_files(folder)
        if act == "save and prune":
            buffer.prune_files(folder)
        other = loaded(folder, manifest)
        assert same(samples(other), samples(buffer)) and len(other) == len(buffer)
        check_sample(other.sample(20, 4, 2), envs, 4, 2)
        if act == "resume":
            other.generator.set_state(buffer.generator.get_state())
            buffer = other
    new = segment(envs, 12, 3)
    other = loaded(folder, buffer.save_files(folder))
    for each in (other, buffer):
        each.add(new)
    assert same(samples(other), samples(buffer))


def test_saving_writes_what_was_added_and_a_manifest_holds_no_rows(tmp_path: Path):
    envs = streams(2, 1, mean_length=10.0**9)
    buffer = hf.SequenceBuffer(200_000, 2)
    buffer.add(segment(envs, 2000, 10))
    sizes = [folder_bytes(tmp_path) if any(tmp_path.iterdir()) else 0]
    for _ in range(3):
        manifest = buffer.save_files(tmp_path)
        sizes.append(folder_bytes(tmp_path))
        buffer.add(segment(envs, 50))
    rows = 12 + 8 + 4 + 1
    assert sizes[1] - sizes[0] == 2 * 2000 * rows + 2 * 10 * (8 + 12) + 24 + 32
    assert [b - a for a, b in itertools.pairwise(sizes[1:])] == 2 * [2 * 50 * rows + 2 * (8 + 12) + 24 + 32]
    stored = io.BytesIO()
    torch.save(manifest, stored)
    assert len(stored.getvalue()) < 25_000, "a view would take the whole buffer with it"
    before = folder_bytes(tmp_path)
    buffer.save_files(tmp_path)
    buffer.save_files(tmp_path)
    assert folder_bytes(tmp_path) - before == sizes[2] - sizes[1], "what is saved is not written again"


def test_files_are_bounded_and_the_last_two_checkpoints_can_be_loaded(tmp_path: Path):
    """Also if many checkpoints in a row could not be written, so that nothing was pruned."""
    buffer, envs = make()
    kept: list[tuple[Any, Any]] = []
    names, largest = set(), 0
    for number in range(80):
        buffer.add(segment(envs, 8, 2))
        manifest = buffer.save_files(tmp_path)
        names |= {path.name for path in tmp_path.iterdir()}
        if 40 <= number < 60:
            continue  # the disk takes no checkpoint: the last one written must live on
        kept = [*kept[-1:], (manifest, content(loaded(tmp_path, manifest)))]
        buffer.prune_files(tmp_path)
        if number > 61:
            largest = max(largest, folder_bytes(tmp_path))
        for old, wanted in kept:
            assert content(loaded(tmp_path, old)) == wanted
    full = sum(x.numel() * x.element_size() for x in leaves((buffer.rows, buffer.starts.states)))
    once = 2 * 16 * sum(x[0].numel() * x.element_size() for x in leaves(buffer.rows)) + 200
    assert len(names) > 20 > len(list(tmp_path.iterdir()))
    assert largest <= most_bytes_on_disk(full, once)


def test_what_somebody_removes_is_written_again(tmp_path: Path):
    buffer, envs = make()
    for _ in range(5):
        buffer.add(segment(envs, 12))
        manifest = buffer.save_files(tmp_path / "buffer")
        shutil.rmtree(tmp_path / "buffer")
    buffer.add(segment(envs, 12))
    manifest = buffer.save_files(tmp_path / "buffer")
    assert same(samples(loaded(tmp_path / "buffer", manifest)), samples(buffer))


def test_a_buffer_that_was_replaced_does_not_append_to_the_files_of_the_old_one(tmp_path: Path):
    buffer, envs = make()
    buffer.add(segment(envs, 20))
    buffer.save_files(tmp_path)
    other, others = make(7)
    for _ in range(3):
        other.add(segment(others, 20))
    buffer.load_state_dict(other.state_dict())
    assert same(samples(loaded(tmp_path, buffer.save_files(tmp_path))), samples(other))


def test_two_folders_are_independent(tmp_path: Path):
    buffer, envs = make()
    for number in range(8):
        buffer.add(segment(envs, 12))
        manifest = buffer.save_files(tmp_path / "ab"[number % 2])
    assert same(samples(loaded(tmp_path / "b", manifest)), samples(buffer))


# --- kills ------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process dies here."""


class Mortal:
    """Counts operations on files and dies at one of them; a write that dies has written a part of its bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dies_at: int) -> None:
        self.count, self.dies_at = 0, dies_at
        unlink, fsync = Path.unlink, os.fsync

        def mortal_open(*args: Any, **options: Any) -> Any:
            self.tick()
            return MortalFile(builtins.open(*args, **options, buffering=0), self)

        def mortal_unlink(path: Path, **options: Any) -> None:
            self.tick()
            unlink(path, **options)

        def mortal_fsync(handle: int) -> None:
            self.tick()
            fsync(handle)

        monkeypatch.setattr(buffer_files, "open", mortal_open, raising=False)
        monkeypatch.setattr(Path, "unlink", mortal_unlink)
        monkeypatch.setattr(os, "fsync", mortal_fsync)

    def tick(self) -> None:
        self.count += 1
        if self.count == self.dies_at:
            raise Killed


class MortalFile:
    def __init__(self, file: Any, life: Mortal) -> None:
        self.file, self.life = file, life

    def __enter__(self) -> MortalFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.close()

    def write(self, data: Any) -> int:
        try:
            self.life.tick()
        except Killed:
            self.file.write(bytes(data)[: len(data) // 2])
            raise
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        if name in ("truncate", "seek", "flush"):
            self.life.tick()
        return getattr(self.file, name)


def lives(folder: Path, dies_at: int, segments: list[hf.Segment]) -> tuple[int, Any, Any]:
    """A buffer that is saved after each segment. Its operations on files, the newest manifest that a checkpoint holds, and what it
    is of."""
    newest, wanted = None, None
    with pytest.MonkeyPatch.context() as monkeypatch:
        buffer, _ = make()
        life = Mortal(monkeypatch, dies_at)
        try:
            for new in segments:
                buffer.add(new)
                manifest = buffer.save_files(folder)
                newest, wanted = manifest, samples(buffer)
                life.tick()
                buffer.prune_files(folder)
        except Killed:
            pass
    return life.count, newest, wanted


def test_killed_between_any_two_operations_on_files_the_last_manifest_can_be_loaded_and_goes_on(tmp_path: Path):
    _, envs = make()
    segments = [segment(envs, 30, 3) for _ in range(6)]
    operations, _, _ = lives(tmp_path / "whole", 0, segments)
    assert operations > 80 and len(list((tmp_path / "whole").iterdir())) < 6, "some files were deleted"
    again = [segment(streams(2, 3, **KINDS), 30, 3) for _ in range(2)]
    for number in range(1, operations + 1):
        folder = tmp_path / str(number)
        _, manifest, wanted = lives(folder, number, segments)
        if manifest is None:
            continue
        buffer = loaded(folder, manifest)
        assert same(samples(buffer), wanted), f"killed at {number}"
        if number % 5 == 0:
            for new in again:
                buffer.add(new)
                manifest = buffer.save_files(folder)
                buffer.prune_files(folder)
            assert same(samples(loaded(folder, manifest)), samples(buffer))


# --- damaged files ----------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def link_to_a_copy(path: Path) -> None:
    shutil.copy(path, path.parent.parent / "copy.bin")
    path.unlink()
    path.symlink_to(path.parent.parent / "copy.bin")


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def swap(path: Path) -> None:
    other = next(other for other in path.parent.iterdir() if other != path)
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two), other.write_bytes(one)


DAMAGE: dict[str, tuple[Any, str]] = {
    "a bit": (flip, "is damaged, its SHA-256 does not match"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is missing or cut short"),
    "empty": (lambda path: path.write_bytes(b""), "is missing or cut short"),
    "missing": (Path.unlink, "is missing or cut short"),
    "a folder": (as_folder, "is missing or cut short"),
    "a pipe": (as_pipe, "is missing or cut short"),
    "swapped": (swap, "is damaged, its SHA-256 does not match|is missing or cut short"),
    "a link": (link_to_a_copy, "is a link, which is not followed"),
}


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: Any) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, buffer_mutants.saved_buffer(folder)


def target() -> hf.SequenceBuffer:
    """A buffer of the same sizes that holds something."""
    buffer = hf.SequenceBuffer(**buffer_mutants.SIZES)
    buffer.add(segment(streams(2, 9), 30))
    return buffer


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("how", list(DAMAGE))
def test_damaged_files_are_refused_in_one_line_and_nothing_changes(
    on_disk: tuple[Path, Any], tmp_path: Path, how: str, which: int
):
    folder, manifest = tmp_path / "buffer", on_disk[1]
    shutil.copytree(on_disk[0], folder)
    damage, words = DAMAGE[how]
    damage(folder / manifest["files"][which]["name"])
    buffer = target()
    before = content(buffer)
    with pytest.raises(ValueError, match=f"rows-.*({words}); begin with an empty one") as refused:
        buffer.load_files(folder, manifest)
    assert "\n" not in str(refused.value) and content(buffer) == before


def test_bytes_behind_those_that_a_manifest_names_do_not_matter(on_disk: tuple[Path, Any], tmp_path: Path):
    shutil.copytree(on_disk[0], tmp_path / "buffer")
    with open(tmp_path / "buffer" / on_disk[1]["files"][-1]["name"], "ab") as file:
        file.write(b"a later save, or half of one")
    buffers = [hf.SequenceBuffer(**buffer_mutants.SIZES) for _ in range(2)]
    for buffer, folder in zip(buffers, (on_disk[0], tmp_path / "buffer")):
        buffer.load_files(folder, on_disk[1])
    assert content(buffers[0]) == content(buffers[1])


FORGED: dict[str, tuple[Any, str]] = {
    "version": (lambda m: {**m, "version": 7}, "its format is version 7, this Holdfast reads 1"),
    "no dict": (lambda m: [m], "its format is version None"),
    "sizes": (lambda m: {**m, "capacity": 999}, "the saved buffer has capacity 999, this one 120"),
    "a flag as a size": (lambda m: {**m, "prioritized": 1}, "the saved buffer has prioritized 1, this one True"),
    "missing": (lambda m: {k: v for k, v in m.items() if k != "written"}, "the buffer has no written"),
    "no files": (lambda m: {k: v for k, v in m.items() if k != "files"}, "the manifest has no files"),
    "absurd slots": (lambda m: {**m, "start_slots": 2**40}, "start_slots is 1099511627776, expected an integer from 64"),
    "odd slots": (lambda m: {**m, "start_slots": 100}, "start_slots is 100, expected 64 times a power of 2"),
    "absurd steps": (lambda m: {**m, "steps": 10**30}, "steps is 10+, expected an integer"),
    "negative steps": (lambda m: {**m, "steps": -1}, "steps is -1, expected an integer"),
    "written": (lambda m: {**m, "written": m["written"] + 10**6}, "written is .*, expected from"),
    "many starts": (lambda m: {**m, "start_count": 2**50}, "start_count is .*, expected an integer from"),
    "start steps": (lambda m: {**m, "start_steps": m["start_steps"][::-1]}, "start_steps is"),
    "priorities": (lambda m: {**m, "priorities": m["priorities"] * float("nan")}, "priorities are not all numbers"),
    "no priority": (lambda m: {**m, "largest_priority": 0.0}, "largest_priority is 0.0"),
    "generator": (lambda m: {**m, "generator": m["generator"][:9]}, "generator is torch.uint8"),
    "wide rows": (
        lambda m: {**m, "rows_like": {**m["rows_like"], "obs": torch.empty(0, 2**20, 2**20)}},
        "a row and a state take .* bytes, at most",
    ),
    "other rows": (lambda m: {**m, "rows_like": {**m["rows_like"], "obs": torch.empty(0, 3)}}, "ends too early|not a file"),
    "rows that are there": (lambda m: {**m, "rows_like": {**m["rows_like"], "obs": torch.zeros(5, 3)}}, "rows is .5, 3., expected"),
    "more rows": (lambda m: {**m, "rows_like": {**m["rows_like"], "more": torch.empty(0)}}, "rows has .'more'."),
    "other states": (lambda m: {**m, "states_like": {"h": torch.empty(0, 2, 2**30)}}, "its states are not all of the same"),
    "a list of actions": (
        lambda m: {**m, "rows_like": {**m["rows_like"], "actions": [m["rows_like"]["actions"]]}},
        "rows actions is a list, expected a tensor",
    ),
    "rewards in a dict": (
        lambda m: {**m, "rows_like": {**m["rows_like"], "rewards": {"x": m["rows_like"]["rewards"]}}},
        "rows rewards is a dict, expected a tensor",
    ),
    "states of another structure": (
        lambda m: {**m, "states_like": list(m["states_like"].values())},
        "its states are not all of the same",
    ),
    "a path": (lambda m: named(m, "../../etc/passwd"), "it names a file '../../etc/passwd', which no buffer has"),
    "an absolute path": (lambda m: named(m, "/rows-00000001.bin"), "which no buffer has"),
    "a name with a newline": (lambda m: named(m, "rows-00000001.bin\n"), "which no buffer has"),
    "twice": (lambda m: {**m, "files": [m["files"][0], *m["files"]]}, "its files are not in order, or named twice"),
    "one file less": (lambda m: {**m, "files": m["files"][1:]}, "its files do not belong together"),
    "a huge file": (lambda m: entry(m, bytes=2**60), "bytes is .*, expected an integer from 1"),
    "a longer file": (lambda m: entry(m, bytes=m["files"][0]["bytes"] + 1), "is missing or cut short"),
    "no digest": (lambda m: entry(m, sha256="x"), "the SHA-256 of rows-.* is 'x'"),
    "another digest": (lambda m: entry(m, sha256="0" * 64), "is damaged, its SHA-256 does not match"),
}  # fmt: skip


def entry(manifest: Any, **changes: Any) -> Any:
    return {**manifest, "files": [{**manifest["files"][0], **changes}, *manifest["files"][1:]]}


def named(manifest: Any, name: str) -> Any:
    return entry(manifest, name=name)


@pytest.mark.parametrize("how", list(FORGED))
def test_manifests_that_are_none_are_refused_in_one_line_and_nothing_changes(on_disk: tuple[Path, Any], how: str):
    buffer, (change, words) = target(), FORGED[how]
    before = content(buffer)
    with pytest.raises(ValueError, match=f"{words}.*; begin with an empty one") as refused:
        buffer.load_files(on_disk[0], change(on_disk[1]))
    assert "\n" not in str(refused.value) and content(buffer) == before


def test_a_file_that_somebody_made_a_link_of_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(buffer_files, "_SMALLEST_FILE", 10**6)
    buffer, envs = make()
    buffer.add(segment(envs, 12))
    buffer.save_files(tmp_path / "buffer")
    (path,) = (tmp_path / "buffer").iterdir()
    link_to_a_copy(path)
    before = (tmp_path / "copy.bin").read_bytes()
    buffer.add(segment(envs, 2))
    with pytest.raises(OSError, match="symbolic link"):
        buffer.save_files(tmp_path / "buffer")
    assert (tmp_path / "copy.bin").read_bytes() == before


def test_mutants_of_files_and_manifests_are_refused_in_one_line_or_harmless():
    found = list(buffer_mutants.hunt(3, range(30)))
    failures = [problem for _, problem in found if problem]
    assert not failures, "\n".join(failures)
    kinds = {outcome for outcome, _ in found}
    assert (
        len(found) == 33 and {"tampered, refused", "forged, refused", "forged, loaded", "run, resume refused"} <= kinds
    )


# --- runs -------------------------------------------------------------------------------------------------------------


def run_config(folder: Path, **settings: Any) -> hf.R2D2Config:
    return hf.R2D2Config(**{**buffer_mutants.RUN, "run_dir": str(folder), "keep_checkpoints": 10, **settings})


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Path:
    """20 updates of 8 steps; a checkpoint every 5."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    hf.Trainer(run_config(folder, eval_every=5, eval_episodes=1)).run()
    return folder


def rows(folder: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_progress(folder)]


def test_a_copy_of_a_run_s_folder_resumes_with_its_buffer(run: Path, tmp_path: Path):
    for name in ("one", "two"):
        shutil.copytree(run, tmp_path / name)
        trainer = hf.Trainer.resume(tmp_path / name, total_steps=200)
        assert len(trainer.algorithm.buffer) == 100
        trainer.run()
    assert rows(tmp_path / "one") == rows(tmp_path / "two") and len(rows(tmp_path / "one")) == 25


def test_other_checkpoints_need_an_empty_buffer_and_one_line_says_so(run: Path, tmp_path: Path):
    shutil.copytree(run, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    shutil.copy(checkpoint.rolling(tmp_path / "run")[-1], tmp_path / "copied.pt")
    found = [(folder / "best.pt", "its buffer was not saved with it"), (tmp_path / "copied.pt", "missing or cut short")]
    for path, words in found:
        before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        with pytest.raises(CheckpointError, match=rf"{words}.*\(refill_buffer\)") as refused:
            hf.Trainer.resume(path)
        assert "\n" not in str(refused.value)
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
        trainer = hf.Trainer.resume(path, refill_buffer=True, run_dir=str(tmp_path / path.stem), total_steps=240)
        assert len(trainer.algorithm.buffer) == 0 and trainer.run().steps == 240


def test_an_older_checkpoint_is_loaded_as_it_was_or_refused(run: Path, tmp_path: Path):
    """The buffer of 100 rows takes 12 updates to be overwritten; the files of the last two checkpoints are kept."""
    outcomes = []
    for path in checkpoint.rolling(run):
        shutil.copytree(run, tmp_path / path.stem)
        try:
            trainer = hf.Trainer.resume(tmp_path / path.stem / "checkpoints" / path.name)
        except CheckpointError as error:
            outcomes.append("refused")
            assert "refill_buffer" in str(error)
            continue
        outcomes.append("loaded")
        trainer.run()
        assert rows(tmp_path / path.stem) == rows(run)
    assert outcomes[-2:] == ["loaded", "loaded"]


def test_another_number_of_ranks_needs_an_empty_buffer(run: Path, tmp_path: Path):
    """As two ranks would have written it: a part of one environment each."""
    saved = checkpoint.load(checkpoint.rolling(run)[-1])
    mine = saved["collector"]

    def part(rows: slice) -> Any:
        env = mine["feed"]["env"]
        cut = lambda tree: hf.state.map_tensors(lambda x: x[rows] if x.dim() and len(x) == 2 else x, tree)  # noqa: E731
        return {
            **cut(mine),
            "feed": {**cut(mine["feed"]), "env": cut(env)},
            "memory": {**cut(mine["memory"]), "num_rows": 1},
        }

    other = {"collector": part(slice(1, 2)), "generator": saved["r2d2"]["generator"], "open_return": None, "rng": saved["rng"],
             "env_failures": 0, "files": saved["files"]}  # fmt: skip
    checkpoint.save(tmp_path / "two.pt", {**saved, "collector": part(slice(0, 1)), "other_ranks": [other]})
    with pytest.raises(
        CheckpointError, match=r"or the number of ranks has changed; begin with an empty one \(refill_buffer\)"
    ):
        hf.Trainer.resume(tmp_path / "two.pt")


def test_a_checkpoint_that_could_not_be_written_costs_the_one_before_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The disk takes rows, and no checkpoint for a while. A kill after that resumes from the last one that was written."""
    whole = tmp_path / "whole"
    hf.Trainer(run_config(whole, total_steps=240, checkpoint_every=1)).run()
    write = checkpoint.save

    def refuse(path: Path, data: Any) -> None:
        if int(path.stem[-8:]) > 12:
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(checkpoint, "save", refuse)
    trainer = hf.Trainer(run_config(tmp_path / "run", total_steps=240, checkpoint_every=1), callbacks=[SaveAlways()])
    trainer.run()
    monkeypatch.undo()
    assert checkpoint.rolling(tmp_path / "run")[-1].name == "update_00000012.pt"
    hf.Trainer.resume(tmp_path / "run").run()
    assert rows(tmp_path / "run") == rows(whole)


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(core="lstm", hidden_size=200, train_length=16, buffer_size=400),
        dict(core="window", memory_span=4, burn_in=3),
        dict(env="holdfast/PositionOnlyCartPoleEasy-v0", inputs=("obs", "prev_action", "prev_reward")),
    ],
)
def test_the_first_lines_say_what_a_buffer_takes(tmp_path: Path, capsys: Any, settings: dict[str, Any]):
    trainer = hf.Trainer(run_config(tmp_path / "run", **{"quiet": False, "total_steps": 800, **settings}))
    trainer.run()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("buffer")]
    rows, row, *state, memory, disk = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", line)]
    buffer = trainer.algorithm.buffer
    assert rows == buffer.stream_rows * 2 == len(buffer)
    assert row == sum(x[0].numel() * x.element_size() for x in leaves(buffer.rows))
    if state:
        kept = list(buffer.starts.steps)[-3:]
        assert state == [buffer.starts.state_bytes(), kept[1] - kept[0]] and kept[2] - kept[1] == kept[1] - kept[0]
    else:
        assert settings["core"] == "window"
    folder = tmp_path / "run" / "checkpoints" / "buffer-rank0"
    assert folder_bytes(folder) <= disk * 10**6 + 10**6 and memory <= disk


class SaveAlways(hf.Callback):
    """Whatever the schedule of retries says."""

    def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> bool:
        if trainer.update > 12:
            trainer.folder.save(trainer.update)
        return True
