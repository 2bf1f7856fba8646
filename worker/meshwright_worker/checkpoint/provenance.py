"""Where a checkpoint comes from: what ran, what changed on the way, and from which weights training began.

The record is part of each manifest and of each export, and contains that of its parent. So a chain can be read from its
last link, when all others are deleted. It has no times: two equal runs write the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from meshwright import __version__
from meshwright.protocol.run_config import NativeRun

EXPORT_RECORD = "meshwright-lineage.json"
"""The file of an export with the record of the checkpoint that it was made from."""
MAX_CHANGES = 200
"""Changes of a run that are remembered. The oldest are forgotten first."""
_NOT_RECORDED = ("checkpoint",)
"""Fields of a run that change neither samples nor weights."""


class _Record(BaseModel):
    """Unknown fields are ignored: a later version may have written them."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")


class Change(_Record):
    """What was different from a step on."""

    step: int
    """The last step before."""
    changes: dict[str, list[Any]]
    """Dotted path -> value before and after. None: it was not there."""


class Provenance(_Record):
    """Where a checkpoint comes from."""

    job: str = ""
    """Namespace and name of the job."""
    version: str = ""
    """Version of Meshwright in the image."""
    image: str | None = None
    """The image with its digest, as the node has pulled it; None if the cluster does not say."""
    spec: dict[str, Any] = {}
    """The run: model, data, training and layout."""
    history: list[Change] = []
    """What has changed since the run began, oldest first."""
    parent: Parent | None = None
    """What training began from; None for random weights."""
    adapter: Annotated[Parent | None, Field(exclude_if=lambda parent: parent is None)] = None
    """The adapter of these weights that training began from; None if it was new."""

    def facts(self) -> dict[str, Any]:
        """All that may change, by dotted path."""
        return flattened({"version": self.version, "image": self.image, "spec": self.spec})


class Parent(_Record):
    """What training began from, or the checkpoint that was exported."""

    path: str
    """Where they were, as the ranks saw it."""
    step: int | None = None
    """Step of the checkpoint; None for weights that Meshwright has not written."""
    digest: int | None = None
    """Digest of the samples until then."""
    provenance: Provenance | None = None
    """Where they come from; None if that is not known."""
    base_fingerprint: Annotated[str | None, Field(exclude_if=lambda text: text is None)] = None
    """Of an adapter: fingerprint of the weights that it was trained on. None if that is not known."""
    resumed: Annotated[bool, Field(exclude_if=lambda resumed: not resumed)] = False
    """Whether training began from the entire checkpoint, after its step, and not only from its weights."""


def provenance_of(run: NativeRun, job: str, image: str | None) -> Provenance:
    """The record of a run that begins."""
    spec = run.model_dump(mode="json", by_alias=True, exclude_none=True)
    kept = {name: value for name, value in spec.items() if name not in _NOT_RECORDED}
    weights, lora = run.training.initial_weights, run.training.lora
    return Provenance(
        job=job,
        version=__version__,
        image=image,
        spec=kept,
        parent=parent_at(weights) if weights else None,
        adapter=parent_at(lora.initial_adapter) if lora is not None and lora.initial_adapter else None,
    )


def continued(before: Provenance | None, now: Provenance, step: int) -> Provenance:
    """The record of a run that goes on from the checkpoint of `step`, whose record was `before`. Pure."""
    if before is None:
        return now
    history = [*before.history, *_changes(before, now, step)]
    begun = {"parent": before.parent, "adapter": before.adapter}
    return now.model_copy(update={"history": history[-MAX_CHANGES:], **begun})


def branched(source: str, step: int, digest: int, before: Provenance | None, now: Provenance) -> Provenance:
    """The record of a run that begins from the checkpoint `source` of another one, whose record was `before`. Pure."""
    parent = Parent(path=source, step=step, digest=digest, provenance=before, resumed=True)
    return now.model_copy(update={"history": _changes(before, now, step) if before else [], "parent": parent})


def _changes(before: Provenance, now: Provenance, step: int) -> list[Change]:
    """What is different after `step`; empty if nothing is."""
    old, new = before.facts(), now.facts()
    changes = {path: [old.get(path), new.get(path)] for path in sorted({*old, *new}) if old.get(path) != new.get(path)}
    return [Change(step=step, changes=changes)] if changes else []


def parent_at(directory: str) -> Parent:
    """What is known about the weights in a directory. An export has a record of its own."""
    try:
        recorded = Parent.model_validate(json.loads((Path(directory) / EXPORT_RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError):
        return Parent(path=directory)
    return recorded


def export_record(
    checkpoint: str, step: int, digest: int, provenance: Provenance | None, base_fingerprint: str | None = None
) -> str:
    """The content of `EXPORT_RECORD`; that of an adapter has the fingerprint of its model's weights."""
    record = Parent(path=checkpoint, step=step, digest=digest, provenance=provenance, base_fingerprint=base_fingerprint)
    return json.dumps(record.model_dump(mode="json", by_alias=True, exclude_none=True), indent=1)


def flattened(value: Any, path: str = "") -> dict[str, Any]:
    """Dotted path -> value of everything in nested objects. Lists are values."""
    if not isinstance(value, Mapping):
        return {path: value}
    found: dict[str, Any] = {}
    for name, inner in value.items():
        found |= flattened(inner, f"{path}.{name}" if path else str(name))
    return found


Provenance.model_rebuild()
