"""The operator's Secret: who creates it, what is completed and rotated, and what is never overwritten."""

from __future__ import annotations

import asyncio
import base64
import copy
import logging
from datetime import UTC, datetime, timedelta

import pytest

from meshwright.api.objects import KubeObject
from meshwright_operator.coordinator import certificates
from meshwright_operator.coordinator.credentials import CredentialsError, CredentialsStore, read_secret
from meshwright_operator.coordinator.running_leader import RunningLeader
from meshwright_operator.kube.client import ApiError
from tests.operator.conftest import StartOperator
from tests.operator.memory import MemoryCluster
from tests.operator.support import Api, until

PATH = "/api/v1/namespaces/ops/secrets/mw"
YEAR = timedelta(days=365)


class Cluster(MemoryCluster):
    """Secrets, with PUT, and a pause in every call, so that two processes take turns."""

    def __init__(self) -> None:
        self.time = datetime.now(UTC)
        super().__init__(lambda: self.time)

    async def get(self, path: str) -> KubeObject:
        await asyncio.sleep(0)
        return await super().get(path)

    async def create(self, path: str, body: KubeObject) -> KubeObject:
        await asyncio.sleep(0)
        return await super().create(path, body)

    async def replace(self, path: str, body: KubeObject) -> KubeObject:
        await asyncio.sleep(0)
        if body["metadata"]["resourceVersion"] != self._at(path)["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", f"{path} has changed")
        return self.update(path, copy.deepcopy(body))

    def store(self, ca_lifetime: timedelta | None = YEAR) -> CredentialsStore:
        """That of one process."""
        return CredentialsStore(self, "ops", "mw", ca_lifetime, lambda: self.time)

    def secret(self, **entries: bytes) -> None:
        """A Secret that somebody else made."""
        data = {name.replace("_", "."): base64.b64encode(value).decode() for name, value in entries.items()}
        self.put(PATH, {"metadata": {"name": "mw", "namespace": "ops"}, "data": data})


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


async def test_the_secret_is_created_once_and_then_only_read(cluster: Cluster) -> None:
    made = await cluster.store().load()
    assert len(made.key) >= 32
    assert len(made.authorities) == 1
    assert set(cluster.objects[PATH]["data"]) == {"coordinator.key", "ca.crt", "ca.key"}
    before = cluster.writes
    again = await cluster.store().load()
    assert (again.key, certificates.bundle(again.authorities)) == (made.key, certificates.bundle(made.authorities))
    assert cluster.writes == before
    assert made.key.decode() not in repr(made)


async def test_replicas_that_create_it_at_the_same_time_agree(cluster: Cluster) -> None:
    found = await asyncio.gather(*(cluster.store().load() for _ in range(5)))
    assert len({(one.key, certificates.bundle(one.authorities)) for one in found}) == 1
    assert cluster.writes == 1


async def test_replicas_that_rotate_at_the_same_time_agree(cluster: Cluster) -> None:
    stores = [cluster.store() for _ in range(3)]
    (before, *_) = [await store.load() for store in stores]
    cluster.time += YEAR * 0.7
    found = await asyncio.gather(*(store.load() for store in stores))
    assert len({certificates.bundle(one.authorities) for one in found}) == 1
    old, new = found[0].authorities
    assert old.pem == before.authorities[0].pem
    cluster.time += YEAR * 0.31
    (only,) = (await stores[0].load()).authorities
    assert only.pem == new.pem
    assert found[0].key == before.key


async def test_without_managed_certificates_the_secret_has_only_the_key(cluster: Cluster) -> None:
    made = await cluster.store(None).load()
    assert set(cluster.objects[PATH]["data"]) == {"coordinator.key"}
    completed = await cluster.store().load()
    assert (completed.key, len(completed.authorities)) == (made.key, 1)


async def test_an_empty_secret_and_one_with_a_given_key_are_completed(cluster: Cluster) -> None:
    cluster.secret()
    assert len((await cluster.store().load()).authorities) == 1
    cluster.secret(coordinator_key=b"g" * 40 + b"\n", notes=b"ours")
    assert (await cluster.store().load()).key == b"g" * 40
    assert base64.b64decode(cluster.objects[PATH]["data"]["coordinator.key"]).strip() == b"g" * 40
    assert "notes" in cluster.objects[PATH]["data"]


PEM = certificates.create_authority(datetime.now(UTC), YEAR)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"tls_crt": b"x", "tls_key": b"y"}, "not the operator's. Choose another name with --credentials-secret"),
        ({"coordinator_key": b"short"}, "must have at least 32 bytes, got 5: restore it"),
        ({"coordinator_key": b"k" * 32, "ca_crt": PEM.pem.encode()}, "0 private keys. Remove both entries"),
        ({"coordinator_key": b"k" * 32, "ca_key": PEM.key_pem.encode()}, "no certificate in PEM format"),
        ({"coordinator_key": b"k" * 32, "ca_crt": b"junk", "ca_key": b"junk"}, "Remove both entries"),
        ({"coordinator_key": b"k" * 32, "ca_crt": b"\xff\x00", "ca_key": b"\xff"}, "Remove both entries"),
    ],
)
async def test_a_foreign_or_damaged_secret_is_named_with_the_fix_and_left_alone(
    cluster: Cluster, entries: dict[str, bytes], words: str
) -> None:
    cluster.secret(**entries)
    before = copy.deepcopy(cluster.objects)
    with pytest.raises(CredentialsError) as error:
        await cluster.store().load()
    assert "Secret ops/mw" in str(error.value)
    assert words in str(error.value)
    assert cluster.objects == before


