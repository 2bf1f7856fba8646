"""The processes that a launcher owns: who goes on in the next generation, and the store of an earlier one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from meshwright.protocol.messages import MeshDocument, MeshRequest, ReplicaGroup, ReplicaGroups
from meshwright_worker.agent.launcher import Launcher, LaunchError
from meshwright_worker.agent.rank_process import Pipe, RankHandle
from meshwright_worker.agent.settings import Settings
from meshwright_worker.agent.state_machine import StartRanks
from tests.agent.support import mesh, training_run
from tests.runs import command_run


class Stores:
    """In place of a fork server: counts the stores that live."""

    def __init__(self) -> None:
        self.live: set[int] = set()

    async def ready(self) -> None:
        """It is always ready."""

    async def stop(self) -> None:
        self.live.clear()

    async def fork_store(self, port: int, ranks: int) -> Callable[[], None]:
        self.live.add(port)
        return lambda: self.live.discard(port)


def document(generation: int) -> MeshDocument:
    hellos = [
        MeshRequest(worker=worker, incarnation=0, pod_uid="uid", address=f"10.0.0.{worker}", store_port=20000)
        for worker in range(2)
    ]
    made = mesh(generation, training_run(10, data_parallel=4), hellos, 2)
    return made.model_copy(update={"in_memory": True})


@pytest.fixture
def launcher() -> Launcher:
    settings = Settings("default", "job", "u1", 0, 0, "pod", "10.0.0.1", "http://127.0.0.1:1", "token")
    made = Launcher(settings, asyncio.Queue(), {})
    cast(Any, made)._server = Stores()
    return made


def handle(rank: int, pid: int) -> RankHandle:
    async def wait() -> int:
        return 0

    made = RankHandle(rank, pid, wait, lambda: None, lambda: None, cast(Pipe, None), None)
    made.current.number, made.current.rank = 1, rank
    return made


async def test_a_pod_that_is_not_rank_0_s_any_more_ends_its_store(launcher: Launcher) -> None:
    stores = cast(Any, launcher)._server
    first = document(1).model_copy(update={"master_port": launcher.store_port})
    await launcher.prepare(StartRanks(first, first.members[0]))
    assert stores.live == {first.master_port}
    second = document(2)
    await launcher.prepare(StartRanks(second, second.members[1]))
    assert stores.live == set()
    await launcher.close()


async def test_processes_that_go_on_are_those_of_the_next_generation_before_they_know_it(launcher: Launcher) -> None:
    handles = {2: handle(2, 102), 3: handle(3, 103)}
    cast(Any, launcher)._handles = dict(handles)
    second = document(2)
    start = StartRanks(second, second.members[0], resumed=(1,), shift=-2)
    launcher.take_over(start)
    assert [(one.current.rank, one.current.number) for one in handles.values()] == [(0, 1), (1, 2)]
    launcher.remove(102)
    with pytest.raises(LaunchError, match="rank 0 cannot continue: its process has ended"):
        launcher.resume(replace(start, resumed=(0, 1)), 0)
    assert launcher.resume(start, 1) == 103
    await launcher.close()


def groups_document(port: int, lighthouse: str = "") -> MeshDocument:
    """Two replica groups of two workers with two ranks each; the store of the second is on `port`."""
    hellos = [
        MeshRequest(worker=worker, incarnation=0, pod_uid="uid", address=f"10.0.0.{worker}", store_port=20000)
        for worker in range(4)
    ]
    groups = [
        ReplicaGroup(master_address=f"10.0.0.{2 * group}", master_port=port if group else 20001, since=1)
        for group in range(2)
    ]
    run = command_run(["no-such-python", "train.py"], 8).model_copy(update={"replica_group_ranks": 4})
    made = mesh(1, run, hellos, 2)
    return made.model_copy(update={"replica_groups": ReplicaGroups(ranks=4, groups=groups, lighthouse=lighthouse)})


@pytest.mark.parametrize(
    ("worker", "own_port", "released"),
    [(2, True, True), (3, True, False), (2, False, False)],
    ids=["the group's first rank", "another worker of the group", "an older port of the pod"],
)
async def test_a_replica_group_s_first_pod_frees_the_port_of_its_store(
    launcher: Launcher, worker: int, *, own_port: bool, released: bool
) -> None:
    before = launcher.store_port
    made = groups_document(before if own_port else before - 1)
    await launcher.prepare(StartRanks(made, made.members[worker]))
    assert (launcher.store_port != before) is released


async def test_only_the_pod_of_rank_0_runs_the_lighthouse_and_reports_that_it_cannot(launcher: Launcher) -> None:
    made = groups_document(launcher.store_port, lighthouse="10.0.0.0:29510")
    await launcher.prepare(StartRanks(made, made.members[2]))
    with pytest.raises(LaunchError, match="torchft_lighthouse"):
        await launcher.prepare(StartRanks(made, made.members[0]))
    none = groups_document(launcher.store_port)
    await launcher.prepare(StartRanks(none, none.members[0]))


async def test_a_command_that_starts_ranks_itself_is_named_in_the_log(
    launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    hello = MeshRequest(worker=0, incarnation=0, pod_uid="uid", address="10.0.0.0", store_port=20000)
    for command, words in (
        ([sys.executable, "-c", "pass"], ""),
        (["sh", "-c", "true || torchrun train.py"], "runs `torchrun` in each rank"),
    ):
        made = mesh(1, command_run(command, 2), [hello], 2)
        for rank in (0, 1):
            await launcher.spawn(StartRanks(made, made.members[0]), rank)
        found = [record.message for record in caplog.records if "runtime.command" in record.message]
        assert len(found) == bool(words)
        assert all(words in message for message in found)
    await launcher.close()
