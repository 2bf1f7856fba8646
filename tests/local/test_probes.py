"""Probes: what counts, what events say, and what a failure does to the container."""

import asyncio
import socket

import aiohttp
import pytest

from meshwright_local.kube.resources import EVENTS, PODS
from meshwright_local.nodeagent.runtime import grpc_health
from meshwright_local.nodeagent.runtime.handlers import HandlerError, Target
from meshwright_local.nodeagent.runtime.probes import probe_results
from meshwright_local.nodeagent.runtime.process import StartError

pytestmark = pytest.mark.asyncio(loop_scope="module")


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def first_reports(probe, count=1, run=None, container=None):
    """What is reported until a result counts, or something was reported several times."""
    reports = []
    async with aiohttp.ClientSession() as session:
        target = Target("127.0.0.1", {"name": "main", **(container or {})}, run, session)

        def report(text):
            reports.append(text)
            if len(reports) == count:
                enough.set()

        enough = asyncio.Event()
        results = probe_results({"periodSeconds": 0.02, "failureThreshold": count, **probe}, target, report)

        async def follow():
            async for _ in results:
                pass

        following = asyncio.create_task(follow())
        await enough.wait()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    return reports[:count]


def output(code, text):
    async def run(_):
        return code, text

    return run


async def test_every_failure_is_reported_and_the_threshold_counts():
    reports = await first_reports({"exec": {"command": ["x"]}}, 3, output(1, "not yet\n"))
    assert reports == ["probe failed: not yet\n"] * 3


async def test_a_probe_that_cannot_be_executed_does_not_count():
    async def run(_):
        raise StartError("x: No such file or directory")

    reports = await first_reports({"exec": {"command": ["x"]}, "failureThreshold": 1}, 3, run)
    assert reports == ["probe errored and resulted in unknown state: x: No such file or directory"] * 3
    (report,) = await first_reports({"httpGet": {"port": "web"}})
    assert report == "probe errored and resulted in unknown state: couldn't find port: web in container main"


async def test_values_of_the_spec_are_replaced_in_a_command():
    words = []

    async def run(command):
        words.extend(command)
        return 1, ""

    env = [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {}}}]
    await first_reports({"exec": {"command": ["echo", "$(A)", "$(C)"]}}, 1, run, {"env": env})
    assert words[:3] == ["echo", "1", "$(C)"]


async def test_texts_are_those_of_a_kubelet():
    port = closed_port()
    refused = f"dial tcp 127.0.0.1:{port}: connect: connection refused"
    assert await first_reports({"tcpSocket": {"port": port}}) == [f"probe failed: {refused}"]
    http = {"httpGet": {"port": port, "path": "/healthz"}}
    assert await first_reports(http) == [f'probe failed: Get "http://127.0.0.1:{port}/healthz": {refused}']
    health = f'error: failed to connect service at "127.0.0.1:{port}": {refused}'
    assert await first_reports({"grpc": {"port": port}}) == [f"probe failed: {health}"]

    async def never(reader, _):
        await reader.read()

    async def slow(_):
        await asyncio.sleep(600)

    async with await asyncio.start_server(never, "127.0.0.1", 0) as server:
        port, short = server.sockets[0].getsockname()[1], {"timeoutSeconds": 0.05}
        (report,) = await first_reports({"httpGet": {"port": port}, **short})
        why = "context deadline exceeded (Client.Timeout exceeded while awaiting headers)"
        assert report == f'probe failed: Get "http://127.0.0.1:{port}/": {why}'
        (report,) = await first_reports({"grpc": {"port": port}, **short})
        assert report == "probe failed: timeout: health rpc did not complete within 0.05s"
    (report,) = await first_reports({"exec": {"command": ["a", "b"]}, **short}, 1, slow)
    assert report == 'probe failed: command timed out: "a b" timed out after 0.05s'


