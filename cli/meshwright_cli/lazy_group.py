"""A command group that imports a subcommand only when it is used.

`meshwright version` must not import packages that only `meshwright local` needs: they are slow or may not be installed.
The group therefore stores, for each subcommand, its help line, its module and the distributions to install.
"""

from __future__ import annotations

import difflib
import errno
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click

from meshwright_cli.client.errors import ExitCode

OTHER = "Other commands"


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A subcommand that is not imported yet."""

    target: str
    """`module:attribute` of the click command."""
    summary: str
    """One line for the list of commands."""
    distributions: str
    """Distributions to install for it, as arguments of `pip install`."""
    section: str = OTHER
    """Heading under which the group lists it."""


class LazyGroup(click.Group):
    """A click group over `LazyCommand`s."""

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = dict(lazy)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line. A full disk, which click leaves to Python, is one line and exit code 1."""
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            place = f"{error.filename}: " if error.filename else "cannot write: "
            click.echo(f"Error: {place}{error.strerror}", err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand. Ctrl-C, by which commands that watch end, has no message, unlike click's `Aborted!`."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(err=True)  # ends the line with ^C
            ctx.exit(ExitCode.INTERRUPTED)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names in alphabetical order, without importing the commands."""
        return sorted(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command with this name, or None.

        Raises:
            click.ClickException: a package that the command needs is not installed; the message names the distribution.
        """
        entry = self._lazy.get(cmd_name)
        return None if entry is None else load(cmd_name, entry)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from their summaries."""
        sections = self.sections()
        for heading in sections:
            own = [name for name in self.list_commands(ctx) if self._lazy[name].section == heading]
            with formatter.section(heading if len(sections) > 1 else "Commands"):
                formatter.write_dl([(name, self._lazy[name].summary) for name in own])

    def sections(self) -> list[str]:
        """Headings of the list of commands, in the order of the commands. Other commands are last."""
        found = dict.fromkeys(entry.section for entry in self._lazy.values())
        return sorted(found, key=lambda heading: heading == OTHER)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """The subcommand that the arguments name. An unknown name is an error that names the nearest one."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in self._lazy:
            near = difflib.get_close_matches(name, self._lazy, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            ctx.fail(f"No such command `{name}`.{hint}")
        return super().resolve_command(ctx, args)


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
            raise  # a bug in this package, not an incomplete installation
        raise click.ClickException(
            f"`meshwright {name}` needs the Python package `{error.name}`, which is not installed. "
            f"Install it with: pip install {' '.join(map(shlex.quote, entry.distributions.split()))}"
        ) from error
    if not isinstance(command, click.Command):
        raise TypeError(f"{entry.target} is not a click command")
    return command
