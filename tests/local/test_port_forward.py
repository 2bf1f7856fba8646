"""`kubectl port-forward`: SPDY in a WebSocket, through the API server to a node."""

import asyncio
import contextlib
import zlib

import pytest
from aiohttp import ClientSession

from meshwright_local.nodeagent.server import spdy
from meshwright_local.nodeagent.server.port_forward import PROTOCOL
from tests.patience import patient

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVER = """
import os, socket, threading
listener = socket.create_server((os.environ["IP"], 8080))
def serve(connection):
    received = b""
    while part := connection.recv(65536):
        received += part
    connection.sendall(b"got " + received)
    connection.close()
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],)).start()
"""


class Client:
    """The client's half of SPDY."""

    def __init__(self, socket):
        self._socket, self._spdy = socket, spdy.Spdy()
        self._packer = zlib.compressobj(zdict=spdy.DICTIONARY)
        self._next = 1
        self.data, self.ended, self.replied = {}, set(), set()
        self.pongs = []

    async def open(self, **headers):
        stream, self._next = self._next, self._next + 2
        pairs = [part.encode() for pair in headers.items() for part in pair]
        raw = len(headers).to_bytes(4) + b"".join(len(part).to_bytes(4) + part for part in pairs)
        packed = self._packer.compress(raw) + self._packer.flush(zlib.Z_SYNC_FLUSH)
        body = stream.to_bytes(4) + bytes(6) + packed
        await self._socket.send_bytes(b"\x80\x03\x00\x01\x00" + len(body).to_bytes(3) + body)
        return stream

    async def connect(self, port, number):
        error = await self.open(streamtype="error", port=str(port), requestid=number)
        data = await self.open(streamtype="data", port=str(port), requestid=number)
        return data, error

    async def send(self, stream, data, *, end=False):
        await self._socket.send_bytes(spdy.data_frame(stream, data, end=end))

    async def read_until_ended(self, *streams):
        async with asyncio.timeout(patient(10)):
            while not self.ended >= {*streams}:
                for frame in self._spdy.feed(await self._socket.receive_bytes()):
                    if frame.kind == spdy.DATA:
                        self.data[frame.stream] = self.data.get(frame.stream, b"") + frame.data
                        self.ended |= {frame.stream} if frame.flags & spdy.FIN else set()
                    elif frame.kind == spdy.SYN_REPLY:
                        self.replied.add(frame.stream)


@contextlib.asynccontextmanager
async def forwarded(kit, pod):
    there = kit.client.connection
    path = f"{there.url}/api/v1/namespaces/{kit.namespace}/pods/{pod}/portforward"
    headers = {"Authorization": f"Bearer {there.token}"}
    async with (
        ClientSession() as session,
        session.ws_connect(path, headers=headers, ssl=there.ssl_context(), protocols=(PROTOCOL,)) as socket,
    ):
        assert socket.protocol == PROTOCOL
        yield Client(socket)


async def server_pod(kit, name):
    address = {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    probe = {"tcpSocket": {"port": 8080}, "periodSeconds": 1}
    await kit.pod(name, "python", "-c", SERVER, env=[address], readinessProbe=probe)
    await kit.pod_when(name, lambda pod: (pod["status"].get("containerStatuses") or [{}])[0].get("ready"))


async def test_connections_to_a_pod(kit):
    await server_pod(kit, "serves")
    async with forwarded(kit, "serves") as client:
        connections = [await client.connect(8080, str(number)) for number in range(3)]
        large = b"x" * 300_000
        for data, error in connections:
            await client.send(error, b"", end=True)
            for at in range(0, len(large), 50_000):
                await client.send(data, large[at : at + 50_000])
            await client.send(data, str(data).encode(), end=True)
        await client.read_until_ended(*(stream for pair in connections for stream in pair))
        for data, error in connections:
            assert client.data[data] == b"got " + large + str(data).encode()
            assert client.data[error] == b""
        assert client.replied == {stream for pair in connections for stream in pair}
    await kit.delete("serves", grace_seconds=0)


async def test_a_port_where_nothing_listens(kit):
    await kit.pod("mute", "sleep 600")
    await kit.running("mute")
    async with forwarded(kit, "mute") as client:
        data, error = await client.connect(9, "0")
        await client.read_until_ended(data, error)
    said = client.data[error].decode()
    assert said.startswith("error forwarding port 9 to pod mute, uid ")
    assert said.endswith("connection refused")
    await kit.delete("mute", grace_seconds=0)


async def test_the_dictionary():
    """Its checksum, which compressed headers name (RFC 1950)."""
    assert (len(spdy.DICTIONARY), zlib.adler32(spdy.DICTIONARY)) == (1423, 0xE3C6A7C2)


async def test_what_is_no_spdy():
    with pytest.raises(ValueError, match="not a frame"):
        spdy.Spdy().feed(b"\x80\x02\x00\x01\x00\x00\x00\x00")
    with pytest.raises(ValueError, match="decompressed"):
        spdy.Spdy().feed(b"\x80\x03\x00\x01\x00\x00\x00\x0c" + bytes(10) + b"xx")
