"""Writes docs/cli.md from the commands: `python -m meshwright_cli.reference > docs/cli.md`.

Commands and their options are declared once, for click. Help, completion and this page follow.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import resources
from typing import Any

import click

from meshwright_cli.client.errors import MEANINGS
from meshwright_cli.main import COMMANDS, main

INTRODUCTION = "reference.md"
"""The text before the commands."""
COMMON = ("namespace", "context", "kubeconfig", "help")
"""Options that are described once."""
HELP = ["-h", "--help"]
WIDTH = 120


def page() -> str:
    """The page."""
    text = resources.files("meshwright_cli").joinpath(INTRODUCTION).read_text()
    return "\n".join([text.replace("EXIT_CODES\n", "".join(_exit_codes())).rstrip("\n"), *_commands()]) + "\n"


def _exit_codes() -> Iterator[str]:
    yield "| Code | Meaning |\n| --- | --- |\n"
    for code, meaning in MEANINGS.items():
        yield f"| {int(code)} | {meaning} |\n"


def _commands() -> Iterator[str]:
    context = click.Context(main, info_name="meshwright", help_option_names=HELP)
    for section in main.sections():
        yield from ("", f"## {section}")
        for name, entry in COMMANDS.items():
            if entry.section == section:
                command = main.get_command(context, name)
                assert command is not None
                yield from _command(command, f"meshwright {name}", 3)


def _command(command: click.Command, path: str, level: int) -> Iterator[str]:
    yield from ("", f"{'#' * level} `{path}`", "")
    context = click.Context(command, info_name=path, help_option_names=HELP)
    if isinstance(command, click.Group):
        yield from _prose(command)
        for name in command.list_commands(context):
            sub = command.get_command(context, name)
            if sub is not None and not sub.hidden:
                yield from _command(sub, f"{path} {name}", level + 1)
        return
    yield f"Arguments: `{' '.join(command.collect_usage_pieces(context))}`"
    yield ""
    yield from _prose(command)
    options = [one for one in command.params if isinstance(one, click.Option) and one.name not in COMMON]
    if options:
        yield from ("", "| Option | Meaning |", "| --- | --- |")
        yield from (_option(one, context) for one in options)
    if any(one.name == "kubeconfig" for one in command.params):
        yield from ("", "It also has the [options of the cluster](#options-of-the-cluster).")


def _prose(command: click.Command) -> Iterator[str]:
    """The help text, wrapped again."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(command.help or ""))
    for index, paragraph in enumerate(paragraphs):
        if index:
            yield ""
        if paragraph.startswith("\b"):  # click prints such a paragraph as it is
            yield from ("```text figure", *paragraph.removeprefix("\b\n").splitlines(), "```")
            continue
        yield from textwrap.wrap(" ".join(paragraph.split()), WIDTH, break_on_hyphens=False)


def _option(option: click.Option, context: click.Context) -> str:
    record: Any = option.get_help_record(context)
    names, text = record
    return f"| `{_cell(names)}` | {_cell(text)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    click.echo(page(), nl=False)
