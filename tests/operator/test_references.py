"""Every field of a job that names another object names one of the job's own namespace, or of the cluster by design.

A field without a test here fails the first test: it lists the string fields of the CRD that could name an object.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests import definition
from tests.operator.support import job
from tests.operator.test_manifests import make
from tests.operator.test_observe import KEY

OTHER = "theirs"
VOLUME = {"name": "v", "mountPath": "/v"}
CLAIM = {"name": "nic"}
COMMAND: dict[str, Any] = {"model": None, "data": None, "training": None}


def ref(kind: str) -> dict[str, Any]:
    return {"env": [{"name": "A", "valueFrom": {kind: {"name": OTHER, "key": "k"}}}]}


def workers(**fields: Any) -> dict[str, Any]:
    return {"workers": {"image": "i", "gpusPerWorker": 2, **fields}}


NAMESPACED: dict[str, dict[str, Any]] = {
    "checkpoint.claimName": {"checkpoint": {"claimName": OTHER}},
    "checkpoint.store.secretName": {"checkpoint": {"uri": "s3://runs/a", "store": {"secretName": OTHER}}},
    "data.claimName": {"data": {"claimName": OTHER, "path": "x"}},
    "runtime.scripts": {**COMMAND, "runtime": {"command": ["x"], "scripts": OTHER}},
    "workers.env[].valueFrom.configMapKeyRef.name": workers(**ref("configMapKeyRef")),
    "workers.env[].valueFrom.secretKeyRef.name": workers(**ref("secretKeyRef")),
    "workers.imagePullSecrets[].name": workers(imagePullSecrets=[{"name": OTHER}]),
    "workers.resourceClaims[].resourceClaimName": workers(resourceClaims=[{**CLAIM, "resourceClaimName": OTHER}]),
    "workers.resourceClaims[].resourceClaimTemplateName": workers(
        resourceClaims=[{**CLAIM, "resourceClaimTemplateName": OTHER}]
    ),
    "workers.serviceAccountName": workers(serviceAccountName=OTHER),
    "workers.volumes[].claimName": workers(volumes=[{**VOLUME, "claimName": OTHER}]),
    "workers.volumes[].configMapName": workers(volumes=[{**VOLUME, "configMapName": OTHER}]),
    "workers.volumes[].secretName": workers(volumes=[{**VOLUME, "secretName": OTHER}]),
}
"""Field -> a spec that uses it. A pod resolves these names in its own namespace."""

CLUSTER_SCOPED = {
    "priorityClassName": {"priorityClassName": OTHER},
    "workers.schedulerName": workers(schedulerName=OTHER),
    "managedBy": {},
}
"""PriorityClasses, and the names of controllers and schedulers: no objects of a tenant."""

NO_OBJECTS = {
    "training.optimizer.name",
    "workers.env[].name",
    "workers.resourceClaims[].name",
    "workers.volumes[].name",
    "workers.env[].valueFrom.configMapKeyRef.key",
    "workers.env[].valueFrom.secretKeyRef.key",
}
"""Names and keys within the job or within an object."""


def paths(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    if schema.get("type") == "object":
        for name, child in schema.get("properties", {}).items():
            yield from paths(child, f"{path}.{name}" if path else name)
    elif schema.get("type") == "array":
        yield from paths(schema["items"], f"{path}[]")
    else:
        yield path


def test_every_field_that_could_name_an_object_has_a_test() -> None:
    spec = definition.committed()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    suspects = {
        path
        for path in paths(spec)
        if path.endswith(("name", "Name", "Ref", "Names", "Secrets", "scripts", "managedBy", "namespace", "Namespace"))
    }
    assert suspects - NO_OBJECTS == {*NAMESPACED, *CLUSTER_SCOPED}
    assert not [path for path in paths(spec) if "namespace" in path.lower()], "no reference names a namespace"


def plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, child in value.items():
            yield name
            yield from keys(child)
    elif isinstance(value, list):
        for child in value:
            yield from keys(child)


@pytest.mark.parametrize("field", NAMESPACED)
def test_a_field_names_an_object_of_the_jobs_own_namespace(field: str) -> None:
    fields = NAMESPACED[field]
    if field == "data.claimName":
        base = job("x")["spec"]["data"]
        fields = {"data": {**base, "claimName": OTHER}}
    pod = make(**fields)
    assert pod["metadata"]["namespace"] == "team"
    assert OTHER in str(pod["spec"]), "the name reaches the pod as it is"
    assert "namespace" not in {name.lower() for name in keys(pod["spec"])}, "a pod's references have no namespace"
    assert KEY.namespace not in str(pod["spec"])


def test_a_priority_class_is_an_object_of_the_cluster() -> None:
    assert make(**CLUSTER_SCOPED["priorityClassName"])["spec"]["priorityClassName"] == OTHER


def test_another_scheduler_is_only_named() -> None:
    assert make(**CLUSTER_SCOPED["workers.schedulerName"])["spec"]["schedulerName"] == OTHER
