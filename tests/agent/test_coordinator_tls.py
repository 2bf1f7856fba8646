"""The agent's client and the coordinator over real TLS: what is accepted, and rotation while agents are connected."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from meshwright.api import labels
from meshwright.protocol import signing
from meshwright.protocol.messages import AgentState, MeshRequest, ReportReply, WorkerReport
from meshwright_operator.controller.http_server import serve_application
from meshwright_operator.coordinator import certificates
from meshwright_operator.coordinator.certificates import Authority
from meshwright_operator.coordinator.credentials import Credentials, CredentialsError
from meshwright_operator.coordinator.server import Coordinator
from meshwright_operator.coordinator.tls import CertificateFiles, CoordinatorTls, Identity, ManagedCertificates
from meshwright_operator.coordinator.tokens import Tokens
from meshwright_operator.http import server as http_server
from meshwright_operator.http.connection import Connection
from meshwright_operator.http.limits import ConnectionLimits
from meshwright_operator.http.tls_connection import BUFFER_BYTES, TlsConnection
from meshwright_operator.kube.cache import Cache
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.settings import Address
from meshwright_worker.agent.coordinator_client import (
    CertificateRejectedError,
    CoordinatorClient,
    RejectedError,
    UnavailableError,
)
from meshwright_worker.agent.coordinator_trust import CoordinatorTrust
from meshwright_worker.agent.settings import Settings, SettingsError, from_environment
from tests.operator.builders import JOB, pod
from tests.patience import patient

YEAR = timedelta(days=365)
UID = "u1"
POD = pod(0, owner=UID)


def authority() -> Authority:
    return certificates.create_authority(datetime.now(UTC), YEAR)


class Source:
    """Certificates of chosen CAs."""

    def __init__(self) -> None:
        self.trusted = [authority()]
        self.signer = self.trusted[0]
        self.names: tuple[str, ...] = ("127.0.0.1",)
        self.age = timedelta()

    async def identity(self) -> Identity:
        issued = certificates.issue(self.signer, self.names, datetime.now(UTC) - self.age, timedelta(days=30))
        bundle = certificates.bundle(self.trusted)
        return Identity(issued.chain, issued.key, bundle, issued.not_after, self.trusted[-1].not_after)

    def pause(self) -> float:
        return 1e9


class Stage:
    """A coordinator over TLS that serves one job."""

    def __init__(self) -> None:
        cache = Cache()
        cache.put_job({"metadata": {"name": JOB, "namespace": "default", "uid": UID, "resourceVersion": "1"}})
        cache.put_pod(POD)
        tokens = Tokens(b"k" * 32)
        self.metrics = OperatorMetrics()
        self.coordinator = Coordinator(cache, tokens, self.metrics, lambda *what: None)
        self.coordinator.synced = True
        self.token = tokens.token("default", JOB, UID)
        self.source = Source()
        self.bundle = ""
        self.tls = CoordinatorTls(self.source, "127.0.0.1", self.metrics, self._publish)
        self.port = 0

    def settings(self, bundle: str | None = None) -> Settings:
        return Settings(
            namespace="default",
            job=JOB,
            uid=UID,
            worker=0,
            incarnation=0,
            pod_uid=POD.uid,
            pod_address="10.0.0.1",
            coordinator_url=f"https://127.0.0.1:{self.port}",
            token=self.token,
            coordinator_ca=self.bundle if bundle is None else bundle,
        )

    def requests(self, endpoint: str) -> float:
        """How many requests of an endpoint succeeded."""
        page = self.metrics.exposition().decode()
        labels = f'ptj_coordinator_requests_total{{code="200",endpoint="{endpoint}"}}'
        lines = [line for line in page.splitlines() if line.startswith(labels)]
        return sum(float(line.split()[-1]) for line in lines)

    @asynccontextmanager
    async def served(self, **limits: float) -> AsyncIterator[list[str]]:
        """Serves, and yields why connections are closed."""
        closed: list[str] = []
        server = serve_application(
            self.coordinator.application(),
            Address("127.0.0.1", 0),
            limits=ConnectionLimits(**limits),  # type: ignore[arg-type]
            closed=closed.append,
            tls=self.tls.context,
        )
        async with server as self.port:
            yield closed

    def _publish(self, bundle: str) -> None:
        self.bundle = bundle
        self.coordinator.trust(bundle)


@pytest_asyncio.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    await stage.tls.refresh()
    async with stage.served():
        yield stage


def report() -> WorkerReport:
    return WorkerReport(worker=0, incarnation=0, pod_uid=POD.uid, generation=0, state=AgentState.IDLE)


async def reports(settings: Settings) -> ReportReply:
    """A report of an agent that has just connected."""
    async with CoordinatorClient(settings) as client:
        return await client.report(report())


async def test_an_agent_reports_over_tls_and_learns_the_name_of_the_bundle(stage: Stage) -> None:
    assert (await reports(stage.settings())).trust
    assert stage.requests("trust") == 0, "it has the bundle already"


async def test_a_server_without_the_token_cannot_give_a_bundle_nor_stop_the_agent(stage: Stage) -> None:
    """It stands for everything between the agent and the operator. A 401 of the real coordinator makes agents exit."""
    for bundle in (authority().pem, stage.bundle):
        mine = replace(stage.settings(authority().pem), token="x" * 43)
        stage.coordinator.trust(bundle)
        with pytest.raises(CertificateRejectedError, match="no signed CA bundle: 401"):
            await reports(mine)
    with pytest.raises(RejectedError):
        await reports(replace(stage.settings(), token="x" * 43))


async def test_a_forged_bundle_is_not_used(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def forge(*_: object) -> dict[str, str]:
        return {signing.SESSION: "s", signing.COUNTER: "1", signing.SIGNATURE: "f" * 43}

    async with CoordinatorClient(stage.settings()) as client:
        await client.report(report())  # its session is known, so that the next request is not answered with 409
        client._trust = CoordinatorTrust(authority().pem)
        monkeypatch.setattr(signing, "answer_headers", forge)
        with pytest.raises(UnavailableError, match="the coordinator's signature"):
            await client.report(report())
    assert (stage.requests("trust"), stage.requests("report")) == (1, 1)


async def test_an_agent_with_an_old_bundle_gets_the_signed_new_one_and_goes_on(stage: Stage) -> None:
    async with CoordinatorClient(stage.settings(authority().pem)) as client:
        await client.report(report())
        await client.report(report())
    assert (stage.requests("trust"), stage.requests("report")) == (1, 2)


async def test_without_the_exchange_another_ca_is_rejected(stage: Stage) -> None:
    other = authority().pem
    stage.coordinator.trust(other)  # even its own coordinator names the wrong CA
    with pytest.raises(CertificateRejectedError, match="certificate verify failed"):
        await reports(stage.settings(other))
    assert stage.requests("report") == 0


async def test_the_systems_cas_are_not_asked(stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "roots.pem").write_text(stage.source.signer.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "roots.pem"))
    other = authority().pem
    stage.coordinator.trust(other)
    with pytest.raises(CertificateRejectedError):
        await reports(stage.settings(other))


async def test_an_expired_certificate_or_another_name_is_rejected(stage: Stage, tmp_path: Path) -> None:
    await reports(stage.settings())
    for problem in ({"age": timedelta(days=31)}, {"names": ("elsewhere",)}):
        source = Source()
        source.trusted, source.signer = stage.source.trusted, stage.source.signer
        vars(source).update(problem)
        # As a broken operator would: it checks this itself, see below.
        identity = await source.identity()
        (file := tmp_path / "broken.pem").write_text(identity.chain + identity.key)
        stage.tls.context.load_cert_chain(file)
        with pytest.raises(CertificateRejectedError, match="certificate verify failed"):
            await reports(stage.settings())


async def test_a_given_name_is_verified_instead_of_the_host(stage: Stage) -> None:
    stage.source.names = ("coordinator.example",)
    stage.tls._server_name = "coordinator.example"
    await stage.tls.refresh()
    await reports(replace(stage.settings(), coordinator_name="coordinator.example"))
    with pytest.raises(CertificateRejectedError, match="mismatch"):
        await reports(stage.settings())


async def test_rotation_reaches_agents_before_the_certificate_changes(stage: Stage) -> None:
    """Open polls stay open, and nobody ever connects without verification."""
    async with CoordinatorClient(stage.settings()) as client:
        request = MeshRequest(
            worker=0, incarnation=0, pod_uid=POD.uid, address="10.0.0.1", store_port=2000, wait_seconds=1
        )
        poll = asyncio.create_task(client.mesh(request))
        await client.report(report())
        new = authority()
        stage.source.trusted = [stage.source.signer, new]
        await stage.tls.refresh()
        await client.report(report())
        assert stage.requests("trust") == 1
        stage.source.signer, stage.source.trusted = new, [new]
        await stage.tls.refresh()
        assert await poll is None, "no document yet; the poll was not cut"
        await client.report(report())
        assert stage.requests("trust") == 2, "the bundle without the old CA"
    await reports(stage.settings())


async def test_a_certificate_that_agents_would_reject_never_goes_live(stage: Stage) -> None:
    for problem in ({"age": timedelta(days=31)}, {"names": ("elsewhere",)}, {"trusted": [authority()]}):
        before = dict(vars(stage.source))
        vars(stage.source).update(problem)
        with pytest.raises(CredentialsError, match="agents would not accept the coordinator's certificate for 127"):
            await stage.tls.refresh()
        vars(stage.source).update(before)
        await reports(stage.settings())


async def test_plain_http_is_refused_by_the_server_and_by_the_agent(stage: Stage) -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://127.0.0.1:{stage.port}/")
    environment = {
        labels.ENV_JOB_NAME: "job",
        labels.ENV_JOB_NAMESPACE: "team",
        labels.ENV_JOB_UID: UID,
        labels.ENV_WORKER_INDEX: "0",
        labels.ENV_INCARNATION: "0",
        labels.ENV_POD_IP: "10.0.0.1",
        labels.ENV_POD_UID: POD.uid,
        labels.ENV_COORDINATOR_URL: "http://operator:9470",
        labels.ENV_TOKEN: "t",
    }
    assert not from_environment(environment).coordinator_ca
    with pytest.raises(SettingsError, match="must be an https:// URL"):
        from_environment({**environment, labels.ENV_COORDINATOR_CA: stage.bundle})
    environment[labels.ENV_COORDINATOR_URL] = "https://operator:9470"
    assert from_environment({**environment, labels.ENV_COORDINATOR_CA: stage.bundle}).coordinator_ca
    with pytest.raises(SettingsError, match=f"{labels.ENV_COORDINATOR_CA}: not CA certificates"):
        from_environment({**environment, labels.ENV_COORDINATOR_CA: "junk"})


async def test_tls_before_1_3_is_refused(stage: Stage) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode, old.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        await asyncio.open_connection("127.0.0.1", stage.port, ssl=old)


async def ended(reader: asyncio.StreamReader) -> None:
    """The server closes the connection."""
    async with asyncio.timeout(patient(60)):
        with contextlib.suppress(ConnectionResetError):
            while await reader.read(1 << 16):
                pass


async def test_a_connection_without_a_handshake_is_closed() -> None:
    stage = Stage()
    await stage.tls.refresh()
    async with stage.served(head_seconds=0.5) as closed:
        connections = [await asyncio.open_connection("127.0.0.1", stage.port) for _ in range(5)]
        connections[0][1].write(b"\x16\x03\x01\x02")  # begins a ClientHello, and never ends it
        for reader, _ in connections:
            await ended(reader)
        assert len(closed) == 5
        assert set(closed) <= {"handshake", "head_timeout"}
        await reports(stage.settings())
        for _, writer in connections:
            writer.close()


async def test_a_handshake_that_fails_is_counted_and_leaves_nothing() -> None:
    stage = Stage()
    await stage.tls.refresh()
    async with stage.served(unverified_per_source=2) as closed:
        for count in range(1, 6):
            reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await ended(reader)
            writer.close()
            async with asyncio.timeout(patient(60)):
                while closed != ["handshake"] * count:  # noqa: ASYNC110 - the list has no event
                    await asyncio.sleep(0.01)
        await reports(stage.settings())


async def test_connections_during_the_handshake_count_against_their_source() -> None:
    stage = Stage()
    await stage.tls.refresh()
    async with stage.served(unverified_per_source=3) as closed:
        silent = [await asyncio.open_connection("127.0.0.1", stage.port) for _ in range(8)]
        for reader, _ in silent[:5]:
            await ended(reader)
        assert closed == ["evicted"] * 5
        await reports(stage.settings())
        for _, writer in silent:
            writer.close()


async def test_a_connection_costs_little_memory(stage: Stage) -> None:
    """asyncio's own buffers would be 256 KiB for each."""
    count = 50
    await reports(stage.settings())
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    sockets = [socket.create_connection(("127.0.0.1", stage.port)) for _ in range(count)]
    for one in sockets:
        one.sendall(b"\x16")  # the handshake begins: before, a connection costs only its socket

    def accepted() -> float:
        return (tracemalloc.get_traced_memory()[0] - before) / count

    async with asyncio.timeout(patient(60)):
        while accepted() < BUFFER_BYTES:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert accepted() < 64 << 10
    tracemalloc.stop()
    for one in sockets:
        one.close()


