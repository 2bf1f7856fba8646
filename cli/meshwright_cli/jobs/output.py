"""Output formats of commands: JSON, YAML, names and tables."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from meshwright.api.labels import GROUP, SINGULAR
from meshwright.kube_yaml import dump_document
from meshwright_cli.client.objects import Job

WIDTH = 100
"""Columns to assume if the output is not a terminal."""
LONGEST = 140
"""Widest text: longer lines are hard to read."""
_UNBROKEN = "\N{NO-BREAK SPACE}"
"""Stands for a space at which `wrapped` ends no line."""
_TREE = tuple("├└│")
COLORS = {"Running": "green", "Completed": "green", "Failed": "red"}


def output_option(*formats: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option `-o` with these formats. Without it, the command prints for people."""
    listed = click.Choice(formats)
    return click.option("-o", "--output", type=listed, default=None, help="Output format. Defaults to text for people.")


def watch_option(effect: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option `-w`, with what it does."""
    return click.option("-w", "--watch", "watches", is_flag=True, help=f"After that, {effect}.")


def print_job(job: Job, output: str | None, done: str) -> None:
    """Print one job in a format, or without one, what was done with it."""
    if output is None:
        click.echo(f"{SINGULAR}.{GROUP}/{job.name} {done}")
    else:
        click.echo(formatted(job.raw, output))


def note_end(job: Job, effect: str) -> None:
    """Say on stderr, about a job that has ended, that it does not run again, and what follows from that."""
    if job.finished:
        ended = "has completed" if job.complete else f"has failed ({job.state})"
        click.echo(f"{job.name} {ended} and does not run again: {effect}", err=True)


def formatted(document: Any, output: str) -> str:
    """An object, or several, as JSON, YAML or names. Several become a List, as in kubectl."""
    items = [item.raw if isinstance(item, Job) else item for item in document] if isinstance(document, list) else None
    if output == "name":
        return "\n".join(f"{SINGULAR}.{GROUP}/{one['metadata']['name']}" for one in items or [document])
    body = document if items is None else {"apiVersion": "v1", "kind": "List", "items": items}
    body = _without_managers(body)
    if output == "yaml":
        return dump_document(body).rstrip("\n")
    return json.dumps(body, indent=2, ensure_ascii=False)


def _without_managers(body: dict[str, Any]) -> dict[str, Any]:
    """The object without `metadata.managedFields`, which kubectl leaves out too."""
    if body.get("kind") == "List":
        return {**body, "items": [_without_managers(item) for item in body["items"]]}
    metadata = {key: value for key, value in (body.get("metadata") or {}).items() if key != "managedFields"}
    return {**body, "metadata": metadata} if "metadata" in body else body


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of aligned columns. Columns without any value are left out, except the first."""
    cells = [[*row] for row in rows]
    shown = [index for index in range(len(header)) if index == 0 or any(row[index] for row in cells)]
    cells = [[row[index] or "-" for index in shown] for row in cells]
    cells.insert(0, [header[index] for index in shown])
    widths = [max(len(row[index]) for row in cells) for index in range(len(shown))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def width() -> int:
    """Columns to wrap text at."""
    return terminal_width() or WIDTH


def terminal_width() -> int | None:
    """Columns of the terminal, at most `LONGEST`. None if the output is not a terminal."""
    return min(LONGEST, shutil.get_terminal_size((WIDTH, 24)).columns) if sys.stdout.isatty() else None


def line_as_lines(line: str, columns: int | None) -> list[str]:
    """A line of a report for a terminal with so many columns: sentences are wrapped, drawings of nodes are not.

    None: as it is, for output that another program reads.
    """
    indent = len(line) - len(line.lstrip(" -"))
    if columns is None or line[indent : indent + 1] in _TREE:
        return [line]
    return wrapped(line, columns, " " * indent)


def wrapped(text: str, columns: int, indent: str = "") -> list[str]:
    """A text as lines of at most this many columns, all but the first with an indent.

    Code in backticks stays on one line, even if that is longer, so that a command can be copied.
    """
    unbroken = re.sub("`[^`]+`", lambda code: code[0].replace(" ", _UNBROKEN), text)
    lines = textwrap.wrap(
        unbroken, max(20, columns), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_UNBROKEN, " ") for line in lines] or [""]


def colored(state: str) -> str:
    """A state in its color. click removes colors if the output is not a terminal."""
    return click.style(state, fg=COLORS.get(state, "yellow"), bold=True)


def program() -> str:
    """The name that the user typed: `meshwright` or `kubectl ptj`."""
    context = click.get_current_context(silent=True)
    name = context.find_root().info_name if context is not None else None
    return name or "meshwright"


def next_command(*arguments: str) -> None:
    """Name the next command to run, on stderr, unless stderr is not read by a person."""
    if sys.stderr.isatty() or sys.stdout.isatty():
        click.echo(click.style(f"Next: {program()} {' '.join(arguments)}", dim=True), err=True)
