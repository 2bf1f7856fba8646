"""Reads nodes from a file: the output of `kubectl get nodes -o json`, or a short list.

    - {name: node-1, gpus: 8, free: 6, labels: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}}
    - {name: node-2, gpus: 8, count: 31, product: NVIDIA-H100-80GB-HBM3}

Both become raw Node objects, and a pod for GPUs in use, so that the planner reads them like those of a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from meshwright.api.parsing import field_path, problem_text

PRODUCT_LABEL = "nvidia.com/gpu.product"
UNLIMITED = {"cpu": "100000", "memory": "1Pi", "pods": "10000"}
"""Other resources of a node whose entry gives only its GPUs."""
MAX_NODES = 100_000
"""Largest number of nodes of one entry."""


class InventoryFileError(ValueError):
    """The file does not describe nodes. The message names the file, the entry and the field."""


class NodeEntry(BaseModel):
    """A node, or `count` equal nodes, in a list."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    name: Annotated[str, Field(min_length=1, max_length=253)]
    gpus: Annotated[int, Field(ge=0, le=1024)]
    """GPUs of the node."""
    free: Annotated[int | None, Field(ge=0, le=1024, alias="freeGpus")] = None
    """GPUs that are not in use (default: all)."""
    labels: dict[str, str] = {}
    product: str | None = None
    """Short for the label `nvidia.com/gpu.product`."""
    count: Annotated[int, Field(ge=1, le=MAX_NODES)] = 1
    """Number of equal nodes, named `NAME-0`, `NAME-1` and so on."""

    @model_validator(mode="after")
    def _check_free_gpus(self) -> NodeEntry:
        if self.free is not None and self.free > self.gpus:
            raise ValueError(f"free must be at most gpus ({self.gpus}), got {self.free}")
        return self


def read_nodes(path: Path, gpu_resource: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(Node objects, Pod objects) of a file.

    Raises:
        InventoryFileError: it cannot be read, or does not describe nodes.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InventoryFileError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InventoryFileError(f"{path}: neither valid YAML nor valid JSON: {error}") from error
    if isinstance(content, Mapping) and content.get("kind") == "Node":
        return [dict(content)], []
    if isinstance(content, Mapping) and isinstance(content.get("items"), list):
        items = [item for item in content["items"] if isinstance(item, dict)]
        return [i for i in items if i.get("kind") in (None, "Node")], [i for i in items if i.get("kind") == "Pod"]
    if not isinstance(content, list):
        raise InventoryFileError(f"{path}: must be a list of nodes, or the output of `kubectl get nodes -o json`")
    return _from_list(path, content, gpu_resource)


def nodes_of(entry: NodeEntry, gpu_resource: str) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Pairs of a Node object and a Pod object that uses the GPUs that are not free."""
    labels = dict(entry.labels)
    if entry.product:
        labels.setdefault(PRODUCT_LABEL, entry.product)
    used_gpus = entry.gpus - (entry.gpus if entry.free is None else entry.free)
    for index in range(entry.count):
        name = entry.name if entry.count == 1 else f"{entry.name}-{index}"
        node = {
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
            "spec": {},
            "status": {
                "allocatable": {**UNLIMITED, gpu_resource: str(entry.gpus)},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }
        yield node, _pod(name, gpu_resource, used_gpus) if used_gpus else None


def _from_list(path: Path, content: list[Any], gpu_resource: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    nodes, pods = [], []
    names: set[str] = set()
    for number, raw in enumerate(content, start=1):
        try:
            entry = NodeEntry.model_validate(raw)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = f"{field_path(first['loc'])}: " if first["loc"] else ""
            raise InventoryFileError(f"{path}: node {number}: {where}{problem_text(first)}") from None
        for node, pod in nodes_of(entry, gpu_resource):
            name = node["metadata"]["name"]
            if name in names:
                raise InventoryFileError(f"{path}: node {number}: name: `{name}` must be unique")
            names.add(name)
            nodes.append(node)
            pods += [pod] if pod else []
    return nodes, pods


def _pod(node: str, gpu_resource: str, gpus: int) -> dict[str, Any]:
    container = {"name": "taken", "resources": {"requests": {gpu_resource: str(gpus)}}}
    return {
        "metadata": {"name": f"taken-{node}", "namespace": "default", "uid": f"taken-{node}"},
        "spec": {"nodeName": node, "containers": [container]},
        "status": {"phase": "Running"},
    }
