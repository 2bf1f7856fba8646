"""What may not hold up an agent or its ranks, nor change its exit code: its output, name servers, long answers."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from meshwright.api import labels
from meshwright.protocol.messages import MeshRequest, WorkerReport
from meshwright_worker.agent.coordinator_client import MAX_ANSWER_BYTES, CoordinatorClient, UnavailableError
from meshwright_worker.agent.coordinator_link import Heartbeat
from meshwright_worker.agent.settings import Settings
from tests.agent.support import ROOT, AgentProcess, Coordinator, mesh, until
from tests.patience import patient
from tests.runs import command_run

StartAgent = Callable[..., AgentProcess]

MUCH_OUTPUT = r"""
import sys
sys.stdout.buffer.write("caf\u00e9\n".encode())
for _ in range(80):
    sys.stdout.buffer.write((b"x" * 999 + b"\n") * 100)
"""
"""More than the pipe and the agent's buffers hold."""

SLOW_NAMES = """
import pathlib, socket, time
def getaddrinfo(host, *rest, **more):
    pathlib.Path(__file__).with_name("asked").touch()
    time.sleep(3600)
socket.getaddrinfo = getaddrinfo
"""


@pytest.mark.parametrize(
    ("output", "environment"),
    [(Path("/dev/full"), {}), (None, {"PYTHONIOENCODING": "ascii"})],
    ids=["a full disk", "an encoding without the character"],
)
async def test_output_that_cannot_be_written_holds_up_no_rank(
    coordinator: Coordinator, start_agent: StartAgent, output: Path | None, environment: dict[str, str]
) -> None:
    agent = start_agent(output=output, **environment)
    hellos = await coordinator.gang(1)
    coordinator.announce(mesh(1, command_run([sys.executable, "-c", MUCH_OUTPUT], 1), hellos, 1))
    assert await agent.exit_code() == 0, "the run is complete"
    if output is None:
        assert "[rank 0] café" in agent.log


async def test_a_name_server_that_does_not_answer_holds_up_no_exit(
    coordinator: Coordinator, start_agent: StartAgent, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_NAMES)
    agent = start_agent(
        PYTHONPATH=f"{tmp_path}:{ROOT}:{ROOT / 'worker'}", **{labels.ENV_COORDINATOR_URL: "http://coordinator:1"}
    )
    await until((tmp_path / "asked").exists, 30, lambda: agent.log)
    agent.terminate()
    assert await agent.exit_code() == 143


async def test_an_answer_without_end_is_not_kept() -> None:
    sent = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\n\r\n")
            while sent < 8 * MAX_ANSWER_BYTES:
                writer.write(b"x" * 65536)
                await writer.drain()
                sent += 65536
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    settings = Settings("default", "job", "u1", 0, 0, "pod", "10.0.0.1", f"http://127.0.0.1:{port}", "token")
    request = MeshRequest(worker=0, incarnation=0, pod_uid="pod", address="10.0.0.1", store_port=20000)
    async with server, CoordinatorClient(settings) as client:
        with pytest.raises(UnavailableError, match="more than"):
            await client.mesh(request)
    assert sent < 2 * MAX_ANSWER_BYTES


async def test_the_last_report_ends_in_time_however_many_requests_it_takes() -> None:
    class Slow:
        async def report(self, report: WorkerReport, seconds: float) -> None:
            """Follows another session, then asks for new CAs: each request has its own limit."""
            await asyncio.Event().wait()

    client = cast(CoordinatorClient, Slow())
    heartbeat = Heartbeat(client, lambda: cast(WorkerReport, None), asyncio.Queue(), 1.0, lambda _: None)
    async with asyncio.timeout(patient(1)):
        assert not await heartbeat.send_final_report(0.1)
