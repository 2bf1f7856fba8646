"""Parameters that several commands have."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

STDIO = Path("-")
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Duration(click.ParamType[float]):
    """Seconds as a number with an optional unit, such as `90`, `90s`, `10m` or `1h30m`."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read a duration."""
        text = str(value).strip().lower()
        if re.fullmatch(r"(\d+(\.\d+)?[smhd]?)+", text):
            return sum(float(number) * UNITS[unit] for number, _, unit in re.findall(r"(\d+(\.\d+)?)([smhd]?)", text))
        return float(
            self.fail(f"`{value}` is not a duration: use a number of seconds, or units as in 90s, 10m or 1h30m")
        )


def manifest_parameter(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument MANIFEST, and `-f` for the same. The command gets the path as `manifest`: see `input_text`."""

    @click.argument("manifest", metavar="MANIFEST", type=click.Path(path_type=Path), required=False)
    @click.option(
        "-f",
        "--filename",
        type=click.Path(path_type=Path),
        help="The same as MANIFEST, as in kubectl: a file, or - for standard input.",
    )
    @functools.wraps(function)
    def with_manifest(*args: Any, manifest: Path | None, filename: Path | None, **more: Any) -> Any:
        given = [path for path in (manifest, filename) if path is not None]
        if len(given) != 1:
            name = click.get_current_context().info_name
            raise click.UsageError(f"exactly one manifest is needed: `{name} FILE`, or `{name} -f FILE`")
        return function(*args, manifest=given[0], **more)

    return with_manifest


def input_text(path: Path) -> str:
    """The text of a file, or for `-` of standard input, which may be read again in the same command.

    Raises:
        OSError: it cannot be read.
    """
    if path != STDIO:
        return path.read_text(encoding="utf-8")
    known = click.get_current_context().meta
    if "stdin" not in known:
        known["stdin"] = sys.stdin.read()
    return str(known["stdin"])
