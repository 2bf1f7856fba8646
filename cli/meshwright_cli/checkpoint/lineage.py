"""`meshwright lineage`: what ran, what changed on the way, and which weights training began from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from meshwright_cli.checkpoint.inspect import Inspect, source_options

LONGEST_VALUE = 60
"""Columns of a value in a change."""
MAX_CHANGES = 12
"""Changes of one step that are shown."""


@click.command(epilog="Next: meshwright checkpoint list JOB.")
@source_options
@click.option("-o", "--output", type=click.Choice(["json"]), help="Output format. Defaults to text for people.")
def lineage(inspect: Inspect, output: str | None) -> None:
    """Show where a checkpoint or an export comes from.

    Prints the chain from the newest checkpoint, or that of --step, back to the first weights: image, version and
    samples, what was edited or resized after which step, and the checkpoints that training began from. What a JOB, a
    DIRECTORY and a URI are is as in `meshwright checkpoint list`; a directory may also be an export.
    """
    (found,) = inspect("lineage")
    click.echo(json.dumps(found, indent=2) if output is not None else "\n".join(lineage_lines(found)))


def lineage_lines(found: Mapping[str, Any]) -> list[str]:
    """The chain as a tree, the newest first. Pure."""
    source = f", exported from {found['source']}" if found.get("source") else ""
    title = f"{found['place']}: step {found['step']:,}{source}" if found["step"] is not None else str(found["place"])
    return [title, *_record(found.get("digest"), found.get("provenance"))]


def _record(digest: int | None, record: Mapping[str, Any] | None) -> list[str]:
    samples = f"samples {digest:016x}" if digest is not None else ""
    if record is None:
        writers = "a custom module, another program or Meshwright 0.1"
        return [f"└─ {samples or 'weights'}; it has no record, as it was written by {writers}"]
    facts = [
        f"job {record['job']}" if record.get("job") else "",
        f"Meshwright {record['version']}" if record.get("version") else "",
        f"image {record['image']}" if record.get("image") else "",
        samples,
    ]
    branches = [[", ".join(fact for fact in facts if fact)]]
    branches += [_change(change) for change in reversed(record.get("history") or [])]
    if adapter := record.get("adapter"):
        branches.append(_parent(adapter, "adapter"))
    branches.append(_parent(record.get("parent"), "weights"))
    lines = []
    for number, branch in enumerate(branches):
        last = number == len(branches) - 1
        lines.append(f"{'└─' if last else '├─'} {branch[0]}")
        lines += [f"{'  ' if last else '│ '} {line}" for line in branch[1:]]
    return lines


def _change(change: Mapping[str, Any]) -> list[str]:
    changes = change.get("changes") or {}
    shown = [f"{path}: {_value(old)} → {_value(new)}" for path, (old, new) in list(changes.items())[:MAX_CHANGES]]
    more = [f"and {len(changes) - MAX_CHANGES} more"] if len(changes) > MAX_CHANGES else []
    return [f"after step {change['step']:,}:", *shown, *more]


def _parent(parent: Mapping[str, Any] | None, what: str) -> list[str]:
    if parent is None:
        return ["began with random weights"]
    step = f" (step {parent['step']:,})" if parent.get("step") is not None else ""
    began = "resumed from" if parent.get("resumed") else f"began with the {what} of"
    first = f"{began} {parent['path']}{step}"
    return [first, *_record(parent.get("digest"), parent.get("provenance"))]


def _value(value: object) -> str:
    text = "not set" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
