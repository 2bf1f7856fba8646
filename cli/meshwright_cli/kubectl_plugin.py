"""`kubectl ptj`: the same commands as a plugin of kubectl, and completion of its arguments.

kubectl runs `kubectl-ptj` from the PATH for `kubectl ptj`. kubectl 1.26 and newer run `kubectl_complete-ptj` with the
words that were typed, and expect candidates, one a line, and a directive as the last line (cobra's protocol).
"""

from __future__ import annotations

import sys

import click
from click.shell_completion import ShellComplete

from meshwright_cli.main import main

PROGRAM = "kubectl ptj"
NO_FILES, FILES = ":4", ":0"
"""Directives of cobra: whether the shell completes file names if there is no candidate."""


def run() -> None:
    """The entry point of `kubectl-ptj`."""
    main(prog_name=PROGRAM)


def complete() -> None:
    """The entry point of `kubectl_complete-ptj`."""
    for line in completions(sys.argv[1:]):
        click.echo(line)


def completions(words: list[str]) -> list[str]:
    """The candidates for the last of these words, and cobra's directive."""
    *before, incomplete = words or [""]
    found = ShellComplete(main, {}, PROGRAM, "").get_completions(before, incomplete)
    plain = [item for item in found if item.type == "plain"]
    lines = [f"{item.value}\t{item.help}" if item.help else str(item.value) for item in plain]
    return [*lines, FILES if len(plain) < len(found) else NO_FILES]
