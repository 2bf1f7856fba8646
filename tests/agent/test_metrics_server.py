"""The agent's metrics server with clients that keep connections open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest
import pytest_asyncio

from meshwright.schedules.measured import MAX_SLOTS, RankTimeline, read_timelines
from meshwright_worker.agent import metrics_server
from meshwright_worker.agent.metrics import WorkerMetrics
from meshwright_worker.rank.messages import StepDone, decode, encode
from meshwright_worker.rank.task import StepReport
from tests.patience import patient


@pytest_asyncio.fixture
async def port() -> AsyncIterator[int]:
    server = await metrics_server.start_metrics_server(WorkerMetrics("team", "train"), "127.0.0.1", 0)
    assert server is not None
    yield server.addresses[0][1]
    await server.cleanup()


async def test_the_latest_timed_slots_of_each_rank_are_served() -> None:
    metrics = WorkerMetrics("team", "train")
    metrics.generation(1, [0, 1], restart=False)
    server = await metrics_server.start_metrics_server(metrics, "127.0.0.1", 0)
    assert server is not None
    url = f"http://127.0.0.1:{server.addresses[0][1]}/timeline"
    report = StepReport(3, 2.5, 1.0, 1e-3, 4096, 96, 0.5, 0.01)
    one = RankTimeline(3, 1, 2, [("F1.0", -300, 100), ("B1.0", -200, 150)])
    try:
        async with aiohttp.ClientSession() as session:

            async def served() -> object:
                async with session.get(url) as response:
                    return await response.json()

            assert await served() == {"ranks": {}}
            # As the agent gets it from a rank; later steps without slots change nothing.
            line = decode(encode(StepDone(replace(report, timeline=one))))
            assert isinstance(line, StepDone)
            metrics.step(1, line.report)
            metrics.step(1, replace(report, step=4))
            metrics.step(0, replace(report, timeline=replace(one, slots=one.slots * MAX_SLOTS)))
            assert read_timelines(await served()) == [one]
            metrics.generation(2, [0, 1], restart=True)
            assert await served() == {"ranks": {}}
    finally:
        await server.cleanup()


async def healthy(port: int) -> bool:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/healthz") as response:
        return await response.text() == "ok\n"


async def closed(reader: asyncio.StreamReader) -> bool:
    """Whether the server has closed the connection."""
    with contextlib.suppress(TimeoutError, ConnectionError):
        await asyncio.wait_for(reader.read(), 0.01)
        return True
    return False


async def test_no_more_than_32_connections_are_open_and_a_scrape_is_answered_all_the_same(port: int) -> None:
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
    assert await healthy(port)
    async with asyncio.timeout(patient(5)):
        while True:
            left = [pair for pair in opened if not (pair[0].at_eof() or pair[0].exception() or await closed(pair[0]))]
            if len(left) <= metrics_server.MAX_CONNECTIONS:
                break
    assert metrics_server.MAX_CONNECTIONS == 32
    assert opened[-1] in left, "the oldest ones are closed"
    for _, writer in opened:
        writer.close()


@pytest.mark.parametrize(
    "request_part", [b"", b"GET /metrics HTTP/1.1\r\nHost: x\r\n", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"]
)
async def test_every_connection_is_closed_in_time(
    request_part: bytes, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert metrics_server.CONNECTION_SECONDS <= 120
    monkeypatch.setattr(metrics_server, "CONNECTION_SECONDS", 2.0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_part)
    async with asyncio.timeout(patient(10)):
        answer = await reader.read()
    assert answer.endswith(b"ok\n") == request_part.endswith(b"\r\n\r\n"), "what was asked completely is answered"
    assert await healthy(port)
    writer.close()


async def test_a_client_that_reads_nothing_is_closed_too(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "CONNECTION_SECONDS", 0.5)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(patient(10)):
        while not writer.transport.is_closing():
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
            await asyncio.sleep(0.05)
    writer.close()
