"""Logs and exec reach the node agent that the node object names, with the server's token and over trusted TLS."""

import asyncio
import ssl

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from meshwright_local.apiserver.auth import certificates
from meshwright_local.apiserver.rest.server import ApiServer

PODS = "/api/v1/namespaces/default/pods"


class Agent:
    """A node agent that answers with what it was asked."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.release = asyncio.Event()

    def check(self, request):
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            raise web.HTTPUnauthorized(text="who are you")

    async def logs(self, request):
        self.check(request)
        if request.match_info["container"] == "waiting":
            raise web.HTTPBadRequest(text='container "waiting" in pod "p" is waiting to start: ContainerCreating')
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(f"first {request.query_string}\n".encode())
        if request.query.get("follow"):
            await self.release.wait()
            await response.write(b"second\n")
        return response

    async def exec(self, request):
        self.check(request)
        socket = web.WebSocketResponse(protocols=["v5.channel.k8s.io"])
        await socket.prepare(request)
        await socket.send_bytes(b"\x01" + " ".join(request.query.getall("command")).encode())
        message = await socket.receive()
        await socket.send_bytes(b"\x01echo " + message.data[1:])
        await socket.send_bytes(b'\x03{"status":"Success"}')
        await socket.close()
        return socket


class Kit:
    """Server, agent and a client."""

    def __init__(self, server, agent, session) -> None:
        self.server, self.agent, self.session = server, agent, session

    async def call(self, method, path, body=None):
        async with self.session.request(method, self.server.url + path, json=body) as response:
            return response.status, await response.json()


@pytest_asyncio.fixture
async def kit():
    server = ApiServer(None, kubelet_token="agents only")
    await server.start()
    agent = Agent("agents only")
    app = web.Application()
    app.router.add_get("/containerLogs/{ns}/{pod}/{container}", agent.logs)
    app.router.add_get("/exec/{ns}/{pod}/{container}", agent.exec)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    context = certificates.server_context(*server.authority.issue("node", ["127.0.0.9"]))
    await web.TCPSite(runner, "127.0.0.9", 0, ssl_context=context).start()
    connector = aiohttp.TCPConnector(ssl=certificates.client_context(server.ca_pem))
    headers = {"Authorization": f"Bearer {server.token}"}
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        kit = Kit(server, agent, session)
        await kit.call("POST", "/api/v1/nodes", {"metadata": {"name": "n"}})
        port = runner.addresses[0][1]
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.9"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        }
        _, node = await kit.call("GET", "/api/v1/nodes/n")
        assert (await kit.call("PUT", "/api/v1/nodes/n/status", {**node, "status": status}))[0] == 200
        containers = [{"name": "a", "image": "x"}, {"name": "waiting", "image": "x"}]
        pod = {"metadata": {"name": "p"}, "spec": {"nodeName": "n", "containers": containers}}
        assert (await kit.call("POST", PODS, pod))[0] == 201
        yield kit
    await runner.cleanup()
    await server.stop()


async def test_logs_stream(kit):
    url = f"{kit.server.url}{PODS}/p/log"
    query = {"container": "a", "follow": "true", "tailLines": "5"}
    async with kit.session.get(url, params=query) as response:
        assert response.status == 200
        assert await response.content.readline() == b"first follow=true&tailLines=5\n"
        kit.agent.release.set()
        assert await response.content.readline() == b"second\n"
        assert await response.content.read() == b""


async def test_log_errors_are_passed_on(kit):
    code, status = await kit.call("GET", f"{PODS}/p/log?container=waiting")
    assert (code, status["reason"]) == (400, "BadRequest")
    assert "ContainerCreating" in status["message"]
    code, status = await kit.call("GET", f"{PODS}/p/log")
    assert code == 400
    assert "choose one of" in status["message"]


async def test_exec_passes_both_ways(kit):
    url = f"{kit.server.url}{PODS}/p/exec?container=a&command=ls&command=-l&stdin=true&stdout=true"
    async with kit.session.ws_connect(url, protocols=["v5.channel.k8s.io", "v4.channel.k8s.io"]) as socket:
        assert socket.protocol == "v5.channel.k8s.io"
        assert (await socket.receive_bytes()) == b"\x01ls -l"
        await socket.send_bytes(b"\x00input")
        assert (await socket.receive_bytes()) == b"\x01echo input"
        assert (await socket.receive_bytes()) == b'\x03{"status":"Success"}'
        assert (await socket.receive()).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)


async def test_exec_has_no_media_type_that_could_be_asked_for(kit):
    url = f"{kit.server.url}{PODS}/p/exec?container=a&command=ls&stdout=true"
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await kit.session.ws_connect(url, protocols=["v5.channel.k8s.io"], headers={"Accept": "application/json"})
    assert refused.value.status == 406


async def test_a_node_that_cannot_be_reached(kit):
    _, node = await kit.call("GET", "/api/v1/nodes/n")
    node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"] = 1
    await kit.call("PUT", "/api/v1/nodes/n/status", node)
    code, status = await kit.call("GET", f"{PODS}/p/log?container=a")
    assert (code, status["reason"]) == (500, "InternalError")
    assert 'node "n"' in status["message"]


async def test_a_node_with_a_foreign_certificate(kit):
    other = certificates.create_authority("another")
    context = certificates.server_context(*other.issue("node", ["127.0.0.9"]))
    app = web.Application()
    app.router.add_get("/containerLogs/{ns}/{pod}/{container}", kit.agent.logs)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.9", 0, ssl_context=context).start()
    _, node = await kit.call("GET", "/api/v1/nodes/n")
    node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"] = runner.addresses[0][1]
    await kit.call("PUT", "/api/v1/nodes/n/status", node)
    code, _ = await kit.call("GET", f"{PODS}/p/log?container=a")
    assert code == 500
    await runner.cleanup()


async def test_clients_trust_only_this_server(kit):
    foreign = certificates.client_context(certificates.create_authority("another").pem)
    async with aiohttp.ClientSession() as session:
        with pytest.raises((aiohttp.ClientConnectorCertificateError, ssl.SSLError)):
            await session.get(kit.server.url, ssl=foreign)
