"""The operator under exactly the rights that its role gives, in the whole cluster and in one namespace."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from meshwright_operator.manifests.network_policy import NetworkPolicyOptions
from meshwright_operator.manifests.owned_objects import owner_reference
from meshwright_operator.settings import Address
from tests.operator import role_rules
from tests.operator.agents import Kubelet
from tests.operator.proxy import Proxy
from tests.operator.support import JOBS, PODS, Api, OperatorThread, condition, job, until, write_kubeconfig

SECRETS = "/api/v1/namespaces/default/secrets"
CREDENTIALS = f"{SECRETS}/{role_rules.ACCOUNT}-credentials"
CLAIMS = "/api/v1/namespaces/default/persistentvolumeclaims"
UPDATE_CREDENTIALS = ("", "secrets", "update")
DEVICES = ("resource.k8s.io", "resource.nvidia.com")
"""Groups that the embedded server does not have. `test_claims.py` says the same of these rights on a real one."""
FINALIZERS = ("meshwright.dev", "paralleltrainingjobs/finalizers", "update")
"""Not for a request: an admission plugin asks for it where an ownerReference has `blockOwnerDeletion`."""


@pytest_asyncio.fixture
async def proxy(api: Api, session: aiohttp.ClientSession) -> AsyncIterator[Proxy]:
    async with Proxy(api.url, session).serving() as proxy:
        yield proxy


async def runs(api: Api, generation: int) -> dict[str, Any]:
    async def running() -> dict[str, Any] | None:
        status = await api.status("rights")
        mesh = status.get("mesh") or {}
        there = mesh.get("generation") == generation and condition(status, "Ready").get("reason") == "Running"
        return status if there else None

    found: dict[str, Any] = await until(running, f"generation {generation} runs", 60)
    return found


async def suspend_and_resume(api: Api, generation: int) -> None:
    async def suspended() -> bool:
        return condition(await api.status("rights"), "Suspended").get("status") == "True"

    await api.patch(f"{JOBS}/rights", {"spec": {"suspend": True}})
    await until(suspended, "it is suspended", 60)
    await api.patch(f"{JOBS}/rights", {"spec": {"suspend": False}})
    await runs(api, generation)


async def live(api: Api, kubelet: Kubelet, proxy: Proxy, claim_name: str) -> None:
    """A job's life with everything that makes the operator use a right. The claim does not exist yet."""
    await api.create(JOBS, job("rights", ttlSecondsAfterFinished=0, checkpoint={"claimName": claim_name}))

    async def waits_for_claim() -> bool:
        return condition(await api.status("rights"), "Ready").get("reason") == "ClaimNotFound"

    await until(waits_for_claim, "the claim is missing", 60)
    kubelet.mount_error = 'MountVolume.SetUp failed for volume "checkpoints"'
    resources = {"requests": {"storage": "1Gi"}}
    claim = {"metadata": {"name": claim_name}, "spec": {"accessModes": ["ReadWriteMany"], "resources": resources}}
    await api.create(CLAIMS, claim)

    async def waits_for_volume() -> bool:
        return condition(await api.status("rights"), "Ready").get("reason") == "FailedMount"

    await until(waits_for_volume, "the events of a pod are read", 60)
    kubelet.mount_error = ""
    await runs(api, 1)
    assert all(agent.base.startswith("https://") for agent in kubelet.of("rights"))
    await api.delete(f"{PODS}/rights-w1-0")
    await runs(api, 2)
    proxy.refuse_once = "/rights/status"  # the job is read again
    await suspend_and_resume(api, 3)
    await suspend_and_resume(api, 4)  # the event of the first time is counted once more

    async def counted() -> bool:
        return any(event.get("count", 1) > 1 for event in await api.events("rights"))

    await until(counted, "an event is counted", 60)
    for agent in kubelet.of("rights"):
        await agent.finish()

    async def deleted() -> bool:
        return "spec" not in await api.call("GET", f"{JOBS}/rights", ok=False)

    await until(deleted, "it completes and is deleted", 60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("namespaces", "optional"),
    [((), ()), pytest.param(("default",), ("networkPolicyRules",), marks=pytest.mark.long)],
    ids=["cluster-wide", "one namespace, with NetworkPolicies"],
)
async def test_the_role_is_exactly_what_the_operator_uses_and_allows_no_secret_to_be_read_but_its_own(
    api: Api,
    kubelet: Kubelet,
    proxy: Proxy,
    session: aiohttp.ClientSession,
    tmp_path: Path,
    coordinator_port: int,
    metrics_port: int,
    namespaces: tuple[str, ...],
    optional: tuple[str, ...],
) -> None:
    for path, body in role_rules.objects(namespaces, optional=optional):
        await api.call("POST", path, body, ok=False)
    path, body = role_rules.token_request()
    token = (await api.create(path, body))["status"]["token"]
    if namespaces:  # Then the operator completes an empty Secret, else it creates one.
        await api.create(SECRETS, {"metadata": {"name": f"{role_rules.ACCOUNT}-credentials"}})
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", proxy.url, token)
    operator = OperatorThread(
        kubeconfig,
        tmp_path,
        coordinator_port,
        namespaces=namespaces,
        metrics_listen=Address("127.0.0.1", metrics_port),
        tls="managed",
        key_file=None,
        job_network_policies=NetworkPolicyOptions() if optional else None,
    )
    await operator.start()
    try:
        await live(api, kubelet, proxy, "one-namespace" if namespaces else "cluster-wide")
        async with session.get(f"http://127.0.0.1:{metrics_port}/metrics") as response:
            refused = [line for line in (await response.text()).splitlines() if '_total{code="403"' in line]
        assert refused == []
    finally:
        await operator.stop()
    used = {right for request in proxy.requests if (right := request.right) is not None}
    unused = {FINALIZERS} if namespaces else {FINALIZERS, UPDATE_CREDENTIALS}
    given = role_rules.rights(optional)
    used, given = ({right for right in rights if right[0] not in DEVICES} for rights in (used, given))
    assert used == given - unused
    assert owner_reference("rights", "uid")["blockOwnerDeletion"] is True
    own = Api(api.url, token, session)
    assert "coordinator.key" in (await own.get(CREDENTIALS))["data"]
    await no_secret_can_be_read_or_changed(api, own)


