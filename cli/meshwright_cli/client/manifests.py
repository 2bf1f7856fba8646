"""Reads manifests: one or several documents of YAML or JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from meshwright.api.labels import KIND
from meshwright.api.objects import KubeObject
from meshwright.kube_yaml import load_documents
from meshwright_cli.client.errors import ManifestError

STDIN = "-"


def read_manifest(source: str | Path) -> list[KubeObject]:
    """The objects of a file, of all `.yaml`, `.yml` and `.json` files of a directory, or of stdin (`-`).

    Raises:
        ManifestError: it cannot be read, is not valid YAML, or a document is not a Kubernetes object.
    """
    if str(source) == STDIN:
        return parse_manifest(sys.stdin.read(), "stdin")
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml", ".json"))
        if not files:
            raise ManifestError(f"{path}: the directory contains no .yaml, .yml or .json file")
        return [item for file in files for item in read_manifest(file)]
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    return parse_manifest(text, str(path))


def parse_manifest(text: str, name: str) -> list[KubeObject]:
    """The objects of a text. `name` is that of its source, for messages.

    Raises:
        ManifestError: it is not valid YAML, or a document is not a Kubernetes object.
    """
    try:
        documents = load_documents(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ManifestError(f"{name}: not valid YAML: {error}") from error
    return checked(documents, name)


def checked(documents: Iterable[Any], name: str) -> list[KubeObject]:
    """The documents, if each is a Kubernetes object with a name; the items of a List are taken out of it.

    Raises:
        ManifestError: one is not.
    """
    objects: list[KubeObject] = []
    for number, document in enumerate(documents, start=1):
        if not isinstance(document, Mapping):
            raise ManifestError(f"{name}: document {number} is not a Kubernetes object")
        if document.get("kind") == "List":
            objects += checked(document.get("items") or (), f"{name}: document {number}")
            continue
        for field in ("apiVersion", "kind", "metadata"):
            if not document.get(field):
                raise ManifestError(f"{name}: document {number} has no `{field}`")
        metadata = document["metadata"]
        if not isinstance(metadata, Mapping) or not metadata.get("name"):
            raise ManifestError(f"{name}: document {number} has no `metadata.name`")
        objects.append(dict(document))
    return objects


def only_job(items: Iterable[KubeObject], name: str) -> KubeObject:
    """The one job among objects.

    Raises:
        ManifestError: there is none, or more than one.
    """
    jobs = [item for item in items if item["kind"] == KIND]
    if len(jobs) != 1:
        raise ManifestError(f"{name}: expected exactly one {KIND}, found {len(jobs)}")
    return jobs[0]
