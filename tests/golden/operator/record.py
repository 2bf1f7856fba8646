"""The record of a virtual cluster: writes, events, generations and starts in order, with messages kept apart."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from meshwright.api.objects import KubeObject
from tests.golden.files import canonical
from tests.golden.operator.wire import stable_event, without_texts

REAL_TIME = ("ptj_watch_last_event_timestamp_seconds",)
"""Metrics of real time."""


REMOVED = "<removed>"


class Record:
    """Entries in order, and the messages that were in them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.entries: list[KubeObject] = []
        self.texts: list[str] = []

    def add(self, what: str, **fields: Any) -> None:
        """Adds an entry. Its messages go to `texts`."""
        self.entries.append(without_texts({"what": what, "at": self.now, **fields}, self.texts))

    def wrote(self, write: KubeObject) -> None:
        """Adds a write to the API server."""
        self.add("write", **stable_event(write))

    def noted(self, at: float, job: str, reason: str, kind: str, message: str) -> None:
        """Adds an event about a job."""
        self.add("note", job=job, reason=reason, type=kind, message=message)

    def notes(self, job: str) -> list[str]:
        """Reasons of the events about a job, in order."""
        return [entry["reason"] for entry in self.entries if entry["what"] == "note" and entry["job"] == job]


def samples(exposition: bytes) -> dict[str, str]:
    """Every sample of a metrics page by name and labels, without real times and the version of the release."""
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
    """The difference of `value` from `base`; both together give `value` again.

    `REMOVED` marks a field that only `base` has. Lists of equal length are compared by index; others are whole.
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
    """SHA-256 of the values as lines of canonical JSON."""
    hashed = hashlib.sha256()
    for value in values:
        hashed.update(canonical(rounded(value)).encode() + b"\n")
    return hashed.hexdigest()


def rounded(value: Any) -> Any:
    """The value with floats of twelve digits: the last bits depend on the C library."""
    if isinstance(value, float):
        return float(f"{value:.12g}") if math.isfinite(value) else str(value)
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value
