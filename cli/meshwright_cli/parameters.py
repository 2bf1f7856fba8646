"""Types of options that several commands have."""

from __future__ import annotations

import re

import click

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
