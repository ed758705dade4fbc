"""Flags of a command from a dataclass. tyro parses them and writes the help; a wrong flag becomes one line.

tyro reports errors only as boxes drawn on stderr. They are discarded, and `_find_mistake` looks through the command line
for the reason. It never decides what is accepted: it runs only after tyro has refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from holdfast.cli.errors import UserError
from holdfast.config import flag_of
from holdfast.data_files import read_toml

Flags = TypeVar("Flags")

_ALSO_CALLED = read_toml(__file__, "other_names.toml")
OTHER_NAMES = {name: f"--{flag}" for flag, names in _ALSO_CALLED.items() for name in names.split()}
"""What other libraries and habit call our flags."""


def parse(kind: type[Flags], argv: list[str], command: str, default: Flags | None = None) -> Flags:
    """The flags of `holdfast COMMAND`. Fields without a default are positional; nested dataclasses are flattened."""
    options: dict[str, Any] = {} if default is None else {"default": default}
    argv = _spell_out_integers(kind, argv)
    try:
        with contextlib.redirect_stderr(io.StringIO()), _plain_metavars():
            flags, unknown = tyro.cli(
                kind,
                args=argv,
                prog=f"holdfast {command}",
                config=(
                    tyro.conf.OmitArgPrefixes,
                    tyro.conf.PositionalRequiredArgs,
                    tyro.conf.PositionalMetavarFromFieldName,
                ),
                return_unknown_args=True,
                **options,
            )
    except SystemExit as end:
        if not end.code:  # --help
            raise
        raise _refusal(_find_mistake(kind, argv), command) from end
    if unknown:
        raise _refusal(_value_of_a_switch(kind, argv, unknown) or _unknown_token(kind, unknown, argv), command)
    return flags


def _plain_metavars() -> ConstructorRegistry:
    """A setting that may be None shows as `INT` in the help, and not as `{None}|INT`; the text `None` is still taken."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        kinds = [kind for kind in get_args(info.type) if kind is not NoneType]
        if NoneType not in get_args(info.type) or len(kinds) != 1 or kinds[0] not in (str, int, float, Path):
            return None
        (kind,) = kinds
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=kind.__name__.upper(),
            instance_from_str=lambda words: None if words[0] == "None" else kind(words[0]),
            is_instance=lambda value: value is None or isinstance(value, kind),
            str_from_instance=lambda value: [str(value)],
        )

    return registry


def _refusal(mistake: str, command: str) -> UserError:
    return UserError(mistake if mistake.endswith("?") else f"{mistake}; see holdfast {command} --help")


def _spell_out_integers(kind: type, argv: Sequence[str]) -> list[str]:
    """1e6 becomes 1000000 where a flag takes integers."""
    types, found, whole = dict(_flag_types(kind)), [], False
    for token in argv:
        flag, equals, value = token.partition("=")
        if token.startswith("--"):
            whole = "int" in str(types.get(flag.replace("_", "-"), ""))
            found.append(f"{flag}={_spell_out(value)}" if equals and whole else token)
        else:
            found.append(_spell_out(token) if whole else token)
    return found


def _spell_out(text: str) -> str:
    """
    >>> _spell_out("1e6"), _spell_out("500_000"), _spell_out("2.5"), _spell_out("many")
    ('1000000', '500000', '2.5', 'many')
    """
    try:
        number = float(text)
    except ValueError:
        return text
    # Large integers that are written out do not pass through a float, which would round them.
    return str(int(text) if text.strip("+-").replace("_", "").isdigit() else int(number)) if number % 1 == 0 else text


def value_of(argv: Sequence[str], flag: str) -> str | None:
    """The value of a flag that must be known before the others are parsed; None if it is absent."""
    for i, token in enumerate(argv):
        if token == flag and i + 1 < len(argv):
            return argv[i + 1]
        if token.startswith(flag + "="):
            return token[len(flag) + 1 :]
    return None


