"""The fabric of the site from the file of `--fabric`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from meshwright.administrator import document_in_values
from meshwright.planner.topology.site import DEFAULT_SITE, FABRIC_DOCUMENT, FabricError, SiteFabric, parse_fabric

F = TypeVar("F", bound=Callable[..., Any])


def fabric_option(command: F) -> F:
    """Add the option `--fabric`."""
    text = (
        "Fabric of the site: the document of the chart's value `fabric`, or values with it. Default: known labels, "
        "usual bandwidths."
    )
    return click.option("--fabric", type=click.Path(path_type=Path), help=text)(command)


def read_fabric(path: Path | None) -> SiteFabric:
    """The fabric in a file. Without one, nothing is stated.

    Raises:
        click.ClickException: the file cannot be read, or its document is invalid.
    """
    if path is None:
        return DEFAULT_SITE
    try:
        return parse_fabric_file(path.read_text())
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from error
    except (FabricError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{path}: {error}") from error


def parse_fabric_file(text: str) -> SiteFabric:
    """The fabric of a document, or of values of the chart.

    Raises:
        FabricError: the document is invalid.
    """
    try:
        return parse_fabric(document_in_values(text, "fabric", FABRIC_DOCUMENT))
    except ValueError as error:
        raise FabricError(str(error)) from None
