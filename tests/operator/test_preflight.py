"""What follows from the checks of pods: condition, event, and starts that fatal findings prevent."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.protocol.preflight import Finding, PreflightReport
from tests.operator.test_elastic import edit
from tests.operator.test_gang_races import small
from tests.operator.world import JOBS, Agent, World

MEMLOCK = Finding(check="LockedMemory", message="the limit is 8192 KiB", fix="set an unlimited memlock")


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> dict[str, PreflightReport | None]:
    """Pod -> the result of its checks, and `*` for all others."""
    found: dict[str, PreflightReport | None] = {"*": PreflightReport()}
    plain = Agent.report

    def report(agent: Agent) -> Any:
        result = found.get(agent.pod.name, found["*"])
        return plain(agent).model_copy(update={"preflight": result})

    monkeypatch.setattr(Agent, "report", report)
    return found


def condition(world: World) -> tuple[str, str]:
    found = world.condition("job", "PreflightPassed")
    return found["status"], found["reason"]


async def test_pods_that_pass_are_reported(reports: dict[str, PreflightReport | None]) -> None:
    world = World(40, nodes=4, work=10**6)
    world.submit(small("job", 2))
    await world.run(30)
    assert world.true("job", "Ready")
    assert condition(world) == ("True", "PreflightPassed")


async def test_a_finding_warns_once_and_prevents_nothing(reports: dict[str, PreflightReport | None]) -> None:
    reports["job-w1-0"] = PreflightReport(findings=[MEMLOCK])
    world = World(41, nodes=4, work=10**6)
    world.submit(small("job", 2))
    await world.run(60)
    assert world.true("job", "Ready")
    assert condition(world) == ("False", "PreflightFailed")
    message = world.condition("job", "PreflightPassed")["message"]
    assert message.startswith("LockedMemory: ")
    assert "job-w1-0 on n" in message
    assert "Fix: set an unlimited memlock" in message
    assert world.operators[0].notes.reasons("job").count("PreflightFailed") == 1
    reports["job-w1-0"] = PreflightReport()
    await world.run(30)
    assert condition(world) == ("True", "PreflightPassed")


async def test_a_fatal_finding_moves_the_job_to_other_nodes(reports: dict[str, PreflightReport | None]) -> None:
    reports["job-w0-0"] = PreflightReport(findings=[MEMLOCK])
    world = World(42, nodes=6, work=10**6)
    world.submit(small("job", 2, preflight={"fatal": ["LockedMemory"]}))
    await world.run(300)
    assert "PreflightFailed" in world.operators[0].notes.reasons("job")
    assert world.true("job", "Ready")
    assert (0, 0) not in {(worker, incarnation) for _, _, worker, incarnation in world.started}, "no rank started there"
    assert condition(world) == ("True", "PreflightPassed")


async def test_a_node_that_is_repaired_is_tried_again_after_minutes(
    reports: dict[str, PreflightReport | None],
) -> None:
    reports["*"] = PreflightReport(findings=[MEMLOCK])
    world = World(46, nodes=2, work=10**6)
    world.submit(small("job", 2, preflight={"fatal": ["LockedMemory"]}))
    await world.run(20)
    assert "PreflightFailed" in world.operators[0].notes.reasons("job")
    reports["*"] = PreflightReport()
    await world.run(250)
    assert world.true("job", "Ready")


async def test_an_edit_that_ignores_the_finding_starts_the_job_on_the_same_nodes(
    reports: dict[str, PreflightReport | None],
) -> None:
    reports["*"] = PreflightReport(findings=[MEMLOCK])
    world = World(47, nodes=2, work=10**6)
    world.submit(small("job", 2, preflight={"fatal": ["LockedMemory"]}))
    await world.run(60)
    assert not world.true("job", "Ready")
    edit(world, "job", preflight={"mode": "Ignore"})
    await world.run(40)
    assert world.true("job", "Ready")


async def test_agents_that_never_check_are_not_waited_for_long(reports: dict[str, PreflightReport | None]) -> None:
    reports["*"] = None
    world = World(43, nodes=4, work=10**6)
    world.submit(small("job", 2, preflight={"fatal": ["Volume"]}))
    await world.run(10)
    assert not world.true("job", "Ready")
    await world.run(60)
    assert world.true("job", "Ready")
    assert not [one for one in world.status("job")["conditions"] if one["type"] == "PreflightPassed"]


async def test_different_volumes_are_found_across_workers(reports: dict[str, PreflightReport | None]) -> None:
    reports["*"] = PreflightReport(volume="a" * 32)
    reports["job-w1-0"] = PreflightReport(volume="b" * 32)
    world = World(44, nodes=8, work=10**6)
    world.submit(small("job", 3))
    await world.run(40)
    message = world.condition("job", "PreflightPassed")["message"]
    assert "job-w1-0" in message
    assert "is not that of worker 0" in message
    assert "ReadWriteMany" in message


async def test_checks_can_be_turned_off_while_the_job_runs(reports: dict[str, PreflightReport | None]) -> None:
    reports["*"] = PreflightReport(findings=[MEMLOCK])
    world = World(45, nodes=4, work=10**6)
    world.submit(small("job", 2))
    await world.run(40)
    assert condition(world) == ("False", "PreflightFailed")
    revision = world.status("job")["plan"]["revision"]
    edit(world, "job", preflight={"ignored": ["LockedMemory"]})
    await world.run(40)
    assert condition(world) == ("True", "PreflightPassed")
    edit(world, "job", preflight={"mode": "Ignore", "numaBinding": False})
    await world.run(40)
    assert not [one for one in world.status("job")["conditions"] if one["type"] == "PreflightPassed"]
    assert world.status("job")["plan"]["revision"] == revision
    assert world.status("job")["mesh"]["generation"] == 1, "an edit of the checks restarts nothing"
    world.crash("job-w0-0")
    await world.run(60)
    registry = world.operators[0].coordinator.registry(world.cluster.objects[f"{JOBS}/job"]["metadata"]["uid"])
    assert registry.document is not None
    assert registry.document.numa_binding is False
