"""v1beta1 of a ParallelTrainingJob, rehearsed: served next to v1alpha1 with one schema, stored, and then alone.

No version of Meshwright ships it. docs/api-policy.md says what has to be settled first.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from meshwright.api.labels import GROUP, KIND, PLURAL
from meshwright.crd.definition import custom_resource_definition
from tests.conformance.conftest import APPLY, CRDS, MERGE, Api
from tests.patience import patient

OLD, NEW = "v1alpha1", "v1beta1"
REHEARSED = f"rehearsed.{GROUP}"
"""A group of its own: other tests use the real one."""
CRD = f"{CRDS}/{PLURAL}.{REHEARSED}"
WARNING = f"{GROUP}/{OLD} {KIND} is deprecated; use {GROUP}/{NEW}"


def shipped() -> dict[str, Any]:
    """The definition as it is shipped, in the group of this test."""
    crd = copy.deepcopy(dict(custom_resource_definition()))
    names = crd["spec"]["names"]
    # Short names and categories belong to the first group that has them.
    crd["spec"]["names"] = {key: value for key, value in names.items() if key not in ("shortNames", "categories")}
    crd["spec"]["group"] = REHEARSED
    crd["metadata"]["name"] = f"{PLURAL}.{REHEARSED}"
    return crd


def with_new_version(crd: dict[str, Any]) -> dict[str, Any]:
    """The next release's definition: the new version is stored, the old one is served and deprecated."""
    (old,) = crd["spec"]["versions"]
    new = {**copy.deepcopy(old), "name": NEW}
    crd["spec"]["versions"] = [new, {**old, "storage": False, "deprecated": True, "deprecationWarning": WARNING}]
    crd["spec"]["conversion"] = {"strategy": "None"}
    return crd


def job(name: str, version: str) -> dict[str, Any]:
    spec = {
        "replicas": 2,
        "model": {"preset": "llama3-8b"},
        "data": {"source": "PythonStdlib"},
        "training": {"steps": 10, "globalBatchSize": 48, "sequenceLength": 128},
        "workers": {"image": "worker", "gpusPerWorker": 8},
    }
    return {"apiVersion": f"{REHEARSED}/{version}", "kind": KIND, "metadata": {"name": name}, "spec": spec}


class Rehearsal:
    """The jobs of one namespace, by both versions."""

    def __init__(self, api: Api) -> None:
        self.api = api

    def path(self, version: str, name: str = "", part: str = "") -> str:
        root = f"/apis/{REHEARSED}/{version}/namespaces/{self.api.namespace}/{PLURAL}"
        return "/".join(piece for piece in (root, name, part) if piece)

    async def read(self, version: str, name: str, part: str = "") -> dict[str, Any]:
        code, found = await self.api.call("GET", self.path(version, name, part))
        assert code == 200, found
        return dict(found)

    async def update_definition(self, change: Any) -> tuple[int, Any]:
        """Change the definition as stored, as often as somebody else does at the same time."""
        for _ in range(20):
            _, stored = await self.api.call("GET", CRD)
            code, answer = await self.api.call("PUT", CRD, change(stored))
            if code != 409:
                break
        return code, answer

    async def stored_versions(self) -> list[str]:
        return list((await self.api.call("GET", CRD))[1]["status"]["storedVersions"])

    async def warnings(self, version: str, name: str) -> list[str]:
        url = self.api.server.url + self.path(version, name)
        async with self.api.session.get(url, ssl=self.api.context) as response:
            return list(response.headers.getall("Warning", []))


@pytest.fixture
async def rehearsal(api: Api) -> Any:
    code, _ = await api.call("POST", CRDS, shipped())
    assert code == 201
    found = Rehearsal(api)
    await api.until(200, "GET", found.path(OLD))
    yield found
    await api.call("DELETE", CRD)
    assert await api.until_gone(CRD, patient(30))


async def test_both_versions_read_and_write_one_job_and_the_old_one_can_go(rehearsal: Rehearsal) -> None:
    api = rehearsal.api
    assert (await api.call("POST", rehearsal.path(OLD), job("old", OLD)))[0] == 201
    before = await rehearsal.read(OLD, "old")
    code, answer = await rehearsal.update_definition(with_new_version)
    assert code == 200, answer
    await api.until(200, "GET", rehearsal.path(NEW))
    await _the_same_job(rehearsal, before)
    await _written_by_both(rehearsal)
    await _deprecated(rehearsal)
    await _stored_anew(rehearsal)
    await _the_old_version_goes(rehearsal)


