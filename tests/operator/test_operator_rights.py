"""The operator under exactly the rights that its role gives, in the whole cluster and in one namespace."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from meshwright_operator.settings import Address
from tests.operator import role_rules
from tests.operator.agents import Kubelet
from tests.operator.support import JOBS, PODS, Api, OperatorThread, condition, job, until, write_kubeconfig

SECRETS = "/api/v1/namespaces/default/secrets"


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
    for path, body in role_rules.objects(namespaces):
        await api.call("POST", path, body, ok=False)
    path, body = role_rules.token_request()
    token = (await api.create(path, body))["status"]["token"]
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", api.url, token)
    if namespaces:  # Then the operator completes an empty Secret, else it creates one.
        await api.create(SECRETS, {"metadata": {"name": f"{role_rules.ACCOUNT}-credentials"}})
    operator = OperatorThread(
        kubeconfig,
        tmp_path,
        coordinator_port,
        namespaces=namespaces,
        metrics_listen=Address("127.0.0.1", free_port),
        tls="managed",
        key_file=None,
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
        assert all(agent.base.startswith("https://") for agent in kubelet.of("rights"))
        for agent in kubelet.of("rights"):
            await agent.finish()

        async def deleted() -> bool:
            return "spec" not in await api.call("GET", f"{JOBS}/rights", ok=False)

        await until(deleted, "it completes and is deleted")
        async with session.get(f"http://127.0.0.1:{free_port}/metrics") as response:
            refused = [line for line in (await response.text()).splitlines() if '_total{code="403"' in line]
        assert refused == []
    finally:
        await operator.stop()
    secret = Api(api.url, token, session)
    assert "coordinator.key" in (await secret.get(f"{SECRETS}/{role_rules.ACCOUNT}-credentials"))["data"]
    await api.create(SECRETS, {"metadata": {"name": "somebody-elses"}})
    for path in ("/somebody-elses", "/rights-coordinator", ""):
        answer = await secret.call("GET", SECRETS + path, ok=False)
        assert answer["reason"] == "Forbidden"
