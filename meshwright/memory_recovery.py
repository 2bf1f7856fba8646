"""Recovery in memory: which ranks have the same training state, and from whom a new rank gets its own. Pure.

When ranks are lost, the others keep their processes and their state. They go on from the newest step that any of them
has completed. Before an update every rank has the step's reduced gradients, so a rank that is one step behind makes the
update itself. A new rank receives its state from a rank that has the same. If none has, all ranks go back to copies in
host memory, if there are any (`meshwright.memory_copies`).

With `recovery.onReplicaLoss: Continue` the next generation may have another number of replicas: those that are left go
on, and a replica joins them again. A rank then keeps its place in its replica, and gets another number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshwright.api.data_parallel import DataParallelEngine, GradientCompression
from meshwright.api.status import parse_ranks
from meshwright.api.training import OptimizerName, OptimizerOffload
from meshwright.memory_copies import find_copies, format_holders, parse_holders
from meshwright.protocol.messages import HeldState, MemoryRecovery
from meshwright.protocol.run_config import NativeRun, Run
from meshwright.schedules.registry import kind_of

MAX_NAMED = 4
"""Maximum number of ranks in a message."""


def unsupported(run: Run, *, copies: bool = False, continues: bool = False) -> str:
    """Why the ranks of a run cannot recover in memory; empty if they can.

    Args:
        run: What the ranks run.
        copies: Whether they make copies.
        continues: Whether replicas come and go. The last one that is left then holds its state for those that join.
    """
    if not isinstance(run, NativeRun):
        return "`runtime.command` has its own state"
    training = run.training
    reasons = {
        "`training.outer` has a state of each island": training.outer is not None,
        f"`parallelism.schedule: {run.parallelism.order.value}` has a weight version of each stage": run.pipeline > 1
        and kind_of(run.parallelism.order).asynchronous,
        "`training.fp8` has scales of each rank": training.fp8 is not None,
        "`dataParallel.compression` has residuals of each rank": run.parallelism.data_parallel.compression
        is not GradientCompression.NONE,
        "the update of `training.optimizer.name: Muon` needs all ranks": training.optimizer.name is OptimizerName.MUON,
        "`training.optimizer.offload` has its state elsewhere": training.optimizer.offload is not OptimizerOffload.NONE,
        "`training.anomalies` may go back to a checkpoint": training.anomalies is not None,
        "`training.parameterOffload` has its state elsewhere": training.parameter_offload,
    }
    found = next((reason for reason, applies in reasons.items() if applies), "")
    world = run.layout.world_size
    if not found and ((world > 1 and copies) or (continues and not cannot_continue(run))):
        return ""
    if not found and len({state_of(run, rank) for rank in range(world)}) == world:
        found = "every rank has state that no other rank has: set `recovery.copyEverySteps`, or use more replicas"
    return found


def cannot_continue(run: Run) -> str:
    """Why ranks cannot keep their state when the number of replicas changes; empty if they can."""
    if run.parallelism.data_parallel_engine is not DataParallelEngine.ALL_REDUCE:
        return "ZeRO divides the state by the number of replicas"
    return "expert parallelism divides experts by the number of replicas" if run.layout.expert > 1 else ""


def keeps_place(run: Run, before: int, rank: int) -> bool:
    """Whether rank `before` of a generation with another number of replicas has the same place in its replica as `rank`
    of this run: the ranks of a replica are consecutive.
    """
    return (before - rank) % run.layout.replica_size == 0


def state_of(run: Run, rank: int) -> tuple[int, ...]:
    """Name the state of a rank: ranks of a run with the same name have the same parameters and moments."""
    layout = run.layout
    where = layout.coordinates(rank)
    replica = where.data * layout.context + where.context
    part = 0
    if run.parallelism.data_parallel_engine is not DataParallelEngine.ALL_REDUCE:
        # Sets of shards have neighbors. Experts are sharded over other ranks than the dense parameters.
        size = (run.parallelism.data_parallel.shard_size or layout.data) * layout.context
        part = replica % size if layout.expert == 1 else replica
    return where.pipeline, where.tensor, part, replica % layout.expert


def plan_recovery(run: Run, generation: int, held: Mapping[int, HeldState]) -> MemoryRecovery | str:
    """Plan how all ranks go on from the states that ranks hold, some since `generation`; or say why they cannot.

    A rank whose state is older than one step before the newest gets that of another, like a new one.
    """
    if not held:
        return "no rank has kept its state"
    step = max(state.step for state in held.values())
    kept = [rank for rank, state in sorted(held.items()) if reaches(state, step)]
    leader = next(rank for rank in kept if held[rank].step == step)
    memory = MemoryRecovery(generation=generation, step=step, leader=leader, ranks=format_ranks(kept))
    lost = [rank for rank, source in transfers(run, memory).items() if source is None]
    if not lost:
        return memory
    return _plan_with_copies(run, generation, held) or f"no rank is left that has the state of {_named(lost)}"


def _plan_with_copies(run: Run, generation: int, held: Mapping[int, HeldState]) -> MemoryRecovery | None:
    world = run.layout.world_size
    if (found := find_copies(world, held)) is None:
        return None
    step, holders = found
    kept = [rank for rank in range(world) if rank not in holders]
    return MemoryRecovery(
        generation=generation, step=step, leader=kept[0], ranks=format_ranks(kept), holders=format_holders(holders)
    )


def transfers(run: Run, memory: MemoryRecovery) -> dict[int, int | None]:
    """Each rank that has no state -> the rank that sends it; None if no rank has the same."""
    kept = keeping_ranks(memory)
    if memory.holders is not None:
        holders = parse_holders(memory.holders)
        return {rank: holders.get(rank) for rank in range(run.layout.world_size) if rank not in kept}
    sources: dict[tuple[int, ...], int] = {}
    for rank in sorted(kept):
        sources.setdefault(state_of(run, rank), rank)
    return {rank: sources.get(state_of(run, rank)) for rank in range(run.layout.world_size) if rank not in kept}


def describe(run: Run, memory: MemoryRecovery) -> str:
    """Describe a recovery for users."""
    new = transfers(run, memory)
    world = run.layout.world_size
    text = f"{world - len(new)} of {world} ranks continue from step {memory.step}, which they have in memory"
    if memory.holders is not None:
        text = f"All ranks go back to step {memory.step}, of which they have copies in host memory"
    first = next(iter(new.items()), None)
    if first is None:
        return text
    return f"{text}; {_named(list(new))} {'get' if len(new) > 1 else 'gets'} the state of rank {first[1]}" + (
        " and others" if len(set(new.values())) > 1 else ""
    )


def keeping_ranks(memory: MemoryRecovery) -> frozenset[int]:
    """The ranks that keep their processes and state."""
    kept: set[int] = set()
    for part in memory.ranks.split(","):
        ranks = parse_ranks(part)
        kept.update(ranks if ranks is not None else ())
    return frozenset(kept)


def format_ranks(ranks: Iterable[int]) -> str:
    """The ranks as ranges, such as `0-3,7`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def reaches(state: HeldState, step: int) -> bool:
    """Whether a rank with this state has completed a step, or can make its update without the others."""
    return state.step == step or (state.step == step - 1 and state.reduced == step)


def _named(ranks: list[int]) -> str:
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MAX_NAMED]))}{more}"
