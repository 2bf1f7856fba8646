"""The groups of a mesh: connections, time limits, and communicators that exist before the first step."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright_worker.distributed.mesh import (
    STEP_TIMEOUT,
    join_mesh,
    new_host_group,
    set_collective_timeout,
)
from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer.train import build_trainer
from meshwright_worker.trainer.warm_up import groups_of_steps, warm_up_groups
from tests.distributed.comm_counter import Counting
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool


def open_sockets() -> set[str]:
    links = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            links.add(str(path.readlink()))
    return {link for link in links if link.startswith("socket:")}


def connections_of_groups(task: RankTask) -> tuple[int, int, int]:
    """New sockets of a group whose ranks connect at once, and of one whose ranks connect when they communicate: after
    its creation, and after a collective.
    """
    with join_mesh(task):
        before = open_sockets()
        kept = dist.new_group(backend="gloo")
        eager = open_sockets() - before
        before = open_sockets()
        lazy = new_host_group(timedelta(seconds=60))
        created = open_sockets() - before
        value = torch.tensor([float(task.rank)])
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=lazy)
        assert float(value) == task.world_size - 1
        used = open_sockets() - before
        dist.barrier(group=kept)
        return len(eager), len(created), len(used)


def test_a_group_for_checkpoints_connects_few_ranks(pool: RankPool) -> None:
    for eager, created, used in pool.run(connections_of_groups, small_run(data=8)):
        assert eager >= 7
        assert created <= 3  # a listener, and connections of neighbors that are further on
        assert used <= 4


@dataclass
class Limits:
    world: timedelta
    checkpoint: timedelta
    stepping: timedelta
    checkpoint_while_stepping: timedelta


def limit_of(group: dist.ProcessGroup) -> timedelta:
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit


def limits_of_groups(task: RankTask) -> Limits:
    with join_mesh(task) as mesh:
        world = dist.group.WORLD
        assert world is not None
        first = limit_of(world), limit_of(mesh.checkpoint_group)
        set_collective_timeout(STEP_TIMEOUT)
        return Limits(*first, limit_of(world), limit_of(mesh.checkpoint_group))


def test_each_purpose_has_its_own_time_limit(pool: RankPool) -> None:
    for limits in pool.run(limits_of_groups, small_run(data=2)):
        assert limits.world == timedelta(minutes=30)
        assert limits.stepping == STEP_TIMEOUT < limits.world
        assert limits.checkpoint == limits.checkpoint_while_stepping == timedelta(minutes=60)


def use_all_groups(task: RankTask) -> tuple[int, int]:
    with join_mesh(task) as mesh:
        build_trainer(task.run, mesh)
        with Counting() as counting:
            warm_up_groups(mesh.device)
        return len(groups_of_steps()), sum(counting.traffic.calls.values())


def test_warm_up_uses_every_group_of_steps_once(pool: RankPool) -> None:
    run = small_run(tensor=2, pipeline=2, data=2, zero=1, micro_batches=4)
    for groups, collectives in pool.run(use_all_groups, run):
        assert groups == collectives >= 6