async def _the_same_job(rehearsal: Rehearsal, before: dict[str, Any]) -> None:
    """The stored job is read by the new version without having been written, with its uid, version and defaults."""
    after = await rehearsal.read(NEW, "old")
    assert after["apiVersion"] == f"{REHEARSED}/{NEW}"
    assert {**after, "apiVersion": ""} == {**before, "apiVersion": ""} | {"metadata": after["metadata"]}
    for field in ("uid", "generation", "resourceVersion"):
        assert after["metadata"][field] == before["metadata"][field]


async def _written_by_both(rehearsal: Rehearsal) -> None:
    """Spec, status and scale, by patch and by server-side apply; the other version sees each write at once."""
    api = rehearsal.api
    for writer, reader, replicas in ((NEW, OLD, 4), (OLD, NEW, 2)):
        path = rehearsal.path(writer, "old")
        code, answer = await api.call("PATCH", path, {"spec": {"replicas": replicas}}, MERGE)
        assert code == 200, answer
        assert (await rehearsal.read(reader, "old"))["spec"]["replicas"] == replicas
        status = {"status": {"step": replicas, "observedGeneration": replicas}}
        assert (await api.call("PATCH", f"{path}/status", status, MERGE))[0] == 200
        assert (await rehearsal.read(reader, "old"))["status"]["step"] == replicas
        scale = {"spec": {"replicas": replicas + 4}}
        assert (await api.call("PATCH", f"{path}/scale", scale, MERGE))[0] == 200
        assert (await rehearsal.read(reader, "old", "scale"))["spec"]["replicas"] == replicas + 4
        applied = {**job("old", writer), "spec": {"priority": replicas}}
        code, answer = await api.call("PATCH", path, applied, APPLY, fieldManager="someone", force="true")
        assert code == 200, answer
        assert (await rehearsal.read(reader, "old"))["spec"]["priority"] == replicas
    assert (await rehearsal.read(NEW, "old"))["metadata"]["generation"] == 7, "as many as edits of the spec"
    broken = {"spec": {"replicas": -1}}
    for version in (OLD, NEW):
        assert (await api.call("PATCH", rehearsal.path(version, "old"), broken, MERGE))[0] == 422


async def _deprecated(rehearsal: Rehearsal) -> None:
    """Who uses the old version is warned with the name of the new one; both lists have the job."""
    (warning,) = await rehearsal.warnings(OLD, "old")
    assert WARNING in warning
    assert await rehearsal.warnings(NEW, "old") == []
    for version in (OLD, NEW):
        items = (await rehearsal.api.call("GET", rehearsal.path(version)))[1]["items"]
        assert [item["metadata"]["name"] for item in items] == ["old"]
        assert items[0]["apiVersion"] == f"{REHEARSED}/{version}"


async def _stored_anew(rehearsal: Rehearsal) -> None:
    """Each object is written once as it is; then nothing is stored in the old version, which the status says."""
    api = rehearsal.api
    assert sorted(await rehearsal.stored_versions()) == [OLD, NEW]
    code, answer = await rehearsal.update_definition(without_old_version)
    assert code == 422, "a version in which objects may be stored cannot be removed"
    assert "storedVersions" in str(answer)
    before = await rehearsal.read(NEW, "old")
    assert (await api.call("PUT", rehearsal.path(NEW, "old"), before))[0] == 200
    assert (await rehearsal.read(NEW, "old"))["metadata"]["generation"] == before["metadata"]["generation"]
    status = {"status": {"storedVersions": [NEW]}}
    assert (await api.call("PATCH", f"{CRD}/status", status, MERGE))[0] == 200
    assert await rehearsal.stored_versions() == [NEW]


def without_old_version(crd: dict[str, Any]) -> dict[str, Any]:
    crd["spec"]["versions"] = [version for version in crd["spec"]["versions"] if version["name"] == NEW]
    return crd


async def _the_old_version_goes(rehearsal: Rehearsal) -> None:
    code, answer = await rehearsal.update_definition(without_old_version)
    assert code == 200, answer
    await rehearsal.api.until(404, "GET", rehearsal.path(OLD))
    assert (await rehearsal.read(NEW, "old"))["spec"]["replicas"] == 6
