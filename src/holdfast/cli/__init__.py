"""The command `holdfast`."""

from holdfast.cli.commands import main

__all__ = ["main"]
