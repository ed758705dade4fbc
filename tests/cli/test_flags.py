"""Flags from dataclasses: what tyro accepts arrives, and what it refuses is explained in one line."""

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import pytest

from holdfast.cli.errors import UserError
from holdfast.cli.export import ExportFlags
from holdfast.cli.flags import OTHER_NAMES, named_values, parse, value_of
from holdfast.cli.settings import flags_with_settings
from holdfast.cli.train import TrainFlags
from holdfast.config import TrainConfig


@dataclass
class Size:
    width: int = 1
    """Columns."""
    layers: tuple[int, ...] | None = None
    """Sizes."""


@dataclass
class Flags:
    """Flags of many types."""

    file: Path
    """Positional."""
    scale: float = 1.0
    """A number."""
    kind: Literal["a", "b"] = "a"
    """A choice."""
    limit: int | None = None
    """A number or nothing."""
    fast: bool = False
    """A switch."""
    size: Size = field(default_factory=Size)


def test_flags_of_nested_dataclasses_have_no_prefix():
    assert parse(Flags, ["f", "--width", "3", "--layers", "4", "5", "--no-fast"], "x") == Flags(
        Path("f"), size=Size(3, (4, 5))
    )


def test_defaults_can_be_given():
    default = Flags(Path("f"), limit=3, size=Size(width=7))
    assert parse(Flags, ["--scale", "2"], "x", default=default) == Flags(Path("f"), 2.0, limit=3, size=Size(width=7))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "FILE is missing; see holdfast x --help"),
        ("f g", "unexpected argument 'g'; see holdfast x --help"),
        ("f --wdth 3", "unknown option --wdth; did you mean --width?"),
        ("f --wdth=3", "unknown option --wdth; did you mean --width?"),
        ("f --no-fst", "unknown option --no-fst; did you mean --no-fast?"),
        ("f --envs=3", "unknown option --envs; see holdfast x --help"),
        ("f --output g", "unknown option --output; see holdfast x --help"),
        ("f --width 1e-1", "--width: '1e-1' is not an integer; see holdfast x --help"),
        ("f --zzz", "unknown option --zzz; see holdfast x --help"),
        ("f --width", "--width: a value is missing; see holdfast x --help"),
        ("f --width 3.5", "--width: '3.5' is not an integer; see holdfast x --help"),
        ("f --width=wide --scale 2", "--width: 'wide' is not an integer; see holdfast x --help"),
        ("f --scale 2 --layers 4 x", "--layers: 'x' is not an integer; see holdfast x --help"),
        ("f --limit none", "--limit: 'none' is not an integer; see holdfast x --help"),
        ("f --limit None --scale big", "--scale: 'big' is not a number; see holdfast x --help"),
        ("f --kind c", "--kind: 'c' is not one of a, b; see holdfast x --help"),
    ],
)
def test_a_wrong_flag_is_explained(argv, message, capsys):
    with pytest.raises(UserError) as caught:
        parse(Flags, argv.split(), "x")
    assert str(caught.value) == message
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("text, number", [("1e3", 1000), ("2_000", 2000), ("-3", -3), (str(2**60 + 1), 2**60 + 1)])
def test_integers_may_be_written_short(text, number):
    flags = parse(Flags, ["f", "--width", text, f"--limit={text}", "--layers", "4", text, "--scale", "1e3"], "x")
    assert flags == Flags(Path("f"), 1000.0, limit=number, size=Size(number, (4, number)))


@pytest.mark.parametrize(
    ("option", "flag"),
    [
        ("--lr", "--learning-rate"),
        ("--total_timesteps", "--total-steps"),
        ("--n-envs=4", "--num-envs"),
        ("--envs", "--env"),
        ("--gpu", "--device"),
        ("--batch-size", "--minibatches"),
        ("--window", "--memory-span"),
    ],
)
def test_names_of_other_libraries_lead_to_ours(option, flag):
    with pytest.raises(UserError, match=rf"unknown option {option.partition('=')[0]}; did you mean {flag}\?"):
        parse(flags_with_settings(TrainFlags, TrainConfig()), [option], "train")


def test_every_name_of_another_library_stands_for_a_flag():
    flags = {
        f"--{field.name.replace('_', '-')}" for kind in (TrainConfig, TrainFlags, ExportFlags) for field in fields(kind)
    }
    assert flags.issuperset(OTHER_NAMES.values())


def test_the_value_of_one_flag_in_either_spelling():
    assert value_of(["--a", "1", "--b=2"], "--a") == "1"
    assert value_of(["--a", "1", "--b=2"], "--b") == "2"
    assert value_of(["--a"], "--a") is None


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--quiet", "true"], "--quiet takes no value, got 'true'"),
        (["--no-tensorboard", "False"], "--no-tensorboard takes no value, got 'False'"),
        (["--squash-actions", "1", "--quiet"], "--squash-actions takes no value, got '1'"),
        (["--name", "-x"], "--name: a value is missing; write a value that begins with - as --name=VALUE"),
    ],
)
def test_a_value_that_a_flag_does_not_take_is_refused_with_the_name_of_the_flag(argv: list[str], said: str):
    with pytest.raises(UserError, match=re.escape(said)):
        parse(flags_with_settings(TrainFlags, TrainConfig()), argv, "train")


def test_values_by_name_come_once_and_may_be_of_any_length():
    with pytest.raises(UserError, match="--set names gamma twice"):
        named_values("--set", ["gamma=0.9", "gamma=0.5"], "gamma=0.9")
    long, deep = "7" * 5000, "[" * 100_000
    assert named_values("--env-args", [f"length={long}", f"deep={deep}"], "length=5") == {"length": long, "deep": deep}
