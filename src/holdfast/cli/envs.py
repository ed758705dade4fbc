"""`holdfast envs`: the environments that come with Holdfast, how to name others, and the presets. `--check`: one of your own."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.cli.errors import user_errors
from holdfast.cli.flags import named_values, parse
from holdfast.shown_text import show


@dataclass
class EnvsFlags:
    """List the environments that come with Holdfast, or check one of your own (--check)."""

    check: str | None = None
    """Find the faults of this environment written in torch (my_module:MyEnv); exit code 1 if there is one."""
    env_args: tuple[str, ...] = ()
    """Arguments of its constructor, with --check: length=40."""


def main(argv: list[str]) -> int:
    flags = parse(EnvsFlags, argv, "envs")
    from holdfast.config import PRESETS
    from holdfast.envs import check, list_envs

    if flags.check is not None:
        try:
            with user_errors():
                check(flags.check, **named_values("--env-args", flags.env_args, "length=40"))
        except AssertionError as faults:
            show(*str(faults).splitlines())
            return 1
        show(f"{flags.check}: no fault found")
        return 0
    table = [("environment", "length", "chance", "best", "what it asks")]
    table += [
        (env.id, env.episode_length, f"{env.chance_return:g}", f"{env.solved_return:g}", env.description)
        for env in list_envs()
    ]
    widths = [max(map(len, column)) for column in zip(*table)]
    for row in table:
        show("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    show(
        "\nOthers: any gymnasium id (CartPole-v1), your own as my_module:MyEnv, and by prefix popgym:RepeatPreviousEasy, "
        "pettingzoo:sisl.multiwalker_v9, envpool:Pong-v5;\nin JAX gymnax:CartPole-v1, craftax:Craftax-Symbolic-v1, "
        "popgym-arcade:CountRecallEasy, brax:ant. The documentation describes them, in docs/environments.md."
    )
    show(f"Presets (holdfast train --preset NAME): {', '.join(PRESETS)}")
    return 0
