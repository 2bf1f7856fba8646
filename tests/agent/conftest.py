"""Fixtures: a coordinator per test, and agents that never outlive it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.agent.support import AgentProcess, Coordinator, alive
from tests.reserved_ports import reserved_ports

StartAgent = Callable[..., AgentProcess]


@pytest_asyncio.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    with reserved_ports(1) as (port,):
        server = Coordinator(port=port)
        await server.start()
        yield server
        await server.stop()
    assert not server.problems


@pytest.fixture
def start_agent(coordinator: Coordinator, tmp_path: Path) -> Iterator[StartAgent]:
    agents: list[AgentProcess] = []

    def start(worker: int = 0, output: Path | None = None, *, torch: bool = False, **environment: str) -> AgentProcess:
        agent = AgentProcess(coordinator, tmp_path, worker, output, torch=torch, **environment)
        agents.append(agent)
        return agent

    yield start
    for agent in agents:
        if alive(agent.process.pid):
            agent.process.kill()
        agent.process.wait()
        print(f"--- worker {agent.worker}\n{agent.log}")
        assert "t0ken" not in agent.log
