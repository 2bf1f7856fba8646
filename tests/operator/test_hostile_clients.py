"""The bounds of what clients without the token, or with only that of their own job, may cost the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from meshwright.protocol.messages import MAX_GENERATION, AgentState, MeshRequest, RankProcess
from meshwright.protocol.signing import MAX_COUNTER_STEP, Sender, Signer
from meshwright_operator.controller.http_server import health_application, serve_application
from meshwright_operator.http import limits as http_limits
from meshwright_operator.http.admission import Admission
from meshwright_operator.http.limits import ConnectionLimits, TokenBucket, connections_for_descriptors
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.settings import Address
from tests.operator.builders import pod, report
from tests.operator.test_coordinator import WORKERS, Stage
from tests.patience import patient, until

REPORT = "/v1/jobs/default/train/u1/report"
HEAD = b"POST /v1/jobs/default/train/u1/report HTTP/1.1\r\nHost: x\r\n"


@asynccontextmanager
async def served(session: aiohttp.ClientSession, **changes: float) -> AsyncIterator[tuple[Stage, list[str]]]:
    """A coordinator with other limits, and why it closed connections."""
    stage, closed = Stage(session), list[str]()
    limits = ConnectionLimits(**{"rate_per_source": 1e6, "burst_per_source": 1e6, **changes})  # type: ignore[arg-type]
    application, address = stage.coordinator.application(), Address("127.0.0.1", 0)
    async with serve_application(application, address, limits=limits, closed=closed.append) as port:
        stage.port = port
        yield stage, closed


class Client:
    """A client that sends what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def ended(self) -> bytes:
        """What arrives until the server closes the connection."""
        received = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(patient(60)):
                while part := await self.reader.read(1 << 16):
                    received += part
        return received


async def test_connections_that_say_nothing_are_closed(session: aiohttp.ClientSession) -> None:
    async with served(session, head_seconds=0.5) as (stage, closed):
        silent = [await Client.connect(stage.port) for _ in range(20)]
        await silent[0].send(HEAD)  # begins, and never ends its headers
        assert [await client.ended() for client in silent] == [b""] * 20
        assert closed == ["head_timeout"] * 20


async def test_an_idle_connection_is_closed_and_a_poll_is_not(session: aiohttp.ClientSession) -> None:
    async with served(session, idle_seconds=0.5) as (stage, closed):
        await stage.registry.publish(None, WORKERS)
        assert (await stage.poll(wait=3))[0] == 204
        assert closed == []
        await until(lambda: closed == ["idle_timeout"])


async def test_one_source_has_few_unverified_connections_and_the_oldest_gives_way(
    session: aiohttp.ClientSession,
) -> None:
    async with served(session, unverified_per_source=5) as (stage, closed):
        await stage.registry.publish(None, WORKERS)
        silent = [await Client.connect(stage.port) for _ in range(12)]
        await until(lambda: len(closed) == 7)
        assert [await client.ended() for client in silent[:7]] == [b""] * 7
        assert (await stage.post("report", report(0, AgentState.RUNNING).wire()))[0] == 200, "an agent gets through"
        assert set(closed) == {"evicted"}


async def test_verified_connections_do_not_count_against_their_source(session: aiohttp.ClientSession) -> None:
    async with served(session, unverified_per_source=1, burst_per_source=2, rate_per_source=0.001) as (stage, closed):
        await stage.registry.publish(None, WORKERS)
        polls = []
        for worker in (0, 1, 3):  # behind one address, each on a connection of its own
            polls.append(asyncio.create_task(stage.poll(worker=worker, wait=30)))
            await until(lambda: len(stage.registry.agents().waiting_agents) == len(polls))
        assert closed == []
        for poll in polls:
            poll.cancel()


async def test_a_source_that_connects_too_often_is_refused(session: aiohttp.ClientSession) -> None:
    async with served(session, burst_per_source=10, rate_per_source=0.001) as (stage, closed):
        clients = []
        for _ in range(30):
            with contextlib.suppress(ConnectionError):  # refused before the client knows that it is connected
                clients.append(await Client.connect(stage.port))
        for client in clients:
            await client.send(HEAD + b"Content-Length: 2\r\n\r\n{}")
        answers = [await client.ended() for client in clients]
        assert sum(answer.startswith(b"HTTP/1.1 401") for answer in answers) == 10
        assert len(answers) - answers.count(b"") == 10
        assert closed.count("source_rate") == 20