@pytest.mark.parametrize("value", ["%%%", 7, "é"])
def test_what_is_not_base64_is_named(value: object) -> None:
    with pytest.raises(CredentialsError, match=r"`coordinator.key` of Secret ops/mw is not base64"):
        read_secret({"metadata": {"name": "mw", "namespace": "ops"}, "data": {"coordinator.key": value}})


async def test_a_deleted_secret_is_restored_by_the_process_that_has_read_it(cluster: Cluster) -> None:
    store = cluster.store()
    before = await store.load()
    cluster.remove(PATH)
    after = await store.load()
    assert after == before
    again = await cluster.store().load()
    assert (again.key, again.authorities[0].pem) == (before.key, before.authorities[0].pem)


LEASE = "/apis/coordination.k8s.io/v1/namespaces/ops/leases/lease"


def starting(cluster: Cluster) -> CredentialsStore:
    """The store of a replica that starts."""
    leader = RunningLeader(cluster, "ops", "lease", "new", lambda: cluster.time.timestamp())
    return CredentialsStore(cluster, "ops", "mw", YEAR, lambda: cluster.time, leader.name)


def renew(cluster: Cluster, holder: str) -> None:
    """The lease, renewed now."""
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": cluster.time.isoformat()}
    cluster.put(LEASE, {"metadata": {"name": "lease", "namespace": "ops"}, "spec": spec})


async def test_a_replica_that_starts_leaves_a_deleted_secret_to_the_leader(cluster: Cluster) -> None:
    running, new = cluster.store(), starting(cluster)
    before = await running.load()
    cluster.remove(PATH)
    for _ in range(10):
        renew(cluster, "leads")
        with pytest.raises(ApiError, match="waiting for leads, which leads, to restore it"):
            await new.load()
        cluster.time += timedelta(seconds=10)
    assert PATH not in cluster.objects
    assert await running.load() == before
    assert (await new.load()).key == before.key


@pytest.mark.parametrize("holder", ["", "new", None], ids=["released", "this one", "no lease"])
async def test_without_another_leader_a_replica_makes_the_secret_at_once(cluster: Cluster, holder: str | None) -> None:
    if holder is not None:
        renew(cluster, holder)
    assert (await starting(cluster).load()).key


async def test_a_replica_does_not_wait_for_a_leader_that_is_gone(cluster: Cluster) -> None:
    renew(cluster, "gone")
    new = starting(cluster)
    with pytest.raises(ApiError):
        await new.load()
    cluster.time += timedelta(seconds=16)
    assert (await new.load()).key


async def test_a_replica_waits_only_so_long_for_a_leader_that_does_not_use_the_secret(cluster: Cluster) -> None:
    new = starting(cluster)
    for _ in range(12):
        renew(cluster, "leads")
        with pytest.raises(ApiError):
            await new.load()
        cluster.time += timedelta(seconds=10)
    renew(cluster, "leads")
    assert (await new.load()).key


@pytest.mark.parametrize("tls", ["managed", "disabled"])
async def test_a_replica_that_runs_restores_its_secret(
    api: Api, start_operator: StartOperator, monkeypatch: pytest.MonkeyPatch, tls: str
) -> None:
    monkeypatch.setattr("meshwright_operator.coordinator.access.SECRET_CHECK_SECONDS", 0.1, raising=False)
    await start_operator(tls=tls, key_file=None)
    path = "/api/v1/namespaces/default/secrets/meshwright-operator-credentials"
    before = (await api.get(path))["data"]
    await api.delete(path)

    async def restored() -> bool:
        return bool((await api.call("GET", path, ok=False)).get("data") == before)

    await until(restored, "the Secret is there again, with the same key", 60)


async def test_a_key_that_somebody_changes_is_not_used_while_the_process_runs(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    store = cluster.store()
    before = await store.load()
    cluster.secret(coordinator_key=b"n" * 32)
    with caplog.at_level(logging.ERROR):
        assert (await store.load()).key == before.key
    assert "the key of the operator's Secret was changed" in caplog.text
    assert base64.b64decode(cluster.objects[PATH]["data"]["coordinator.key"]) == b"n" * 32


async def test_errors_of_the_api_server_are_the_callers(cluster: Cluster) -> None:
    cluster.refuse = lambda path, body: ApiError(403, "Forbidden", "secrets is forbidden")
    with pytest.raises(ApiError, match="forbidden"):
        await cluster.store().load()
