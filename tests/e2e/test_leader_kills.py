"""Two replicas: the leader is stopped and killed again and again, and training does not notice.

Each way once, and in another test twenty kills and the time between leaders. By default,
`tests/operator/test_replicas.py` has the leader that stops and the one that follows, and `test_recovery` the operator
that is killed while a job trains.
"""

from __future__ import annotations

import signal
from contextlib import AsyncExitStack
from datetime import datetime
from typing import Any

import pytest

from meshwright_cli.child_processes import Program
from meshwright_cli.demo import setup
from meshwright_local.kube.resources import LEASES
from tests.e2e.local_stack import NAMESPACE, Stage, endless, eventually, operator_ports
from tests.operator.balancer import service

LEASE_SECONDS = 5
LEASE_NAME = "meshwright-operator"
GAP_SECONDS = LEASE_SECONDS + 2


class Replicas:
    """Two operator processes behind one address."""

    def __init__(self, stage: Stage, url: str, ports: list[setup.Ports]) -> None:
        self._stage = stage
        self._url = url
        self._ports = ports
        self.programs: dict[str, Program] = {}
        self._directories = {name: stage.directory / f"replica-{name}" for name in "ab"}
        for directory in self._directories.values():
            directory.mkdir(exist_ok=True)

    async def start(self, name: str) -> None:
        """Start a replica, and wait until it is ready."""
        options = ["--coordinator-url", self._url, "--identity", name]
        options += ["--lease-seconds", str(LEASE_SECONDS)]
        self.programs[name] = await setup.start_operator(
            self._stage.programs,
            self._directories[name],
            self._stage.restricted,
            self._ports["ab".index(name)],
            options,
            wait_for_lease=False,
        )

    async def end(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a replica, and wait until it has exited."""
        self.programs[name].signal(number)
        await self.programs[name].process.wait()

    async def lease(self) -> dict[str, Any]:
        """The spec of the Lease."""
        found = await self._stage.client.find(LEASES, LEASE_NAME, NAMESPACE)
        return dict(found["spec"]) if found is not None else {}

    async def leader(self, other_than: str = "") -> str:
        """Wait until a replica leads, and return its name."""

        async def holder() -> str:
            name = str((await self.lease()).get("holderIdentity") or "")
            return "" if name == other_than else name

        return await eventually("a replica leads", holder)


async def lose_leaders(stage: Stage, stops: int, kills: int, workers: int) -> list[float]:
    """Stop and kill the leader of a job this often. Return the seconds between leaders after kills."""
    await stage.kill_operator()
    gaps = []
    async with AsyncExitStack() as stack:
        ports = [stack.enter_context(operator_ports()) for _ in range(2)]
        url = await stack.enter_async_context(service([each.coordinator for each in ports], "https"))
        replicas = Replicas(stage, url, ports)
        await replicas.start("a")
        await replicas.start("b")
        try:
            await stage.apply(endless("replicas", replicas=workers))
            step = await stage.trained("replicas", 3)
            pods = {pod["metadata"]["uid"] for pod in await stage.pods("replicas")}
            for number in range(stops + kills):
                name = await replicas.leader()
                before = await replicas.lease()
                planned = number < stops
                await replicas.end(name, signal.SIGTERM if planned else signal.SIGKILL)
                await replicas.leader(other_than=name)
                if not planned:
                    gaps.append(seconds_between(before["renewTime"], (await replicas.lease())["acquireTime"]))
                await replicas.start(name)
                step = await stage.trained("replicas", step + 1)
            status = await stage.status("replicas")
            assert {pod["metadata"]["uid"] for pod in await stage.pods("replicas")} == pods, "no worker was replaced"
            assert status.mesh is not None
            assert status.mesh.generation == 1, "no rank was restarted"
            assert not status.restarts
            await stage.delete("replicas")
        finally:
            for name, program in replicas.programs.items():
                if program.process.returncode is None:
                    await replicas.end(name, signal.SIGKILL)
            await stage.start_operator()
    return gaps


def seconds_between(before: str, after: str) -> float:
    """Seconds between two times of a Lease."""
    return (datetime.fromisoformat(after) - datetime.fromisoformat(before)).total_seconds()


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_stopped_and_a_killed_leader_restart_no_worker(stage: Stage) -> None:
    await lose_leaders(stage, 1, 1, workers=1)


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_leaders_follow_each_other_within_the_lease(stage: Stage) -> None:
    gaps = await lose_leaders(stage, 2, 20, workers=2)
    assert len(gaps) == 20
    assert max(gaps) <= GAP_SECONDS, gaps
