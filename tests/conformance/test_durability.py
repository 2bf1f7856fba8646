"""What was acknowledged survives the death of the server."""

import asyncio
import contextlib
import os
import random
import signal
import ssl
import sys
from pathlib import Path

import aiohttp
import pytest

from meshwright_local.apiserver.rest.server import ApiServer
from meshwright_local.apiserver.store import Store, StoreInUseError
from tests.patience import patient, until
from tests.randomness import first_seed, runs

SERVE = """
import asyncio, sys
from pathlib import Path
from meshwright_local.apiserver.rest.server import ApiServer
async def main():
    server = ApiServer(Path(sys.argv[1]))
    await server.start()
    print(server.url, server.token, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
ROUNDS = runs(2)
"""How often the server is killed; 50 are worth it before a release."""
MAPS = "/api/v1/namespaces/default/configmaps"


def session_with(directory, token):
    context = ssl.create_default_context(cafile=directory / "pki" / "ca.crt")
    headers = {"Authorization": f"Bearer {token}"}
    return aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(ssl=context))


@contextlib.asynccontextmanager
async def serving(directory):
    """A server in this process, which begins to serve in less time, and a session with it."""
    server = ApiServer(directory)
    await server.start()
    try:
        async with session_with(directory, server.token) as session:
            yield server, session
    finally:
        await server.stop()


class Running:
    """A server in a process of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    async def __aenter__(self):
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SERVE, str(self.directory), stdout=asyncio.subprocess.PIPE
        )
        line = await asyncio.wait_for(self.process.stdout.readline(), patient(60))
        self.url, self.token = line.decode().split()
        self.session = session_with(self.directory, self.token)
        return self

    async def __aexit__(self, *_):
        await self.session.close()
        if self.process.returncode is None:
            self.kill()
        await self.process.wait()

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)

    async def call(self, method, path, body=None, **query):
        async with self.session.request(method, self.url + path, json=body, params=query) as response:
            return response.status, await response.json()


def config_map(name):
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"k": "v"}}


@pytest.mark.chaos
async def test_no_acknowledged_write_is_lost(tmp_path):
    """Kill the server at random moments while four writers create, change and delete; each restart shows all of it."""
    generator = random.Random(first_seed(1))
    known: dict[str, str | None] = {}  # name -> revision of the last acknowledged write, None: deletion acknowledged
    pending: dict[str, str] = {}  # name -> what was asked and not answered
    revision, token, acknowledged = 0, "", 0

    async def write(server, number, writer):
        nonlocal acknowledged
        for index in range(10_000):
            name = f"r{number}-w{writer}-{index}"
            steps = [("POST", MAPS, config_map(name)), ("PUT", f"{MAPS}/{name}", {**config_map(name), "data": {}})]
            for method, path, body in [*steps, *([("DELETE", f"{MAPS}/{name}", None)] if index % 3 == 0 else [])]:
                pending[name] = method
                code, obj = await server.call(method, path, body)
                assert code in (200, 201), obj
                del pending[name]
                acknowledged += 1
                known[name] = obj["metadata"]["resourceVersion"] if method != "DELETE" else None

    async def began(server, session):
        nonlocal revision, token, known
        assert server.token == (token or server.token)
        token = server.token
        async with session.get(server.url + MAPS) as response:
            listed = await response.json()
        assert int(listed["metadata"]["resourceVersion"]) >= revision, "revisions never go back"
        check(listed, known, pending)
        revision = int(listed["metadata"]["resourceVersion"])
        known = {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in listed["items"]}
        pending.clear()

    for number in range(ROUNDS):
        async with Running(tmp_path) as server:
            await began(server, server.session)
            tasks = [asyncio.create_task(ignoring_loss(write(server, number, writer))) for writer in range(4)]
            enough = acknowledged + generator.randrange(5, 200)  # a name has three writes
            await until(lambda enough=enough: acknowledged >= enough)
            server.kill()
            await asyncio.gather(*tasks)
    async with serving(tmp_path) as (server, session):
        await began(server, session)
    assert len(known) > ROUNDS, "the writers got to write"


def check(listed, known, pending):
    """Whether a server's objects are what was acknowledged, but for writes that it may or may not have done."""
    present = {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in listed["items"]}
    for name, revision in known.items():
        if name in pending:
            gone = pending[name] == "DELETE" and name not in present
            assert gone or int(present[name]) >= int(revision or 0)
        else:
            assert present.get(name) == revision
    assert present.keys() <= known.keys() | pending.keys()


async def ignoring_loss(work):
    with contextlib.suppress(aiohttp.ClientError):
        await work


async def test_watch_from_before_a_restart_must_list_again(tmp_path):
    async with serving(tmp_path):
        pass
    async with (
        serving(tmp_path) as (server, session),
        session.get(server.url + MAPS, params={"watch": "true", "resourceVersion": "2"}) as response,
    ):
        line = await response.content.readline()
    assert b'"type":"ERROR"' in line
    assert b'"code":410' in line


async def test_custom_resources_come_back(tmp_path):
    schema = {"type": "object", "properties": {"spec": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
    crd = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "backs.example.com"},
        "spec": {
            "group": "example.com",
            "scope": "Namespaced",
            "names": {"plural": "backs", "kind": "Back"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }
    path = "/apis/example.com/v1/namespaces/default/backs"
    body = {"apiVersion": "example.com/v1", "kind": "Back", "metadata": {"name": "b"}, "spec": {"a": 1}}
    async with Running(tmp_path) as server:
        assert (await server.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd))[0] == 201
        _, first = await server.call("POST", path, body)
    async with serving(tmp_path) as (server, session), session.get(f"{server.url}{path}/b") as response:
        assert (response.status, await response.json()) == (200, first)


async def test_one_server_a_directory(tmp_path):
    server = ApiServer(tmp_path)
    await server.start()
    other = ApiServer(tmp_path)
    with pytest.raises(StoreInUseError, match="in use"):
        await other.start()
    await server.stop()
    await other.start()
    await other.stop()


def test_revisions_never_repeat_after_a_delete(tmp_path):
    store = Store(tmp_path)
    key = ("", "configmaps")
    store.put(key, {"metadata": {"name": "a", "namespace": "n"}})
    last = store.remove(key, {"metadata": {"name": "a", "namespace": "n"}})
    store.close()
    store = Store(tmp_path)
    assert store.revision == int(last["metadata"]["resourceVersion"])
    store.close()
    assert oct((tmp_path / "lock").stat().st_mode)[-3:] == "600"
