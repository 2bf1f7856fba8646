"""How objects are shown: as they are, as rows of a Table (kubectl get), or by their metadata alone; as JSON or YAML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import orjson
import yaml

from meshwright.local.apiserver.errors import ApiError
from meshwright.local.apiserver.eventlog import Stored
from meshwright.local.apiserver.printers import columns_and_cells
from meshwright.local.apiserver.resources import Resource

META_VERSION = "meta.k8s.io/v1"
_ANY = ("*/*", "application/*", "application/json", "")


class Form(Enum):
    """What of an object is shown."""

    FULL = "full"
    TABLE = "table"
    METADATA = "metadata"


@dataclass(frozen=True, slots=True)
class View:
    """How to show objects of one resource to one client."""

    resource: Resource
    form: Form
    yaml: bool = False
    include_object: str = "Metadata"

    def one(self, stored: Stored, *, header: bool = True) -> bytes:
        """One object. In a Table, `header` says whether the columns are described too."""
        obj = stored.obj
        if self.form is Form.TABLE:
            return orjson.dumps(self._table([obj], {"resourceVersion": obj["metadata"]["resourceVersion"]}, header))
        if self.form is Form.METADATA:
            return orjson.dumps(_partial(obj))
        return stored.body if obj["apiVersion"] == self.resource.group_version else orjson.dumps(self._converted(obj))

    def many(self, items: Sequence[Stored], metadata: dict[str, Any]) -> bytes:
        """A list."""
        if self.form is Form.TABLE:
            return orjson.dumps(self._table([item.obj for item in items], metadata, True))
        kind, version = self.resource.list_kind, self.resource.group_version
        if self.form is Form.METADATA:
            kind, version = "PartialObjectMetadataList", META_VERSION
        head = orjson.dumps({"kind": kind, "apiVersion": version, "metadata": metadata})[:-1]
        return head + b',"items":[' + b",".join(self.one(item) for item in items) + b"]}"

    def bookmark(self, revision: int, *, initial_end: bool) -> bytes:
        """The object of a BOOKMARK event: nothing but a revision."""
        metadata: dict[str, Any] = {"resourceVersion": str(revision), "creationTimestamp": None}
        if initial_end:
            metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
        obj = {"kind": self.resource.kind, "apiVersion": self.resource.group_version, "metadata": metadata}
        if self.form is Form.TABLE:
            return orjson.dumps({**self._table([], {"resourceVersion": str(revision)}, False)})
        return orjson.dumps(_partial(obj) if self.form is Form.METADATA else obj)

    def encode(self, body: bytes) -> tuple[bytes, str]:
        """A finished JSON answer in the client's format, with its content type."""
        if self.yaml:
            return yaml.safe_dump(orjson.loads(body), sort_keys=True).encode(), "application/yaml"
        return body, "application/json"

    def _converted(self, obj: dict[str, Any]) -> dict[str, Any]:
        return {**obj, "apiVersion": self.resource.group_version}

    def _table(self, objects: Sequence[dict[str, Any]], metadata: dict[str, Any], header: bool) -> dict[str, Any]:
        columns, cells = columns_and_cells(self.resource)
        definitions = [
            {"name": c.name, "type": c.type, "format": c.format, "description": c.description, "priority": c.priority}
            for c in columns
        ]
        rows: list[dict[str, Any]] = [{"cells": cells(obj)} for obj in objects]
        for row, obj in zip(rows, objects, strict=True):
            if self.include_object == "Object":
                row["object"] = self._converted(obj)
            elif self.include_object == "Metadata":
                row["object"] = _partial(obj)
        return {
            "kind": "Table",
            "apiVersion": META_VERSION,
            "metadata": metadata,
            "columnDefinitions": definitions if header else None,
            "rows": rows,
        }


def _partial(obj: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "PartialObjectMetadata", "apiVersion": META_VERSION, "metadata": obj["metadata"]}


def negotiate(resource: Resource, accept: str, include_object: str) -> View:
    """The view that an Accept header asks for: the first of its choices that is served.

    Raises:
        ApiError: 406 when none is.
    """
    for choice in accept.split(","):
        media, *parameters = (part.strip() for part in choice.split(";"))
        wanted = dict(p.partition("=")[::2] for p in parameters)
        form = {
            None: Form.FULL,
            "Table": Form.TABLE,
            "PartialObjectMetadata": Form.METADATA,
            "PartialObjectMetadataList": Form.METADATA,
        }.get(wanted.get("as"))
        if form is None or (form is not Form.FULL and (wanted.get("g"), wanted.get("v")) != ("meta.k8s.io", "v1")):
            continue
        if media in _ANY or media == "application/yaml":
            return View(resource, form, media == "application/yaml", include_object or "Metadata")
    accepted = "application/json, application/yaml"
    text = f"only the following media types are accepted: {accepted}"
    raise ApiError(406, "NotAcceptable", text)