async def no_secret_can_be_read_or_changed(api: Api, operator: Api) -> None:
    """Neither one of a user nor one that the operator created."""
    theirs = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "theirs"}, "stringData": {"key": "value"}}
    await api.create(SECRETS, theirs)
    await operator.create(SECRETS, {**theirs, "metadata": {"name": "made"}})
    for name in ("theirs", "made"):
        path = f"{SECRETS}/{name}"
        for method, kind in (
            ("GET", "application/json"),
            ("PUT", "application/json"),
            ("PATCH", "application/merge-patch+json"),
            ("PATCH", "application/apply-patch+yaml"),
            ("DELETE", "application/json"),
        ):
            query = "?fieldManager=x&force=true" if "apply" in kind else ""
            sent = {**theirs, "metadata": {"name": name}}
            answer = await operator.call(method, path + query, sent, kind=kind, ok=False)
            assert answer.get("reason") == "Forbidden", (method, kind, answer)
    for path in (SECRETS, f"{SECRETS}?watch=true", "/api/v1/secrets"):
        assert (await operator.call("GET", path, ok=False))["reason"] == "Forbidden", path
    again = await operator.call("POST", SECRETS, theirs, ok=False)
    assert again["reason"] == "AlreadyExists"
    assert "value" not in str(again), "the answer to a second create does not contain the object"
    for name in ("theirs", "made"):
        await api.delete(f"{SECRETS}/{name}")
