"""What is recorded of a virtual cluster: every write, note, generation and start in order, and words apart."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.golden.files import canonical
from tests.golden.operator.wire import stable_event, without_texts

Object = dict[str, Any]

REAL_TIME = ("ptj_watch_last_event_timestamp_seconds",)
"""Metrics that tell real time."""


REMOVED = "<removed>"


class Record:
    """Entries in their order, and the texts that were taken out of them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.entries: list[Object] = []
        self.texts: list[str] = []

    def add(self, what: str, **fields: Any) -> None:
        """One entry. Words for people go to `texts`."""
        self.entries.append(without_texts({"what": what, "at": self.now, **fields}, self.texts))

    def wrote(self, write: Object) -> None:
        """A write of the operator's to the API server."""
        self.add("write", **stable_event(write))

    def noted(self, at: float, job: str, reason: str, kind: str, message: str) -> None:
        """Something that the operator tells about a job."""
        self.add("note", job=job, reason=reason, type=kind, message=message)

    def notes(self, job: str) -> list[str]:
        """Reasons of the job's notes, in order."""
        return [entry["reason"] for entry in self.entries if entry["what"] == "note" and entry["job"] == job]


def samples(exposition: bytes) -> dict[str, str]:
    """Every sample of a metrics page by name and labels, without moments of real time and the release's number."""
    found: dict[str, str] = {}
    for family in text_string_to_metric_families(exposition.decode()):
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = {key: "release" if key == "version" else value for key, value in sorted(sample.labels.items())}
            value = "time" if sample.name in REAL_TIME else f"{sample.value:.9g}"
            found[f"{family.type} {sample.name} {canonical(labels)}"] = value
    return dict(sorted(found.items()))


def delta(base: Any, value: Any) -> Any:
    """What is other in `value` than in `base`, so that files show what is special; with `base` it is all of `value`.

    `REMOVED` stands for a field that is not there. Of lists of one length it is by index, other lists are whole.
    """
    if isinstance(base, dict) and isinstance(value, dict):
        found = {key: delta(base[key], item) for key, item in value.items() if key in base and item != base[key]}
        added = {key: item for key, item in value.items() if key not in base}
        return found | added | {key: REMOVED for key in base if key not in value}
    if isinstance(base, list) and isinstance(value, list) and len(base) == len(value):
        pairs = enumerate(zip(base, value, strict=True))
        return {f"[{index}]": delta(old, new) for index, (old, new) in pairs if old != new}
    return value


def digest(values: Iterable[Any]) -> str:
    """SHA-256 of the values' canonical JSON, a line each."""
    hashed = hashlib.sha256()
    for value in values:
        hashed.update(canonical(rounded(value)).encode() + b"\n")
    return hashed.hexdigest()


def rounded(value: Any) -> Any:
    """The value with floats of twelve digits: the last bits depend on the machine's C library."""
    if isinstance(value, float):
        return float(f"{value:.12g}") if math.isfinite(value) else str(value)
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value
