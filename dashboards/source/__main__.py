"""Writes the boards, the rules and the page of alerts: `python -m dashboards.source`."""

from __future__ import annotations

import json
from pathlib import Path

from dashboards.source import fleet_board, job_board, operator_board
from dashboards.source.alerts import GROUPS
from dashboards.source.rules import alerts_page, rules_file

DIRECTORY = Path(__file__).resolve().parents[1]


def files() -> dict[Path, str]:
    """Return every generated file and its content."""
    boards = {"fleet": fleet_board.board(), "job": job_board.board(), "operator": operator_board.board()}
    return {
        **{DIRECTORY / f"{name}.json": json.dumps(board, indent=1) + "\n" for name, board in boards.items()},
        DIRECTORY / "alerts" / "meshwright.rules.yaml": rules_file(GROUPS),
        DIRECTORY.parent / "docs" / "alerts.md": alerts_page(GROUPS),
    }


def main() -> None:
    """Write every generated file."""
    for path, content in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
