"""Replica groups of torchft (`runtime.framework: TorchFT`): which of them go on when others restart.

Each group is a world of its own, and torchft averages gradients between groups. If ranks or pods of a group are lost,
only that group restarts and copies its state from another one. A group goes on only if all its agents have reported
that its ranks run, and if the lighthouse, with which groups find each other, has not moved.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.addresses import join_host_port, split_host_port
from meshwright.api import labels
from meshwright.api.status import MeshStatus, ReplicaGroupsStatus, ReplicaGroupStatus
from meshwright.protocol.messages import AgentState, ReplicaGroup, ReplicaGroups
from meshwright.protocol.run_config import CommandRun
from meshwright.rules.recovery_times import LOSSES
from meshwright_operator.decide.observed import Observed, PodState, Worker

SHOWN = 4
"""Groups that an event names."""


def ranks_of_group(observed: Observed) -> int | None:
    """Ranks of each replica group; None if all ranks form one world."""
    return observed.run.replica_group_ranks if isinstance(observed.run, CommandRun) else None


def next_groups(observed: Observed, assigned: Mapping[int, int], number: int, cause: str) -> ReplicaGroupsStatus | None:
    """The groups of generation `number`. None without groups. `assigned` has the plan's worker of each worker."""
    if (ranks := ranks_of_group(observed)) is None:
        return None
    members: dict[int, list[Worker]] = {}
    for worker in sorted(observed.workers, key=lambda worker: assigned[worker.index]):
        first_rank = observed.plan.workers[assigned[worker.index]].start
        members.setdefault(first_rank // ranks, []).append(worker)
    lighthouse, before = _lighthouse(observed, members[0][0]), observed.mesh.replica_groups
    same = before is not None and (before.lighthouse, len(before.groups)) == (lighthouse, len(members))
    may_go_on = same and cause in LOSSES
    groups = []
    for group, workers in sorted(members.items()):
        if may_go_on and before is not None and all(_runs(worker, observed) for worker in workers):
            groups.append(before.groups[group])
        else:
            groups.append(ReplicaGroupStatus(master=_store(observed, workers[0]), since=number))
    return ReplicaGroupsStatus(lighthouse=lighthouse, groups=groups)


def _runs(worker: Worker, observed: Observed) -> bool:
    """Whether the ranks of a worker run since the current generation, or go on since an earlier one."""
    received = observed.agents.reports.get(worker.index)
    if received is None or worker.state is not PodState.RUNNING:
        return False
    report, current = received.report, (worker.incarnation, observed.mesh.generation)
    return (report.incarnation, report.generation) == current and report.state is AgentState.RUNNING


def _lighthouse(observed: Observed, first: Worker) -> str:
    """Where the agent of rank 0 runs the lighthouse. Empty if the job names another one, or its agent cannot."""
    if any(variable.name == labels.ENV_LIGHTHOUSE for variable in observed.spec.workers.env):
        return ""
    port = observed.agents.waiting_agents[first.index].lighthouse_port
    return join_host_port(first.pod.address, port) if first.pod is not None and port is not None else ""


def _store(observed: Observed, worker: Worker) -> str:
    assert worker.pod is not None
    return join_host_port(worker.pod.address, observed.agents.waiting_agents[worker.index].store_port)


def groups_of(observed: Observed, mesh: MeshStatus) -> ReplicaGroups | None:
    """The groups as agents receive them.

    Raises:
        ValueError: the status is damaged.
    """
    ranks, status = ranks_of_group(observed), mesh.replica_groups
    if ranks is None or status is None:
        return None
    groups = []
    for one in status.groups:
        address, port = split_host_port(one.master)
        groups.append(ReplicaGroup(master_address=address, master_port=port, since=one.since))
    return ReplicaGroups(ranks=ranks, groups=groups, lighthouse=status.lighthouse)


def going_on(mesh: MeshStatus) -> list[int]:
    """The groups whose ranks go on since an earlier generation."""
    groups = mesh.replica_groups.groups if mesh.replica_groups is not None else []
    return [index for index, group in enumerate(groups) if group.since < mesh.generation]


def describe(mesh: MeshStatus) -> str:
    """Which groups restart while others go on."""
    groups = mesh.replica_groups.groups if mesh.replica_groups is not None else []
    restarting = [str(index) for index, group in enumerate(groups) if group.since == mesh.generation]
    names = ", ".join(restarting[:SHOWN]) + (f" and {len(restarting) - SHOWN} more" if len(restarting) > SHOWN else "")
    one = len(restarting) == 1
    subject = f"Replica group {names} restarts" if one else f"Replica groups {names} restart"
    return f"{subject}. {len(groups) - len(restarting)} of {len(groups)} groups keep their ranks"