async def test_files_are_used_and_followed(stage: Stage, tmp_path: Path) -> None:
    """As cert-manager does: certificate and CA change at the same moment."""
    files = [tmp_path / name for name in ("tls.crt", "tls.key", "ca.crt")]

    async def write() -> None:
        source = Source()
        identity = await source.identity()
        for path, text in zip(files, (identity.chain, identity.key, identity.bundle), strict=True):
            path.write_text(text)

    await write()
    stage.tls._source = CertificateFiles(*files)
    await stage.tls.refresh()
    async with CoordinatorClient(stage.settings()) as client:
        await client.report(report())
        await write()
        await stage.tls.refresh()
        await client.report(report())
        await client.report(report())
    await reports(stage.settings())
    live = stage.bundle
    files[1].write_text("")
    with pytest.raises(CredentialsError):
        await stage.tls.refresh()
    files[0].unlink()
    with pytest.raises(CredentialsError, match=r"cannot read .*tls.crt: No such file"):
        await stage.tls.refresh()
    assert stage.bundle == live
    await reports(stage.settings())


async def test_a_failed_renewal_is_counted_and_retried(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright_operator.coordinator.tls.SHORTEST_PAUSE_SECONDS", 0.01)
    stage.source.pause = lambda: 0.0  # type: ignore[method-assign]
    good, stage.source.signer = stage.source.signer, authority()
    task = asyncio.create_task(stage.tls.run())

    def failures() -> float:
        page = stage.metrics.exposition().decode()
        name = "ptj_coordinator_certificate_renewal_failures_total "
        return float(next(line for line in page.splitlines() if line.startswith(name)).split()[1])

    async with asyncio.timeout(patient(60)):
        while failures() < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await reports(stage.settings())
    live = stage.tls._live
    stage.source.signer = good
    async with asyncio.timeout(patient(60)):
        while stage.tls._live is live:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    task.cancel()


class Store:
    """CAs in virtual time."""

    def __init__(self) -> None:
        self.time = datetime.now(UTC)
        self.authorities: tuple[Authority, ...] = ()

    async def load(self) -> Credentials:
        self.authorities = certificates.rotated(self.authorities, self.time, YEAR)
        return Credentials(b"k" * 32, self.authorities)


async def test_managed_certificates_are_renewed_well_before_they_expire() -> None:
    store = Store()
    source = ManagedCertificates(store, ["127.0.0.1"], YEAR, lambda: store.time)  # type: ignore[arg-type]
    first = await source.identity()
    seen = {first.chain}
    for _ in range(3 * 365):
        assert 0 < source.pause() <= 3600
        store.time += timedelta(days=1)
        identity = await source.identity()
        assert identity.not_after - store.time > timedelta(days=9)
        seen.add(identity.chain)
    assert 40 < len(seen) < 80
    assert await source.identity() == await source.identity()


async def test_a_client_that_says_nothing_costs_a_socket_and_no_tls(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[TlsConnection] = []

    class Counted(TlsConnection):
        def __init__(self, connection: Connection, context: ssl.SSLContext, seconds: float) -> None:
            made.append(self)
            super().__init__(connection, context, seconds)

    monkeypatch.setattr(http_server, "TlsConnection", Counted)
    async with stage.served(head_seconds=1.0) as closed:
        silent = [await asyncio.open_connection("127.0.0.1", stage.port) for _ in range(10)]
        await reports(stage.settings())
        for reader, _ in silent:
            await ended(reader)
        assert closed.count("head_timeout") == 10
        assert len(made) == 1, "for the agent"
        for _, writer in silent:
            writer.close()
