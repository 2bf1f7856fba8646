"""The group `meshwright checkpoint`."""

from __future__ import annotations

import click

from meshwright_cli.lazy_group import LazyCommand, LazyGroup

SUBCOMMANDS = {
    "now": LazyCommand(
        "meshwright_cli.checkpoint.now:now",
        "Ask a job that trains for a checkpoint after its current step.",
        "meshwright-cli",
    ),
}
"""Subcommands by name. To add one, add its command here; the module is imported when it is used."""


@click.group(cls=LazyGroup, lazy=SUBCOMMANDS, epilog="Next: meshwright checkpoint now JOB.")
def checkpoint() -> None:
    """The checkpoints of a job."""