async def test_a_request_without_a_signature_ends_its_connection(session: aiohttp.ClientSession) -> None:
    async with served(session) as (stage, _):
        for path in (b"/v1/jobs/default/train/u1/report", b"/", b"/v1/jobs/a/b/c/mesh"):
            client = await Client.connect(stage.port)
            request = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
            await client.send(request * 3)
            assert (await client.ended()).count(b"HTTP/1.1 4") == 1


async def test_the_body_of_an_unsigned_request_is_not_read(session: aiohttp.ClientSession) -> None:
    async with served(session) as (stage, _):
        client = await Client.connect(stage.port)
        await client.send(HEAD + b"Content-Length: 40000\r\n\r\n")
        assert (await client.ended()).startswith(b"HTTP/1.1 401"), "before a byte of the body"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"Content-Length: 999999\r\n", b"413"),
        (b"Transfer-Encoding: chunked\r\n", b"411"),
        (b"Content-Length: 99999999999\r\n", b"413"),
    ],
)
async def test_a_body_of_unknown_or_great_length_is_not_read(
    session: aiohttp.ClientSession, headers: bytes, status: bytes
) -> None:
    async with served(session) as (stage, _):
        client = await Client.connect(stage.port)
        await client.send(HEAD + headers + b"\r\n")
        assert (await client.ended()).startswith(b"HTTP/1.1 " + status)


async def test_headers_without_end_are_not_kept(session: aiohttp.ClientSession) -> None:
    async with served(session) as (stage, closed):
        client = await Client.connect(stage.port)
        await client.send(HEAD + b"".join(b"X-%d: %s\r\n" % (n, b"x" * 1000) for n in range(100)))
        answer = await client.ended()
        assert closed == ["head_bytes"] or answer.startswith(b"HTTP/1.1 400")


