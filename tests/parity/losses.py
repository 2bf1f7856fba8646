"""The exact numbers of the parity matrix, to show that a change of code changed no arithmetic.

`--losses FILE` records every row: in each number format, the losses of every step on every rank and of the reference
as hexadecimal floats, and SHA-256 sums over the gradients and parameters of all ranks. `--against FILE` compares with
such a file. Numbers are only the same on the same kind of CPU with the same build of torch, so files are not committed.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.api.precision import Precision

Stored = Mapping[str, Any]
"""A file's content, see `as_json`."""


@dataclass(frozen=True)
class RankNumbers:
    """What one rank computed in one number format."""

    losses: list[str]
    """Of each step, as `float.hex` writes it."""
    gradients: str
    """SHA-256 of its part of each gradient of the first step."""
    parameters: str
    """SHA-256 of its part of each parameter and buffer after the last step."""


@dataclass(frozen=True)
class Numbers:
    """What a row computed in one number format."""

    reference: list[list[str]]
    """Losses of the reference, by island."""
    ranks: list[RankNumbers]

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return {
            "reference": self.reference,
            "ranks": [rank.losses for rank in self.ranks],
            "gradients": _joined(rank.gradients for rank in self.ranks),
            "parameters": _joined(rank.parameters for rank in self.ranks),
        }


@dataclass(frozen=True)
class Recorded:
    """A row of the file: its numbers, or for a refused combination the error."""

    technique: str
    numbers: Mapping[Precision, Numbers]
    timed: bool = False
    """Whether the order of updates follows the clock, as with an asynchronous parameter server."""
    refused: str | None = None


@dataclass(frozen=True)
class Difference:
    """How a run differs from a file."""

    rows: list[str]
    """Rows with other numbers, and in what."""
    missing: list[str]
    """Rows of the file that this run lacks."""
    added: list[str]
    """Rows that the file lacks."""
    texts: list[str]
    """Refused rows with another error text."""
    renamed: int
    """Rows compared although their names differ."""
    compared: int
    """Rows whose numbers were compared."""
    timed: int
    """Rows that are in both but follow the clock, whose numbers differ from one run to the next."""

    @property
    def empty(self) -> bool:
        """Whether all numbers are the same; error texts may differ."""
        return not (self.rows or self.missing or self.added)


def hexadecimal(losses: Iterable[float]) -> list[str]:
    """The exact losses."""
    return [float(loss).hex() for loss in losses]


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of the tensors' names, types, shapes and bytes."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def as_json(rows: Mapping[str, Recorded]) -> dict[str, Any]:
    """What the file holds. Rows that follow the clock are marked: their numbers differ from one run to the next."""
    return {
        "machine": machine(),
        "rows": {
            name: {
                "technique": row.technique,
                **({"timed": True} if row.timed else {}),
                **{precision.value: numbers.as_json() for precision, numbers in row.numbers.items()},
            }
            for name, row in rows.items()
            if row.refused is None
        },
        "refused": {
            name: {"technique": row.technique, "text": row.refused}
            for name, row in rows.items()
            if row.refused is not None
        },
    }


def joined(stored: Stored, more: Stored, order: Sequence[str]) -> Stored:
    """Both files' rows in this order, those of the second where both have one; rows of no name in it are left out."""
    return {
        "machine": more["machine"],
        **{
            part: {name: rows[name] for name in order if name in rows}
            for part in ("rows", "refused")
            for rows in ({**stored[part], **more[part]},)
        },
    }


def machine() -> dict[str, Any]:
    """What the numbers depend on beside the code."""
    return {
        "architecture": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def compare(stored: Stored, fresh: Stored, part: str = "") -> Difference:
    """A fresh run against a file; with `part`, only the rows whose name holds it.

    A row whose name is in one of them alone is compared with the one of the same technique and position that the other
    has alone: names hold all options, whose names may have changed.
    """
    before, refused_before = _holding(part, stored["rows"]), _holding(part, stored["refused"])
    after, refused = fresh["rows"], fresh["refused"]
    trained, texts = _pairs(before, after), _pairs(refused_before, refused)
    timed = {new for new, old in trained.items() if after[new].get("timed") or before[old].get("timed")}
    wrong = {new: _fields_that_differ(before[old], after[new]) for new, old in trained.items() if new not in timed}
    return Difference(
        rows=[f"{name}: {', '.join(fields)}" for name, fields in wrong.items() if fields],
        missing=sorted({*before, *refused_before} - {*trained.values(), *texts.values()}),
        added=sorted({*after, *refused} - {*trained, *texts}),
        texts=[
            f"{new}: {refused[new]['text']}"
            for new, old in texts.items()
            if refused[new]["text"] != refused_before[old]["text"]
        ],
        renamed=sum(new != old for new, old in (*trained.items(), *texts.items())),
        compared=len(wrong),
        timed=len(timed),
    )


def report(difference: Difference) -> list[str]:
    """The lines to print."""
    same = difference.compared - len(difference.rows)
    lines = [f"{same} of {difference.compared} rows have the same losses, gradients and parameters, bit for bit"]
    for count, what in (
        (difference.renamed, "rows were compared by technique and position: their names differ"),
        (difference.timed, "rows follow the clock and were not compared"),
    ):
        lines += [f"{count} {what}"] if count else []
    for names, what in (
        (difference.rows, "have other numbers"),
        (difference.missing, "are in the file alone"),
        (difference.added, "are in this run alone"),
        (difference.texts, "are refused with another text, which is no failure"),
    ):
        lines += [f"{len(names)} rows {what}:", *(f"  {name}" for name in names)] if names else []
    return lines


def _joined(sums: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sums).encode()).hexdigest()


def _holding(part: str, rows: Stored) -> Stored:
    return {name: row for name, row in rows.items() if part in name}


def _pairs(before: Stored, after: Stored) -> dict[str, str]:
    """By the name of a row its name in the file, for rows that both have."""
    old, new = _alone(before, after), _alone(after, before)
    renamed = {
        name: other
        for technique, names in new.items()
        if len(old[technique]) == len(names)
        for name, other in zip(names, old[technique], strict=True)
    }
    return {name: renamed.get(name, name) for name in after if name in before or name in renamed}


def _alone(rows: Stored, others: Stored) -> defaultdict[str, list[str]]:
    """By technique the names of rows that the others lack, in order."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, row in rows.items():
        if name not in others:
            names[row["technique"]].append(name)
    return names


def _fields_that_differ(before: Stored, after: Stored) -> Sequence[str]:
    formats = [each.value for each in Precision if each.value in {*before, *after}]
    return [
        f"{each} {field}"
        for each in formats
        for field in ("reference", "ranks", "gradients", "parameters")
        if before.get(each, {}).get(field) != after.get(each, {}).get(field)
    ]
