"""The option `--svg` of commands that draw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from meshwright_cli.figures.svg import Element, to_file

Command = TypeVar("Command", bound=Callable[..., Any])


def svg_option(command: Command) -> Command:
    """Add `--svg`."""
    option = click.option(
        "--svg", type=click.Path(path_type=Path, dir_okay=False), help="Also write the figure to this SVG file."
    )
    return option(command)


def write_svg(path: Path | None, figure: Callable[[], Element]) -> None:
    """Write a figure, if there is a path.

    Raises:
        click.ClickException: the file cannot be written.
    """
    if path is None:
        return
    try:
        path.write_text(to_file(figure()), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"--svg: {path}: {error.strerror}") from error
    click.echo(f"Wrote {path}")
