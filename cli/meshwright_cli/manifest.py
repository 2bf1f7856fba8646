"""Reads manifests from YAML, and applies them as `kubectl apply --server-side` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from meshwright.api.labels import CLI_FIELD_MANAGER
from meshwright.kube_yaml import load_documents
from meshwright_local.kube.client import APPLY_PATCH, ApiClient, ApiError
from meshwright_local.kube.resources import Resource


class ManifestError(Exception):
    """A manifest that cannot be read or applied. The message names the file or the object, and the field."""


def read(path: Path) -> list[dict[str, Any]]:
    """The objects of a YAML file with one or several documents.

    Raises:
        ManifestError: it cannot be read, is not valid YAML, or a document is not a Kubernetes object.
    """
    try:
        documents = load_documents(path.read_text())
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ManifestError(f"{path}: not valid YAML: {error}") from error
    for number, document in enumerate(documents, start=1):
        for field in ("apiVersion", "kind", "metadata"):
            if not isinstance(document, dict) or not document.get(field):
                raise ManifestError(f"{path}: document {number} has no `{field}`")
        if not isinstance(document["metadata"], dict) or not document["metadata"].get("name"):
            raise ManifestError(f"{path}: document {number} has no `metadata.name`")
    return documents


async def resource_of(client: ApiClient, item: dict[str, Any]) -> Resource:
    """The API server's resource for objects of this kind, from its discovery documents.

    Raises:
        ManifestError: the server does not serve the kind.
    """
    api_version, kind = str(item["apiVersion"]), str(item["kind"])
    group, _, version = api_version.rpartition("/")
    try:
        found = await client.request("GET", f"/apis/{group}/{version}" if group else f"/api/{version}")
    except ApiError as error:
        if error.status == 404:
            raise ManifestError(f"{kind} {item['metadata']['name']}: the cluster has no `{api_version}`") from error
        raise
    for entry in found["resources"]:
        if entry["kind"] == kind and "/" not in entry["name"]:
            return Resource(group, version, entry["name"], kind, bool(entry["namespaced"]))
    raise ManifestError(f"{kind} {item['metadata']['name']}: `{api_version}` has no kind `{kind}`")


async def apply(client: ApiClient, item: dict[str, Any], namespace: str) -> dict[str, Any]:
    """Apply one object. Unknown fields are rejected, not dropped.

    Args:
        client: the API server.
        item: the object.
        namespace: for namespaced objects without `metadata.namespace`.

    Raises:
        ManifestError: the server rejected it; the message is the server's, which names the field.
    """
    resource = await resource_of(client, item)
    metadata = item["metadata"]
    space = metadata.get("namespace") or namespace
    path = resource.path(space if resource.namespaced else None, metadata["name"])
    params = {"fieldManager": CLI_FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"}
    try:
        answer: dict[str, Any] = await client.request("PATCH", path, params=params, body=item, content_type=APPLY_PATCH)
    except ApiError as error:
        raise ManifestError(f"{item['kind']} {metadata['name']}: {error.message}") from error
    return answer
