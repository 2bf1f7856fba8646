"""The API client and the reflector: connections, re-lists, what vanished meanwhile."""

import asyncio
import contextlib
from pathlib import Path

import pytest
import yaml

from meshwright_local.kube.client import ApiClient, ApiError
from meshwright_local.kube.kubeconfig import Connection, KubeconfigError, write_kubeconfig
from meshwright_local.kube.reflector import ChangeType, Reflector
from meshwright_local.kube.resources import CONFIG_MAPS, NAMESPACES
from meshwright_local.providers.embedded import EmbeddedProvider
from tests.patience import patient
from tests.reserved_ports import reserved_ports


def test_paths():
    assert CONFIG_MAPS.path() == "/api/v1/configmaps"
    assert CONFIG_MAPS.path("n", "x", "y") == "/api/v1/namespaces/n/configmaps/x/y"
    assert NAMESPACES.path(None, "x") == "/api/v1/namespaces/x"


def test_kubeconfig_round_trip(tmp_path):
    path = tmp_path / "config"
    connection = Connection("https://127.0.0.1:1", "secret", "CERTIFICATE")
    write_kubeconfig(path, connection)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Connection.from_kubeconfig(path) == connection
    assert "secret" not in repr(connection)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"current-context": "other"}, "contexts has no entry named 'other'"),
        ({"clusters": []}, "clusters has no entry"),
        ({"users": [{"name": "meshwright-local", "user": {"exec": {}}}]}, r"users\[\].user.exec is not supported"),
    ],
)
def test_bad_kubeconfigs_are_explained(tmp_path, change, message):
    path = tmp_path / "config"
    write_kubeconfig(path, Connection("https://127.0.0.1:1", "t", "c"))
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **change}))
    with pytest.raises(KubeconfigError, match=message):
        Connection.from_kubeconfig(path)
    with pytest.raises(KubeconfigError, match="cannot be read"):
        Connection.from_kubeconfig(Path("/nowhere"))


@contextlib.asynccontextmanager
async def server(directory, port=0):
    provider = EmbeddedProvider(directory, in_memory=False, port=port)
    try:
        yield (await provider.start()).connection
    finally:
        await provider.stop()


async def test_errors_and_deletes(tmp_path):
    async with server(tmp_path) as connection, ApiClient(connection) as client:
        with pytest.raises(ApiError) as caught:
            await client.get(CONFIG_MAPS, "x", "default")
        assert (caught.value.status, caught.value.reason) == (404, "NotFound")
        assert await client.find(CONFIG_MAPS, "x", "default") is None
        assert not await client.delete(CONFIG_MAPS, "x", "default")
        made = await client.create(CONFIG_MAPS, {"metadata": {"name": "x"}}, "default")
        assert not await client.delete(CONFIG_MAPS, "x", "default", uid="another")
        assert await client.delete(CONFIG_MAPS, "x", "default", uid=made["metadata"]["uid"])


async def test_pages(tmp_path):
    async with server(tmp_path) as connection, ApiClient(connection) as client:
        for index in range(501):
            await client.create(CONFIG_MAPS, {"metadata": {"name": f"c{index}"}}, "default")
        listed = await client.list(CONFIG_MAPS, "default")
        assert len(listed.items) == 501
        assert listed.items[0]["kind"] == "ConfigMap"


@pytest.fixture
def port():
    with reserved_ports(1) as (port,):
        yield port


async def test_reflector_over_an_outage(tmp_path, port):
    changes = []
    async with server(tmp_path, port) as connection:
        client = ApiClient(connection)
        reflector = Reflector(client, CONFIG_MAPS, namespace="default")
        reflector.listeners.append(lambda change: changes.append((change.type, change.object["metadata"]["name"])))
        task = asyncio.create_task(reflector.run())
        await reflector.synced.wait()
        for name in ("kept", "lost", "replaced"):
            await client.create(CONFIG_MAPS, {"metadata": {"name": name}}, "default")
        await until(lambda: len(changes) == 3)
    changes.clear()
    # Somebody else works on the same objects while the reflector cannot see it.
    task.cancel()
    async with server(tmp_path) as other, ApiClient(other) as hidden:
        await hidden.delete(CONFIG_MAPS, "lost", "default")
        await hidden.delete(CONFIG_MAPS, "replaced", "default")
        await hidden.create(CONFIG_MAPS, {"metadata": {"name": "replaced"}}, "default")
        await hidden.create(CONFIG_MAPS, {"metadata": {"name": "new"}}, "default")
    task = asyncio.create_task(reflector.run())
    await asyncio.sleep(0.2)
    async with server(tmp_path, port):
        await until(lambda: len(changes) == 4)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await client.close()
    assert set(changes) == {
        (ChangeType.DELETED, "lost"),
        (ChangeType.DELETED, "replaced"),
        (ChangeType.ADDED, "replaced"),
        (ChangeType.ADDED, "new"),
    }


async def until(look, seconds=10.0):
    async with asyncio.timeout(patient(seconds)):
        while True:
            if look():
                return
            await asyncio.sleep(0.01)


async def test_a_failing_listener_stops_no_other(tmp_path, caplog):
    seen = []
    async with server(tmp_path) as connection, ApiClient(connection) as client:
        reflector = Reflector(client, NAMESPACES)
        reflector.listeners += [lambda _: 1 // 0, seen.append]
        task = asyncio.create_task(reflector.run())
        await reflector.synced.wait()
        task.cancel()
    assert len(seen) >= 4
    assert "a listener failed" in caplog.text