async def test_bodies_in_flight_are_bounded_in_total(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright_operator.coordinator.server.BODY_BYTES_IN_FLIGHT", 1000)
    async with served(session) as (stage, _):
        await stage.registry.publish(None, WORKERS)
        await stage.post("report", report(0, AgentState.RUNNING).wire())
        slow, body = await Client.connect(stage.port), b"{" + b" " * 990 + b"}"
        headers = stage.signer(0).request("POST", REPORT, body)
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        await slow.send(HEAD + head.encode() + b"\r\n{")
        await until(lambda: stage.coordinator._body_budget.left < 1000)
        assert (await stage.post("report", report(1, AgentState.RUNNING).wire()))[0] == 503
        slow.writer.close()
        await until(lambda: stage.coordinator._body_budget.left == 1000)
        assert (await stage.post("report", report(1, AgentState.RUNNING).wire()))[0] == 200


async def test_a_replayed_or_reordered_request_is_refused_and_costs_the_worker_nothing(
    session: aiohttp.ClientSession,
) -> None:
    async with served(session) as (stage, _):
        await stage.registry.publish(None, WORKERS)
        await stage.post("report", report(0, AgentState.STARTING).wire())
        signer, data = stage.signer(), json.dumps(report(0, AgentState.RUNNING).wire()).encode()
        early, late = (signer.request("POST", REPORT, data) for _ in range(2))
        assert (await stage.send(REPORT, data, late, signer))[0] == 200
        for _ in range(60):  # more than the worker's own burst
            assert (await stage.send(REPORT, data, early, signer))[0] == 409
            assert (await stage.send(REPORT, data, late, signer))[0] == 409
        assert (await stage.post("report", report(0, AgentState.RUNNING).wire()))[0] == 200


async def test_a_request_of_an_earlier_session_is_refused(session: aiohttp.ClientSession) -> None:
    async with served(session) as (before, _):
        await before.registry.publish(None, WORKERS)
        await before.post("report", report(0, AgentState.RUNNING).wire())
        signer, data = before.signer(), json.dumps(report(0, AgentState.RUNNING).wire()).encode()
        caught = signer.request("POST", REPORT, data)
        assert (await before.send(REPORT, data, caught, signer))[0] == 200
    async with served(session) as (after, _):
        await after.registry.publish(None, WORKERS)
        assert (await after.send(REPORT, data, caught, signer))[0] == 409, "the restarted operator remembers nothing"
        assert after.told == []
        signer.follow(after.headers)
        again = signer.request("POST", REPORT, data)
        assert (await after.send(REPORT, data, again, signer))[0] == 200, "the agent goes on in the new session"


@pytest.mark.parametrize("ahead", [5, MAX_COUNTER_STEP - 1, MAX_COUNTER_STEP * 4])
async def test_a_request_from_the_future_shuts_nobody_out(session: aiohttp.ClientSession, ahead: int) -> None:
    """Whoever has the token, such as another pod of the job, may sign any number."""
    async with served(session) as (stage, _):
        await stage.registry.publish(None, WORKERS)
        await stage.post("report", report(0, AgentState.RUNNING).wire())
        other, data = Signer(stage.token, Sender(0, 0, "uid-0-0")), json.dumps(report(0, AgentState.RUNNING).wire())
        other.follow({**stage.headers, "Meshwright-Counter": str(ahead)})
        status, _ = await stage.send(REPORT, data.encode(), other.request("POST", REPORT, data.encode()), other)
        assert status == (200 if ahead < MAX_COUNTER_STEP else 409)
        assert (await stage.post("report", report(0, AgentState.RUNNING).wire()))[0] == 200


async def test_steps_of_the_clock_shut_no_agent_out(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(session) as (stage, _):
        await stage.registry.publish(None, WORKERS)
        for hours in (0, 10, -10, -100, 1):
            monkeypatch.setattr("time.time_ns", lambda hours=hours: (1_800_000_000 + 3600 * hours) * 10**9)
            monkeypatch.setattr("time.time", lambda hours=hours: 1_800_000_000.0 + 3600 * hours)
            for worker in (0, 1):
                assert (await stage.post("report", report(worker, AgentState.RUNNING).wire()))[0] == 200


async def test_a_worker_that_speaks_for_others_is_not_heard(session: aiohttp.ClientSession) -> None:
    async with served(session) as (stage, _):
        await stage.registry.publish(None, WORKERS)
        await stage.post("report", report(1, AgentState.RUNNING).wire())
        session_now = stage.headers["Meshwright-Session"]
        own, failed = stage.signer(1), report(0, AgentState.FAILED)
        data = json.dumps(failed.wire()).encode()
        status, text = await stage.send(REPORT, data, own.request("POST", REPORT, data), own)
        assert (status, "must be about its sender" in text) == (400, True)
        for uid in ("", "uid-1-0", "guessed"):
            forged = Signer(stage.token, Sender(0, 0, uid))
            forged.follow({"Meshwright-Session": session_now, "Meshwright-Counter": "0"})
            data = json.dumps({**failed.wire(), "podUid": uid}).encode()
            status, _ = await stage.send(REPORT, data, forged.request("POST", REPORT, data), forged)
            assert status == (503 if uid else 401)
        assert set(stage.registry.agents().reports) == {1}


async def test_a_pod_of_another_job_is_no_pod_of_this_one(session: aiohttp.ClientSession) -> None:
    async with served(session) as (stage, _):
        stage.cache.put_pod(pod(0, owner="another-job", uid="foreign"))
        message = report(0, AgentState.RUNNING, pod_uid="foreign")
        assert (await stage.post("report", message.wire()))[0] == 503


async def test_what_a_worker_reports_is_bounded(session: aiohttp.ClientSession) -> None:
    async with served(session) as (stage, _):
        await stage.registry.publish(None, WORKERS)
        few = [RankProcess(rank=n, pid=n + 1) for n in range(64)]
        assert (await stage.post("report", report(0, AgentState.RUNNING, ranks=few).wire()))[0] == 200
        many = [RankProcess(rank=n, pid=n + 1) for n in range(65)]
        status, text = await stage.post("report", report(0, AgentState.RUNNING, ranks=many).wire())
        assert (status, "at most 64" in text) == (400, True)
        body = report(0, AgentState.RUNNING).wire()
        bad = (
            {"message": "x" * 2049},
            {"podUid": ""},
            {"ranks": [{"rank": 10**30, "pid": 1}]},
            {"checkpoint": {"step": 1, "time": "x" * 65, "path": "p"}},
            {"checkpoint": {"step": 1, "time": "t", "path": "p" * 4097}},
        )
        for change in bad:
            assert (await stage.post("report", {**body, **change}))[0] in (400, 401)
        assert (await stage.post("report", {**body, "message": "x" * 60_000}))[0] == 413


async def test_a_worker_has_few_connections(session: aiohttp.ClientSession) -> None:
    async with served(session, per_owner=3) as (stage, closed):
        await stage.registry.publish(None, WORKERS)
        data = json.dumps(report(0, AgentState.RUNNING).wire()).encode()
        await stage.post("report", report(0, AgentState.RUNNING).wire())
        clients = [await Client.connect(stage.port) for _ in range(6)]
        for client in clients:
            headers = stage.signer().request("POST", REPORT, data)
            head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            await client.send(HEAD + head.encode() + b"\r\n" + data)
            assert (await client.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        assert closed == ["owner"] * 4


async def test_only_a_new_poll_is_urgent(session: aiohttp.ClientSession) -> None:
    async with served(session) as (stage, _):
        await stage.registry.publish(None, WORKERS)
        for _ in range(3):
            assert (await stage.poll(wait=0.01))[0] == 204
        assert [urgent for _, urgent in stage.told] == [True]
        assert (await stage.poll(wait=0.01, generation=1))[0] == 204
        assert [urgent for _, urgent in stage.told] == [True, True]
        hello = MeshRequest(worker=0, incarnation=0, pod_uid="uid-0-0", address="10.0.0.2", store_port=2001)
        await stage.post("mesh", {**hello.wire(), "waitSeconds": 0.01})
        assert len(stage.told) == 3, "another address is news"


async def test_the_health_server_closes_silent_connections_too() -> None:
    application = health_application(OperatorMetrics(), lambda: True, lambda: "")
    closed: list[str] = []
    limits = ConnectionLimits(head_seconds=3.0, unverified_per_source=4)
    async with serve_application(application, Address("127.0.0.1", 0), limits=limits, closed=closed.append) as port:
        silent = [await Client.connect(port) for _ in range(8)]
        probe = await Client.connect(port)
        await probe.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await probe.ended()).startswith(b"HTTP/1.1 200")
        for client in silent:
            await client.ended()
        assert closed.count("evicted") == 5


async def test_requests_that_fail_inside_the_library_do_not_fill_the_log(
    session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(session) as (stage, _):
        for _ in range(60):
            client = await Client.connect(stage.port)
            await client.send(HEAD + b"Content-Length: 0\r\nExpect: \xff\r\n\r\n")
            assert (await client.ended()).startswith(b"HTTP/1.1 500")
    assert len(caplog.records) <= 20


async def test_a_worker_whose_state_goes_back_and_forth_is_reconciled_less_often(
    session: aiohttp.ClientSession,
) -> None:
    async with served(session) as (stage, _):
        await stage.registry.publish(None, WORKERS)
        now = 1000.0
        stage.registry.rate_limiter._clock = lambda: now
        for number in range(300):
            now += 0.2
            state = (AgentState.STARTING, AgentState.RUNNING)[number % 2]
            assert (await stage.post("report", report(0, state).wire()))[0] == 200
        urgent = [key for key, urgent in stage.told if urgent]
        assert 40 <= len(urgent) <= 80, "not 300 in a minute"
        assert len(stage.told) == 300, "the other changes count later"
        stage.told.clear()
        assert (await stage.post("report", report(1, AgentState.FAILED).wire()))[0] == 200
        assert stage.told[-1][1], "the other workers of the job are heard at once"


async def test_a_generation_that_a_worker_makes_up_leaves_numbers_for_the_next_ones(
    session: aiohttp.ClientSession,
) -> None:
    async with served(session) as (stage, _):
        await stage.registry.publish(None, WORKERS)
        for generation in (7, MAX_GENERATION):
            message = report(0, AgentState.IDLE, generation=generation)
            assert (await stage.post("report", message.wire()))[0] == 200
        assert stage.registry.agents().newest_generation == 7
        stage.signers.clear()
        poll = asyncio.create_task(stage.poll(worker=1, wait=0.1, generation=MAX_GENERATION))
        await poll
        assert stage.registry.agents().newest_generation == 7


async def test_the_slow_bodies_of_one_job_leave_room_for_those_of_others(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright_operator.coordinator.agent_registry.JOB_BODY_BYTES", 1000)
    async with served(session) as (stage, _):
        await stage.registry.publish(None, WORKERS)
        await stage.post("report", report(0, AgentState.RUNNING).wire())
        slow, body = await Client.connect(stage.port), b"{" + b" " * 990 + b"}"
        headers = stage.signer(0).request("POST", REPORT, body)
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        await slow.send(HEAD + head.encode() + b"\r\n{")
        await until(lambda: stage.registry.body_budget.left < 1000)
        assert (await stage.post("report", report(1, AgentState.RUNNING).wire()))[0] == 503
        assert stage.coordinator.registry("another job").body_budget.left == 1000
        slow.writer.close()
        await until(lambda: stage.registry.body_budget.left == 1000)
        assert (await stage.post("report", report(1, AgentState.RUNNING).wire()))[0] == 200


def has_ipv6() -> bool:
    """Whether IPv6 has an address here: where it is turned off, sockets can still be made."""
    with socket.socket(socket.AF_INET6) as probe, contextlib.suppress(OSError):
        probe.bind(("::1", 0))
        return socket.has_dualstack_ipv6()
    return False


async def test_ipv4_clients_reach_a_server_on_every_interface() -> None:
    application = health_application(OperatorMetrics(), lambda: True, lambda: "")
    async with serve_application(application, Address("", 0)) as port:
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            if family is socket.AF_INET6 and not has_ipv6():
                continue
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"\r\n")) == b"HTTP/1.1 200 OK\r\n"
            writer.close()


def test_the_oldest_unverified_connection_gives_way_when_all_are_taken() -> None:
    admission = Admission(ConnectionLimits(total=3, unverified=3), lambda: 0.0)

    class Peer:
        def __init__(self, source: str) -> None:
            self.source, self.closed = source, ""

        def close(self, reason: str) -> None:
            self.closed = reason
            admission.remove(self)

    peers = []
    for number in range(4):
        assert admission.refusal(f"10.0.0.{number}") == ""
        peers.append(Peer(f"10.0.0.{number}"))
        admission.add(peers[-1])
    assert [peer.closed for peer in peers] == ["evicted", "", "", ""]
    for number, peer in enumerate(peers[1:]):
        admission.verify(peer, number)
    assert admission.refusal("10.0.0.9") == "total", "no verified connection is closed for an unverified one"
    admission.remove(peers[1])
    assert admission.refusal("10.0.0.9") == ""
    assert len(admission) == 2


def test_a_bucket_survives_a_clock_that_stands() -> None:
    bucket = TokenBucket(1.0, 2.0, 10.0)
    assert [bucket.take(10.0) for _ in range(3)] == [0.0, 0.0, 1.0]
    assert bucket.take(5.0) > 0
    bucket.give_back()
    assert bucket.take(5.0) == 0.0


def test_descriptors_are_left_for_the_operator_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    soft = [256]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft[0], 1 << 30))
    changes: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: changes.append(wanted))
    for soft[0], left in ((1024, 512), (20_000, 19_488), (1 << 20, 65_536), (256, 128)):
        assert connections_for_descriptors(65_536) == left
    for soft[0], left in ((1023, 512), (1025, 513), (1, 1), (0, 1), (resource.RLIM_INFINITY, 65_536)):
        assert connections_for_descriptors(65_536) == left, "half of few descriptors, all of unlimited ones"
    soft[0] = 1024
    assert connections_for_descriptors(8) == 8, "no more than asked for"
    http_limits.raise_descriptor_limit()
    assert changes == [(http_limits.MAX_DESCRIPTORS, 1 << 30)]
