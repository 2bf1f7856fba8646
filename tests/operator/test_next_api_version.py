"""The operator serves jobs of a client that uses v1beta1, while that version is stored: rehearsed, not shipped."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from meshwright.api.labels import GROUP, PLURAL, VERSION
from meshwright.crd.definition import custom_resource_definition
from tests.conformance.test_api_versions import NEW, with_new_version
from tests.operator.agents import Kubelet
from tests.operator.conftest import StartOperator
from tests.operator.support import JOBS, Api, condition, job, until

CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{PLURAL}.{GROUP}"
NEW_JOBS = JOBS.replace(VERSION, NEW)


@pytest_asyncio.fixture
async def both_versions(api: Api) -> AsyncIterator[None]:
    """The definition with both versions, of which the new one is stored; afterwards the shipped one."""
    shipped = copy.deepcopy(dict(custom_resource_definition()))
    spec = with_new_version(copy.deepcopy(shipped))["spec"]
    await api.patch(CRD, {"spec": {"versions": spec["versions"]}})

    async def served() -> bool:
        return "items" in await api.call("GET", NEW_JOBS, ok=False)

    await until(served, "the new version is served")
    yield
    for item in await api.items(NEW_JOBS):
        await api.delete(f"{NEW_JOBS}/{item['metadata']['name']}")
    await api.patch(f"{CRD}/status", {"status": {"storedVersions": [NEW]}})
    versions = [{**version, "storage": version["name"] == VERSION} for version in spec["versions"]]
    await api.patch(CRD, {"spec": {"versions": versions}})
    await api.patch(f"{CRD}/status", {"status": {"storedVersions": [VERSION]}})
    await api.patch(CRD, {"spec": {"versions": shipped["spec"]["versions"]}})


async def test_a_job_of_a_newer_client_runs_is_edited_by_both_and_completes(
    api: Api, both_versions: None, kubelet: Kubelet, start_operator: StartOperator
) -> None:
    body = {**job("newer"), "apiVersion": f"{GROUP}/{NEW}"}
    created = await api.create(NEW_JOBS, body)
    assert created["apiVersion"] == f"{GROUP}/{NEW}"
    await start_operator()

    async def status() -> dict[str, Any]:
        return dict((await api.get(f"{NEW_JOBS}/newer")).get("status") or {})

    async def reason(kind: str, wanted: str) -> bool:
        return condition(await status(), kind).get("reason") == wanted

    async def is_true(kind: str) -> bool:
        return condition(await status(), kind).get("status") == "True"

    await until(lambda: reason("Ready", "Running"), "the new version shows that it runs")
    (owner,) = (await api.pods("newer"))[0]["metadata"]["ownerReferences"]
    assert owner["uid"] == created["metadata"]["uid"]
    await api.patch(f"{NEW_JOBS}/newer", {"spec": {"suspend": True}})
    await until(lambda: is_true("Suspended"), "an edit by the new version is carried out")
    await api.patch(f"{JOBS}/newer", {"spec": {"suspend": False}})
    await until(lambda: reason("Ready", "Running"), "and one by the old version")
    for agent in kubelet.of("newer"):
        await agent.finish()
    await until(lambda: is_true("Complete"), "it completes")
    assert (await status())["observedGeneration"] == (await api.get(f"{JOBS}/newer"))["metadata"]["generation"]
