"""A command group that imports a subcommand only when it is used.

`meshwright version` must not wait for, nor fail on, packages that only `meshwright local` needs. So the group knows of
each subcommand its help line, where it lives, and the distributions that bring its dependencies.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Where a subcommand lives."""

    target: str
    """`module:attribute` of the click command."""
    summary: str
    """One line for the list of commands."""
    distributions: str
    """What to install for it, as `pip install` takes it."""


class LazyGroup(click.Group):
    """A click group over `LazyCommand`s."""

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = dict(lazy)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every name, in alphabetical order, without an import."""
        return sorted(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name; None when there is none.

        Raises:
            click.ClickException: a package that the command needs is not installed; the message says what to install.
        """
        entry = self._lazy.get(cmd_name)
        return None if entry is None else load(cmd_name, entry)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from their summaries alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._lazy[name].summary) for name in self.list_commands(ctx)])


def load(name: str, entry: LazyCommand) -> click.Command:
    """Import a subcommand.

    Raises:
        click.ClickException: a package outside Meshwright is missing.
    """
    module, _, attribute = entry.target.partition(":")
    try:
        command = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("meshwright", "meshwright_cli", "meshwright_local"):
            raise  # a fault of this package, not of the installation
        raise click.ClickException(
            f"`meshwright {name}` needs the Python package `{error.name}`, which is not installed. "
            f"Install it with: pip install {' '.join(map(shlex.quote, entry.distributions.split()))}"
        ) from error
    if not isinstance(command, click.Command):
        raise TypeError(f"{entry.target} is not a click command")
    return command
