"""Names that users choose lead the operator to no object of another namespace."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from kubernetes.aio.client import Configuration

from meshwright_operator.controller.claim_check import ClaimCheck
from meshwright_operator.kube import paths
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.operator_metrics import OperatorMetrics
from tests.operator.support import Api

CLAIMS = "/api/v1/namespaces/victim/persistentvolumeclaims"
TRAVERSALS = (
    "../../victim/persistentvolumeclaims/secret",
    "%2e%2e/%2e%2e/victim/persistentvolumeclaims/secret",
    "..%2f..%2fvictim%2fpersistentvolumeclaims%2fsecret",
    "..",
    ".",
    "a/status",
    "../secret",
)


@pytest_asyncio.fixture
async def client(api: Api) -> AsyncIterator[KubeClient]:
    configuration = Configuration(host=api.url)
    configuration.verify_ssl = False
    configuration.api_key = {"BearerToken": f"Bearer {api.token}"} if api.token else {}
    made = KubeClient(configuration, OperatorMetrics())
    yield made
    await made.close()


@pytest.mark.parametrize("name", TRAVERSALS)
async def test_a_name_leads_to_no_other_namespace(name: str, api: Api, client: KubeClient) -> None:
    await api.call("POST", "/api/v1/namespaces", {"metadata": {"name": "victim"}}, ok=False)
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "secret"}, "spec": spec}
    await api.call("POST", CLAIMS, claim, ok=False)
    assert (await client.get(f"{CLAIMS}/secret"))["metadata"]["name"] == "secret"
    path = paths.core_path("default", "persistentvolumeclaims", name)
    for call in (client.get(path), client.merge_patch(path, {"metadata": {"labels": {"mine": "yes"}}})):
        with pytest.raises(ApiError) as error:
            await call
        assert error.value.code == 404
    with pytest.raises(ApiError) as error:
        await client.create(path, claim)
    assert await client.delete(path, "any") is None
    assert not await ClaimCheck(client)._exists("default", name)
    assert "labels" not in (await client.get(f"{CLAIMS}/secret"))["metadata"]


def test_a_path_of_names_is_safe() -> None:
    for path in (
        paths.pods_path(None),
        paths.jobs_path("team", "a.b-c"),
        f"{paths.jobs_path('team', 'a')}/status",
        paths.group_path("kueue.x-k8s.io", "v1beta2", None, "resourceflavors", "a_b"),
        f"/apis/{paths.GROUP}",
        "/version",
    ):
        assert paths.is_safe(path), path
