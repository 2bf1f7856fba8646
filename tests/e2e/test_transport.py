"""Jobs train over TLS, and go on with the same processes when the coordinator's CA is replaced."""

from __future__ import annotations

import base64

import aiohttp
import pytest

from meshwright.api import labels
from meshwright.protocol.trust import bundle_id
from meshwright_local.kube.resources import SECRETS
from tests.e2e.local_stack import NAMESPACE, Stage, endless

SECRET = "meshwright-operator-credentials"  # noqa: S105 - the name of a Secret


async def authorities(stage: Stage) -> str:
    """The CA bundle in the operator's Secret."""
    secret = await stage.client.get(SECRETS, SECRET, NAMESPACE)
    return base64.b64decode(secret["data"]["ca.crt"]).decode()


@pytest.mark.long
async def test_a_job_trains_over_tls_and_a_new_ca_restarts_nothing(stage: Stage) -> None:
    """The hardest rotation: the old CA is gone at once, and agents know of the new one only by the token.

    By default, jobs of all other tests here train over TLS, and `tests/agent/test_coordinator_tls.py` replaces the CA.
    """
    await stage.apply(endless("sealed", replicas=1))
    await stage.trained("sealed", 5)
    pods = {pod["metadata"]["uid"] for pod in await stage.pods("sealed")}
    environment = {entry["name"]: entry.get("value") for entry in pod_environment(await stage.pod("sealed", 0))}
    before = await authorities(stage)
    assert str(environment[labels.ENV_COORDINATOR_URL]).startswith("https://")
    assert bundle_id(str(environment[labels.ENV_COORDINATOR_CA])) == bundle_id(before)
    with pytest.raises(aiohttp.ClientError):
        async with aiohttp.ClientSession() as session:
            await session.get(f"http://127.0.0.1:{stage.ports.coordinator}/")

    await stage.kill_operator()
    gone = {"data": {"ca.crt": None, "ca.key": None}}
    await stage.client.patch(SECRETS, SECRET, gone, NAMESPACE)
    await stage.start_operator()
    assert await authorities(stage) != before
    step = await stage.trained("sealed", 6)
    status = await stage.until("sealed", lambda s: (s.step or 0) >= step, f"step {step} in the status")
    assert not status.restarts
    assert status.mesh is not None
    assert status.mesh.generation == 1
    assert {pod["metadata"]["uid"] for pod in await stage.pods("sealed")} == pods
    assert "the coordinator has a new CA bundle" in await stage.log((await stage.pod("sealed", 0))["metadata"]["name"])
    await stage.delete("sealed")


def pod_environment(pod: dict[str, object]) -> list[dict[str, str]]:
    """The variables of the worker's container."""
    spec = pod["spec"]
    assert isinstance(spec, dict)
    found: list[dict[str, str]] = spec["containers"][0]["env"]
    return found
