"""The table of docs/frameworks.md with what the examples did: `python -m tests.e2e.framework_table` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "frameworks.md"
RESULTS = ROOT / "examples" / "frameworks" / "results.json"
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"


def table() -> Iterator[str]:
    """The lines of the table."""
    yield "| Example | Versions | What runs | Ranks | Resumed after step | Final loss | Without a lost pod |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, one in sorted(json.loads(RESULTS.read_text()).items()):
        link = f"[{name}](../examples/frameworks/{one['example']}/train.py)"
        versions, losses = ", ".join(one["versions"]), f"{one['loss']} | {one['undisturbed_loss']}"
        yield f"| {link} | {versions} | {one['runs']} | {one['ranks']} | {one['resumed_after']} | {losses} |"


def page(text: str) -> str:
    """The page with the table in it."""
    before, rest = text.split(BEGIN)
    lines = "".join(f"{line}\n" for line in table())
    return f"{before}{BEGIN}{lines}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
