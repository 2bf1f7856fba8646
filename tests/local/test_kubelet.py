"""Logs and exec: through the API server as kubectl does, and who may call a node directly."""

import asyncio
import os

import aiohttp
import orjson
import pytest

from meshwright_local.kube.client import ApiError
from meshwright_local.kube.resources import NODES, PODS
from tests.patience import patient

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def log(kit, name, **params):
    """The whole answer of a log request."""
    query = {key: str(value) for key, value in params.items()}
    return [line.decode() async for line in kit.client.lines(PODS.path("default", name, "log"), query)]


async def execute(kit, name, *command, stdin=None, **params):
    """Run a command as kubectl does; returns stdout, stderr and the final status."""
    query = [("command", word) for word in command]
    query += [(key, str(value).lower()) for key, value in {"stdout": True, "stderr": True, **params}.items()]
    if stdin is not None:
        query.append(("stdin", "true"))
    output = {1: b"", 2: b"", 3: b""}
    url = kit.cluster.url + PODS.path("default", name, "exec")
    protocols, anything = ["v5.channel.k8s.io"], {"Accept": "*/*"}
    async with kit.client.session.ws_connect(url, params=query, protocols=protocols, headers=anything) as socket:
        if stdin is not None:
            await socket.send_bytes(b"\0" + stdin)
            await socket.send_bytes(b"\xff\0")
        async for message in socket:
            output[message.data[0]] += message.data[1:]
    return output[1].decode(), output[2].decode(), orjson.loads(output[3] or b"{}")


WAIT = "until [ -e go ]; do sleep 0.05; done"
"""Waits until the test creates a file in the pod's home."""


def home_of(kit, pod):
    return kit.cluster.directory / "nodes" / pod["spec"]["nodeName"] / "pods" / pod["metadata"]["uid"] / "home"


async def test_logs_while_running_and_afterwards(kit):
    await kit.pod("talks", f"echo one; echo two >&2; {WAIT}; echo three")
    pod = await kit.running("talks")
    followed = asyncio.create_task(log(kit, "talks", follow="true"))
    (home_of(kit, pod) / "go").touch()
    await kit.ended("talks")
    assert await followed == ["one", "two", "three"]
    assert await log(kit, "talks") == ["one", "two", "three"]
    assert await log(kit, "talks", tailLines=2) == ["two", "three"]
    assert await log(kit, "talks", tailLines=0) == []
    assert await log(kit, "talks", limitBytes=5) == ["one", "t"]
    stamped = await log(kit, "talks", timestamps="true", tailLines=1)
    assert stamped[0].endswith("Z three")
    assert stamped[0].startswith("20")
    assert await log(kit, "talks", sinceTime="2100-01-01T00:00:00Z") == []


async def test_following_shows_lines_as_they_come(kit):
    await kit.pod("slow-talk", f"echo first; {WAIT}; echo second")
    pod = await kit.running("slow-talk")
    lines = []
    async for line in kit.client.lines(PODS.path("default", "slow-talk", "log"), {"follow": "true"}):
        lines.append(line)
        (home_of(kit, pod) / "go").touch()
    assert lines == [b"first", b"second"]


async def test_a_line_longer_than_any_buffer(kit):
    await kit.pod("long", "python", "-c", "print('x' * 300000); print('end')")
    await kit.ended("long")
    lines = await log(kit, "long")
    assert [len(line) for line in lines] == [300000, 3]


async def test_previous_log(kit):
    script = 'n=$(cat "$F" 2>/dev/null || echo 0); echo $((n+1)) > "$F"; echo run $n; [ $n -ge 1 ]'
    await kit.pod(
        "twice",
        script,
        env=[{"name": "F", "value": "/keep/count"}],
        volumeMounts=[{"name": "keep", "mountPath": "/keep"}],
        spec={"restartPolicy": "OnFailure", "volumes": [{"name": "keep", "emptyDir": {}}]},
    )
    await kit.ended("twice")
    assert await log(kit, "twice") == ["run 1"]
    assert await log(kit, "twice", previous="true") == ["run 0"]
    await kit.pod("once", "true")
    await kit.ended("once")
    with pytest.raises(ApiError, match="previous terminated container"):
        await log(kit, "once", previous="true")


async def test_bad_log_request(kit):
    await kit.pod("plain", "echo x")
    await kit.ended("plain")
    with pytest.raises(ApiError) as caught:
        await log(kit, "plain", tailLines=-3)
    assert caught.value.status in (400, 422)


async def test_exec(kit):
    await kit.pod(
        "host",
        "sleep 60",
        env=[{"name": "WHO", "value": "me"}],
        volumeMounts=[{"name": "v", "mountPath": "/v"}],
        spec={"volumes": [{"name": "v", "emptyDir": {}}]},
    )
    await kit.running("host")
    out, err, status = await execute(kit, "host", "sh", "-c", "echo $WHO; echo oops >&2; exit 3")
    assert (out, err) == ("me\n", "oops\n")
    assert status["status"] == "Failure"
    assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "3"}]
    out, _, status = await execute(kit, "host", "cat", stdin=b"typed")
    assert (out, status["status"]) == ("typed", "Success")
    await execute(kit, "host", "touch", "/v/made")
    out, _, _ = await execute(kit, "host", "ls", "/v")
    assert out == "made\n"
    out, _, _ = await execute(kit, "host", "sh", "-c", "test -t 0 && tty", stdin=b"", tty=True, stderr=False)
    assert out.startswith("/dev/pts/")


async def test_exec_dies_with_the_connection_and_with_the_container(kit):
    await kit.pod("frail", "sleep 60")
    pod = await kit.running("frail")
    marks = home_of(kit, pod)
    running = asyncio.create_task(execute(kit, "frail", "sh", "-c", "echo $$$$ > pid; exec sleep 600"))

    async def pid():
        path = marks / "pid"
        return int(path.read_text() or 0) if path.exists() else 0

    number = await kit.until(pid)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    async def dead():
        return str(number) not in os.listdir("/proc")

    await kit.until(dead, 3, "the command is killed with its connection")
    other = asyncio.create_task(execute(kit, "frail", "sleep", "60"))
    await asyncio.sleep(0.3)
    await kit.delete("frail", grace_seconds=0)
    await asyncio.wait_for(asyncio.gather(other, return_exceptions=True), patient(5))


async def test_unauthenticated_clients_are_rejected(kit):
    node = await kit.client.get(NODES, "rack0-node0")
    port = node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]
    url = f"https://127.0.0.1:{port}/containerLogs/default/x/main"
    async with aiohttp.ClientSession() as session:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {kit.cluster.token}"}):
            async with session.get(url, headers=headers, ssl=False) as response:
                assert response.status == 401
