"""`meshwright version`."""

from __future__ import annotations

import platform
from importlib import metadata

import click


@click.command()
def version() -> None:
    """Print the versions of Meshwright and Python."""
    click.echo(f"meshwright {metadata.version('meshwright')} (Python {platform.python_version()})")
