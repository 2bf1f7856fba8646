"""The group `meshwright checkpoint`."""

from __future__ import annotations

import click

from meshwright_cli.lazy_group import LazyCommand, LazyGroup

SUBCOMMANDS = {
    "list": LazyCommand(
        "meshwright_cli.checkpoint.inspect:list_checkpoints",
        "List the checkpoints of a job, a directory or an object store.",
        "meshwright-cli",
    ),
    "verify": LazyCommand(
        "meshwright_cli.checkpoint.inspect:verify",
        "Read every byte of checkpoints, and compare sizes and checksums.",
        "meshwright-cli",
    ),
    "copy": LazyCommand(
        "meshwright_cli.checkpoint.inspect:copy",
        "Copy a checkpoint to a directory of this machine, or to an object store.",
        "meshwright-cli",
    ),
    "now": LazyCommand(
        "meshwright_cli.checkpoint.now:now",
        "Ask a job that trains for a checkpoint after its current step.",
        "meshwright-cli",
    ),
}
"""Subcommands by name. To add one, add its command here; the module is imported when it is used."""


@click.group(cls=LazyGroup, lazy=SUBCOMMANDS, epilog="Next: meshwright checkpoint now JOB.")
def checkpoint() -> None:
    """Checkpoints of jobs, directories and object stores."""
