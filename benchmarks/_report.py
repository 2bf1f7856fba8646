"""What every benchmark prints: a table for people and, with `--json FILE`, the same numbers for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

WIDEST = 150
"""Columns of a terminal to draw for, however narrow it is: a shortened name is worth less than a wrapped line."""


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints rows under their columns; floats with three significant digits."""
    drawn = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        drawn.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    console = Console()
    console.width = max(console.width, WIDEST)
    console.print(drawn)


def write_json(path: Path | None, numbers: Mapping[str, Any]) -> None:
    """Writes the numbers where the user wants them, if anywhere."""
    if path is not None:
        path.write_text(json.dumps(numbers, indent=1) + "\n")
