"""The command `holdfast`: one module per subcommand. Commands parse flags and print; the work is done elsewhere."""

from holdfast.cli.commands import main

__all__ = ["main"]
