"""Replica groups of torchft on a worker: worlds of their own, ranks that go on, and the lighthouse."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from meshwright.protocol.messages import AgentState, FailureKind, MeshDocument, MeshRequest, ReplicaGroup, ReplicaGroups
from meshwright_worker.agent.lighthouse import MIN_REPLICAS, Lighthouse, LighthouseError
from meshwright_worker.agent.rank_environment import rank_environment
from meshwright_worker.agent.state_machine import KillRanks, StartRanks, TerminateRanks, build_report
from tests.agent.support import mesh, until
from tests.agent.test_parts import settings
from tests.agent.test_state_machine import Driver
from tests.runs import command_run


def document(generation: int, since: tuple[int, int], lighthouse: str = "10.0.0.0:3000") -> MeshDocument:
    """Four workers with two ranks each, and two groups of two workers."""
    hellos = [
        MeshRequest(worker=w, incarnation=0, pod_uid="uid", address=f"10.0.0.{w}", store_port=2000 + w)
        for w in range(4)
    ]
    run = command_run(["x"], 8).model_copy(update={"replica_group_ranks": 4})
    groups = [
        ReplicaGroup(master_address=f"10.0.0.{2 * group}", master_port=2000 + 2 * group, since=begun)
        for group, begun in enumerate(since)
    ]
    update = {"replica_groups": ReplicaGroups(ranks=4, groups=groups, lighthouse=lighthouse), "run_version": 2}
    return mesh(generation, run, hellos, 2).model_copy(update=update)


def test_each_group_is_a_world_of_its_own() -> None:
    told = document(3, (3, 3))
    got = rank_environment(told, told.members[3], 7, settings())
    expected = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.2",
        "MASTER_PORT": "2002",
        "REPLICA_GROUP_ID": "1",
        "NUM_REPLICA_GROUPS": "2",
        "TORCHFT_LIGHTHOUSE": "http://10.0.0.0:3000",
        "MESHWRIGHT_DATA_PARALLEL_RANK": "7",
    }
    assert {name: got.get(name) for name in expected} == expected
    assert rank_environment(told, told.members[0], 0, settings())["RANK"] == "0"


def test_a_lighthouse_of_the_jobs_own_stays() -> None:
    told = document(3, (3, 3), lighthouse="")
    assert "TORCHFT_LIGHTHOUSE" not in rank_environment(told, told.members[3], 7, settings())


def test_the_ranks_of_a_group_go_on_and_report_for_the_new_generation() -> None:
    driver = Driver(worker=1)
    driver.start(document(1, (1, 1)))
    driver.now += 500.0
    assert driver.state_machine.on_mesh(document(2, (1, 2)), driver.now) == []
    told = build_report(driver.state_machine, driver.now + 1)
    assert (told.generation, told.state) == (2, AgentState.RUNNING)
    assert [(rank.rank, rank.idle_seconds) for rank in told.ranks] == [(2, 1.0), (3, 1.0)], "counted anew"


def test_ranks_that_went_on_are_still_heard() -> None:
    driver = Driver(worker=1)
    driver.start(document(1, (1, 1)))
    driver.state_machine.on_mesh(document(2, (1, 2)), driver.now)
    driver.exit(2, 1, ["KeyError: 'x'"], generation=1)
    told = build_report(driver.state_machine, driver.now)
    assert (told.generation, told.failure, told.message) == (
        2,
        FailureKind.ERROR,
        "rank 2 exited with code 1: KeyError: 'x'",
    )


def test_ranks_of_the_group_that_restarts_are_stopped_first() -> None:
    driver = Driver(worker=2)
    driver.start(document(1, (1, 1)))
    assert driver.state_machine.on_mesh(document(2, (1, 2)), driver.now) == [TerminateRanks((4, 5))]
    assert driver.after(10.0) == [KillRanks((4, 5))]
    driver.exit(4, -9)
    (start,) = driver.exit(5, -9)
    assert isinstance(start, StartRanks)
    assert start.document.generation == 2


def test_a_new_agent_of_a_group_starts_its_ranks() -> None:
    (start,) = Driver(worker=2).state_machine.on_mesh(document(2, (1, 2)), 0.0)
    assert isinstance(start, StartRanks)


def test_a_rank_that_failed_meanwhile_is_reported_for_the_new_generation() -> None:
    driver = Driver(worker=1)
    driver.start(document(1, (1, 1)))
    driver.exit(3, 1, ["KeyError: 'x'"])
    driver.state_machine.on_mesh(document(2, (1, 2)), driver.now)
    driver.after(10.0)
    driver.exit(2, -9)
    told = build_report(driver.state_machine, driver.now)
    assert (told.generation, told.state, told.failure) == (2, AgentState.FAILED, FailureKind.ERROR)


SERVER = """#!/bin/sh
echo "$@" > "$(dirname "$0")/arguments"
exec sleep 600
"""


@pytest.mark.parametrize("beside", [True, False])
async def test_the_lighthouse_is_that_of_the_commands_environment(tmp_path: Path, *, beside: bool) -> None:
    program = tmp_path / "torchft_lighthouse"
    program.write_text(SERVER)
    program.chmod(0o755)
    lighthouse = Lighthouse()
    port = lighthouse.port
    command = [str(tmp_path / "python") if beside else "python", "train.py"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin" if not beside else "/usr/bin:/bin", MIN_REPLICAS: "2"}
    try:
        await lighthouse.start(command, environment)
        await until(lambda: (tmp_path / "arguments").exists() and "\n" in (tmp_path / "arguments").read_text(), 20)
        assert (tmp_path / "arguments").read_text() == f"--min_replicas 2 --bind [::]:{port}\n".replace(
            "[::]", "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"
        )
        (tmp_path / "arguments").unlink()
        await lighthouse.start(command, environment)
        assert not (tmp_path / "arguments").exists(), "it runs already"
    finally:
        lighthouse.stop()
    assert lighthouse.port == port


async def test_an_image_without_torchft_is_named(tmp_path: Path) -> None:
    lighthouse = Lighthouse()
    try:
        with pytest.raises(LighthouseError, match="needs torchft_lighthouse next to /x/python or on the PATH.*install"):
            await lighthouse.start(["/x/python"], {"PATH": str(tmp_path)})
    finally:
        lighthouse.stop()