async def test_redirects_are_followed_only_to_the_same_host():
    paths = []

    async def answer(reader, writer):
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        paths.append(path)
        where = {"/": "/next", "/away": "http://example.com/"}.get(path)
        head = f"302 Found\r\nLocation: {where}" if where else "503 No"
        writer.write(f"HTTP/1.1 {head}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        (report,) = await first_reports({"httpGet": {"port": port, "path": "/"}})
        assert report == "probe failed: HTTP probe failed with statuscode: 503"
        async with aiohttp.ClientSession() as session:
            target = Target("127.0.0.1", {"name": "main"}, output(0, ""), session)
            async for why in probe_results({"httpGet": {"port": port, "path": "/away"}}, target, paths.append):
                assert why == ""
                break
    assert paths == ["/", "/next", "/away"]


HEALTH = {"": b"\x08\x01", "down": b"\x08\x02"}


def health_server():
    """A server of `grpc.health.v1.Health` of the real library."""
    grpc = pytest.importorskip("grpc")
    pytest.importorskip("grpc.aio")

    async def check(request, context):
        name = request[2:].decode()
        if name not in HEALTH:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return HEALTH[name]

    method = grpc.unary_unary_rpc_method_handler(check)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": method})])
    return server, server.add_insecure_port("127.0.0.1:0")


async def test_grpc_health():
    server, port = health_server()
    await server.start()
    try:
        assert await grpc_health.check("127.0.0.1", port, "") == ""
        why = await grpc_health.check("127.0.0.1", port, "down")
        assert why == 'service unhealthy (responded with "NOT_SERVING")'
        assert "without a message" in await grpc_health.check("127.0.0.1", port, "x" * 300)
    finally:
        await server.stop(None)


async def test_a_named_port_without_a_number():
    async with aiohttp.ClientSession() as session:
        with pytest.raises(HandlerError, match="couldn't find port: web"):
            Target("127.0.0.1", {"name": "main", "ports": []}, output(0, ""), session).port("web")


async def told(kit, name, *expected):
    async def look():
        listed = await kit.client.list(EVENTS, kit.namespace, field_selector=f"involvedObject.name={name}")
        return set(expected) <= {(item["type"], item["reason"], item["message"]) for item in listed.items}

    await kit.until(look, what=f"events {expected}")


async def test_a_failed_startup_probe_restarts_within_its_own_grace_period(kit):
    probe = {"exec": {"command": ["sh", "-c", "echo too early; exit 1"]}, "periodSeconds": 1, "failureThreshold": 2}
    stubborn = "trap 'echo no' TERM; while :; do sleep 0.05; done"
    await kit.pod(
        "starting",
        stubborn,
        startupProbe={**probe, "terminationGracePeriodSeconds": 1},
        spec={"restartPolicy": "Always", "terminationGracePeriodSeconds": 6000},
    )
    pod = await kit.pod_when("starting", lambda pod: _status(pod).get("restartCount"), 20)
    assert _status(pod)["lastState"]["terminated"]["exitCode"] == 137
    await told(
        kit,
        "starting",
        ("Warning", "Unhealthy", "Startup probe failed: too early\n"),
        ("Normal", "Killing", "Container main failed startup probe, will be restarted"),
    )
    await kit.delete("starting", grace_seconds=0)


async def test_a_pod_that_ends_is_not_killed_by_its_liveness_probe(kit):
    """The hook takes longer than the probe would allow, and the probe fails from the moment of the deletion."""
    probe = {"exec": {"command": ["test", "!", "-e", "/shared/ending"]}, "periodSeconds": 1, "failureThreshold": 1}
    hook = {"exec": {"command": ["sh", "-c", "touch $0; sleep 2.5", "/shared/ending"]}}
    await kit.pod(
        "leaving",
        "trap 'exit 3' TERM; while :; do sleep 0.05; done",
        livenessProbe={**probe, "terminationGracePeriodSeconds": 1},
        lifecycle={"preStop": hook},
        volumeMounts=[{"name": "shared", "mountPath": "/shared"}],
        spec={"volumes": [{"name": "shared", "emptyDir": {}}]},
        meta={"finalizers": ["example.com/look"]},
    )
    await kit.running("leaving")
    await kit.delete("leaving")
    pod = await kit.ended("leaving")
    assert _status(pod)["state"]["terminated"]["exitCode"] == 3
    assert "Unhealthy" not in await kit.events_of("leaving")
    await kit.client.patch(PODS, "leaving", {"metadata": {"finalizers": None}}, kit.namespace)


async def test_readiness_gates(kit):
    gate = {"conditionType": "example.com/switched-on"}
    await kit.pod("gated", "sleep 600", spec={"readinessGates": [gate]})

    def ready(pod):
        return {item["type"]: item for item in pod["status"].get("conditions") or ()}.get("Ready", {})

    pod = await kit.pod_when("gated", lambda pod: ready(pod).get("reason") == "ReadinessGatesNotReady")
    text = 'corresponding condition of pod readiness gate "example.com/switched-on" does not exist.'
    assert ready(pod)["message"] == text
    body = {"status": {"conditions": [{"type": "example.com/switched-on", "status": "True"}]}}
    kind = "application/strategic-merge-patch+json"
    await kit.client.patch(PODS, "gated", body, kit.namespace, subresource="status", content_type=kind)
    pod = await kit.pod_when("gated", lambda pod: ready(pod).get("status") == "True")
    assert "reason" not in ready(pod)
    await kit.delete("gated", grace_seconds=0)


def _status(pod):
    return (pod["status"].get("containerStatuses") or [{}])[0]
