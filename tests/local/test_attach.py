"""`kubectl attach` and `kubectl debug`: streams of running containers, and containers that are added to a pod."""

import asyncio
import contextlib

import pytest
from aiohttp import ClientSession, WSMsgType

from meshwright_local.kube.resources import PODS
from meshwright_local.nodeagent.server import remote_exec
from tests.patience import patient

pytestmark = pytest.mark.asyncio(loop_scope="module")

STRATEGIC = "application/strategic-merge-patch+json"


@contextlib.asynccontextmanager
async def attached(kit, pod, container="main", **options):
    """A WebSocket to a container's streams, through the API server."""
    there = kit.client.connection
    query = {"container": container, **dict.fromkeys(("stdout", "stderr"), "true"), **options}
    path = f"{there.url}/api/v1/namespaces/{kit.namespace}/pods/{pod}/attach"
    headers = {"Authorization": f"Bearer {there.token}"}
    async with (
        ClientSession() as session,
        session.ws_connect(
            path, params=query, headers=headers, ssl=there.ssl_context(), protocols=("v5.channel.k8s.io",)
        ) as socket,
    ):
        yield socket


async def read_until(socket, text):
    """What comes from stdout until a text is in it."""
    seen = b""
    async with asyncio.timeout(patient(10)):
        async for message in socket:
            assert message.type is WSMsgType.BINARY
            if message.data[:1] == remote_exec.STDOUT:
                seen += message.data[1:]
            if text in seen:
                return seen
    raise AssertionError(f"only {seen!r}")


async def test_attach_follows_the_output(kit):
    await kit.pod("talks", "while :; do echo tick; sleep 0.1; done")
    await kit.running("talks")
    async with attached(kit, "talks") as socket:
        assert (await read_until(socket, b"tick\ntick\n")).startswith(b"tick")
    await kit.delete("talks", grace_seconds=0)


async def test_attach_writes_to_stdin_and_the_log_has_the_output(kit):
    await kit.pod("asks", 'read name; echo "hello $name"; cat >/dev/null', stdin=True)
    await kit.running("asks")
    async with attached(kit, "asks", stdin="true") as socket:
        await socket.send_bytes(remote_exec.STDIN + b"you\n")
        await read_until(socket, b"hello you\n")
        await socket.send_bytes(remote_exec.CLOSE + remote_exec.STDIN)
        async with asyncio.timeout(patient(10)):
            messages = [message.data async for message in socket]
    assert messages[-1].startswith(remote_exec.ERROR)
    assert b"Success" in messages[-1]
    pod = await kit.ended("asks")
    assert pod["status"]["phase"] == "Succeeded"
    assert kit.log_of(pod) == "hello you\n"


async def test_a_terminal(kit):
    await kit.pod(
        "screen", 'stty size; [ -t 0 ] && printf "prompt> "; read line; echo "got $line"', stdin=True, tty=True
    )
    await kit.running("screen")
    async with attached(kit, "screen", stdin="true", tty="true") as socket:
        await socket.send_bytes(remote_exec.RESIZE + b'{"Width": 100, "Height": 30}')
        await socket.send_bytes(remote_exec.STDIN + b"x\n")
        await read_until(socket, b"got x\r\n")
    pod = await kit.ended("screen")
    assert "prompt> " in kit.log_of(pod)


async def test_attach_to_a_container_that_has_ended(kit):
    await kit.pod("gone", "true")
    await kit.ended("gone")
    with pytest.raises(Exception, match="500|not running"):
        async with attached(kit, "gone"):
            pass


def statuses(pod):
    return {item["name"]: item for item in pod["status"].get("ephemeralContainerStatuses") or ()}


async def add(kit, pod, **container):
    body = {"spec": {"ephemeralContainers": [{"image": "none", **container}]}}
    return await kit.client.patch(
        PODS, pod, body, kit.namespace, subresource="ephemeralcontainers", content_type=STRATEGIC
    )


async def test_ephemeral_containers_run_beside_the_others(kit):
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    await kit.pod(
        "debugged",
        "while [ ! -e $DIR/stop ]; do sleep 0.05; done",
        env=[{"name": "DIR", "value": "/shared"}],
        volumeMounts=mounts,
        spec={"volumes": [{"name": "shared", "emptyDir": {}}]},
    )
    await kit.running("debugged")
    await add(kit, "debugged", name="one", command=["sh", "-c", "echo looking; exit 3"])
    pod = await kit.pod_when("debugged", lambda pod: "terminated" in statuses(pod).get("one", {}).get("state", {}))
    assert statuses(pod)["one"]["state"]["terminated"]["exitCode"] == 3
    assert statuses(pod)["one"]["restartCount"] == 0
    assert pod["status"]["phase"] == "Running"
    assert kit.log_of(pod, "one") == "looking\n"
    command = ["sh", "-c", 'touch "$1"; sleep 600', "sh", "/shared/stop"]
    await add(kit, "debugged", name="two", command=command, volumeMounts=mounts)
    # It ends with the others, and its exit code does not count.
    pod = await kit.ended("debugged")
    assert pod["status"]["phase"] == "Succeeded"
    assert statuses(pod).keys() == {"one", "two"}
