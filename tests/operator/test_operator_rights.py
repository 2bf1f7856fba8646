"""The operator under exactly the rights that its role gives, in the whole cluster and in one namespace."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from meshwright.local.apiserver.identity import AUTHENTICATED, User
from meshwright.local.apiserver.server import ApiServer
from meshwright_operator.settings import Address
from tests.operator.support import (
    JOBS,
    PODS,
    Api,
    Kubelet,
    OperatorThread,
    condition,
    install,
    job,
    until,
    write_kubeconfig,
)

RBAC = "/apis/rbac.authorization.k8s.io/v1"
TOKEN = "the-operators-own-token"  # noqa: S105 - made up, for a server that lives for one test

pytestmark = pytest.mark.skipif(
    "MESHWRIGHT_TEST_SERVER" in os.environ, reason="the user of this token exists on the embedded server alone"
)

JOB_RULES = [
    {
        "apiGroups": ["meshwright.dev"],
        "resources": ["paralleltrainingjobs"],
        "verbs": ["get", "list", "watch", "delete"],
    },
    {"apiGroups": ["meshwright.dev"], "resources": ["paralleltrainingjobs/status"], "verbs": ["patch"]},
    {"apiGroups": ["meshwright.dev"], "resources": ["paralleltrainingjobs/finalizers"], "verbs": ["update"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "create", "patch", "delete"]},
    {"apiGroups": [""], "resources": ["services", "secrets"], "verbs": ["create", "patch"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]},
]
NODE_RULES = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]}]
LEASE_RULES = [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]}]


async def grant(api: Api, rules: list[dict[str, Any]], namespace: str | None) -> None:
    """A role with these rules, bound to the operator."""
    where, prefix = (f"/namespaces/{namespace}", "") if namespace else ("", "Cluster")
    name = f"operator-{len(await api.items(f'{RBAC}{where}/{prefix.lower()}roles'))}"
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": f"{prefix}Role", "metadata": {"name": name}}
    await api.create(f"{RBAC}{where}/{prefix.lower()}roles", {**role, "rules": rules})
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": f"{prefix}RoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": f"{prefix}Role", "name": name},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "operator"}],
    }
    await api.create(f"{RBAC}{where}/{prefix.lower()}rolebindings", binding)


@pytest_asyncio.fixture
async def api(session: aiohttp.ClientSession) -> AsyncIterator[Api]:
    server = ApiServer(None, users={TOKEN: User("operator", (AUTHENTICATED,))})
    await server.start()
    api = Api(server.url, server.token, session)
    await install(api)
    yield api
    await server.stop()


@pytest.mark.parametrize("namespaces", [(), ("default",)], ids=["cluster-wide", "one namespace"])
async def test_the_role_is_enough_and_allows_no_secret_to_be_read(
    api: Api,
    kubelet: Kubelet,
    session: aiohttp.ClientSession,
    tmp_path: Path,
    coordinator_port: int,
    free_port: int,
    namespaces: tuple[str, ...],
) -> None:
    await grant(api, NODE_RULES, None)
    await grant(api, LEASE_RULES, "default")
    await grant(api, JOB_RULES, "default" if namespaces else None)
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", api.url, TOKEN)
    operator = OperatorThread(
        kubeconfig, tmp_path, coordinator_port, namespaces=namespaces, metrics_listen=Address("127.0.0.1", free_port)
    )
    await operator.start()
    try:
        await api.create(JOBS, job("rights", ttlSecondsAfterFinished=0))

        async def running() -> bool:
            return condition(await api.status("rights"), "Ready").get("reason") == "Running"

        await until(running, "it runs", 20)
        await api.delete(f"{PODS}/rights-w1-0")

        async def recovered() -> bool:
            status = await api.status("rights")
            return status["mesh"]["generation"] == 2 and condition(status, "Ready")["reason"] == "Running"

        await until(recovered, "it recovers", 20)
        for agent in kubelet.of("rights"):
            await agent.finish()

        async def deleted() -> bool:
            return "spec" not in await api.call("GET", f"{JOBS}/rights", ok=False)

        await until(deleted, "it completes and is deleted")
        async with session.get(f"http://127.0.0.1:{free_port}/metrics") as response:
            refused = [line for line in (await response.text()).splitlines() if '_total{code="403"' in line]
        listing = 'ptj_api_requests_total{code="403",resource="pods",verb="GET"}'
        assert all(namespaces and line.startswith(listing) for line in refused), refused
    finally:
        await operator.stop()
    secret = Api(api.url, TOKEN, session)
    answer = await secret.call("GET", "/api/v1/namespaces/default/secrets/rights-coordinator", ok=False)
    assert answer["reason"] == "Forbidden"