def named_values(flag: str, pairs: Sequence[str], example: str) -> dict[str, Any]:
    """Words of the form name=value. A value is JSON, or else a text.

    >>> named_values("--set", ["gamma=0.9", "lr_schedule=constant"], "gamma=0.9")
    {'gamma': 0.9, 'lr_schedule': 'constant'}
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise UserError(f"{flag} {pair!r}: expected name=value, such as {example}")
        if name in found:
            raise UserError(f"{flag} names {name} twice")
        try:
            found[name] = json.loads(text)
        except (ValueError, RecursionError):  # plain text, or more digits or brackets than Python reads
            found[name] = text
    return found


# --- what is wrong with a command line that tyro refused --------------------------------------------------------------


def _find_mistake(kind: type, argv: Sequence[str]) -> str:
    """The first unknown flag, the first value of the wrong type, or a positional argument that is missing."""
    types = dict(_flag_types(kind))
    for i, token in enumerate(argv):
        if not token.startswith("--"):
            continue
        flag, equals, value = token.partition("=")
        flag = flag.replace("_", "-")
        if flag not in types:
            return _unknown_token(kind, [flag], argv)
        rest = argv[i + 1 :]
        if not equals and rest and rest[0].startswith("-") and types[flag] is not bool and not _is_number(rest[0]):
            return f"{flag}: a value is missing; write a value that begins with - as {flag}=VALUE"
        end = next((n for n, other in enumerate(rest) if other.startswith("--")), len(rest))
        problem = _problem(types[flag], [value] if equals else rest[:end])
        if problem:
            return f"{flag}: {problem}"
    required = _positional(kind)
    return f"{' '.join(required)} is missing" if required else "these flags cannot be combined"


def _positional(kind: type) -> list[str]:
    return [field.name.upper() for field in dataclasses.fields(kind) if _is_required(field)]


def _flag_types(kind: type) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _flag_types(hint)
        elif not _is_required(field) and get_origin(hint) is not dict:
            yield flag_of(field.name), hint
            if hint is bool:
                yield flag_of(f"no_{field.name}"), hint


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _value_of_a_switch(kind: type, argv: Sequence[str], unknown: Sequence[str]) -> str | None:
    """What is wrong if a token follows a flag that takes no value (--quiet true)."""
    types = dict(_flag_types(kind))
    for flag, token in itertools.pairwise(argv):
        if token in unknown and not token.startswith("--") and types.get(flag.replace("_", "-")) is bool:
            name = flag.removeprefix("--").removeprefix("no-")
            return f"{flag} takes no value, got {token!r}; --{name} turns it on, --no-{name} turns it off"
    return None


def _unknown_token(kind: type, tokens: Sequence[str], argv: Sequence[str]) -> str:
    """An option if there is one among the tokens: what follows it may be its value."""
    token = next((token for token in tokens if token.startswith("-")), None)
    flags = [*dict(_flag_types(kind)), "--help"]
    if token is None:
        names_env = tokens[0] == argv[0] and "--env" in flags and not _positional(kind)  # not a second value of a flag
        return f"unexpected argument {tokens[0]!r}" + (f"; did you mean --env {tokens[0]}?" if names_env else "")
    option = token.partition("=")[0]
    elsewhere = OTHER_NAMES.get(option.strip("-").replace("_", "-"), "")
    likely = [elsewhere] if elsewhere in flags else get_close_matches(option.replace("_", "-"), flags, 1)
    return f"unknown option {option}" + (f"; did you mean {likely[0]}?" if likely else "")


def _problem(hint: Any, values: Sequence[str]) -> str | None:
    """Why these values do not fit the type of a flag; None if they do."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if hint is bool or (NoneType in members and values[:1] == ["None"]):
        return None
    (member,) = (member for member in members if member is not NoneType)
    if get_origin(member) is tuple:
        member = get_args(member)[0]
    elif not values:
        return "a value is missing"
    else:
        values = values[:1]
    if get_origin(member) is Literal:
        wrong = [value for value in values if value not in get_args(member)]
        return f"{wrong[0]!r} is not one of {', '.join(get_args(member))}" if wrong else None
    names = {int: "an integer", float: "a number"}
    for value in values:
        try:
            member(value)
        except ValueError:
            return f"{value!r} is not {names.get(member, 'a valid value')}"
    return None
