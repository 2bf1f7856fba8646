"""How the state of a generation gets into the next one: copied on ranks that hold it, sent to ranks that do not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright.memory_recovery import keeping_ranks, transfers
from meshwright.protocol.messages import MemoryRecovery
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.manifest import Origin, TrainingState
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.in_memory.copies import HostCopies, HostCopy, pack, pieces, unpack
from meshwright_worker.in_memory.gate import Held, MemoryGate
from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer.trainer import StepResult, StepSums, Trainer


class StateMissingError(Exception):
    """A rank does not hold the state from which it was to go on."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What the leader knows of the step."""

    state: TrainingState
    """The state outside of tensors."""
    origin: Origin | None
    """What its checkpoints say about the beginning of the run."""
    sums: StepSums | None = None
    """The sums of its update."""


def restore(task: RankTask[NativeRun], trainer: Trainer, mesh: Mesh, gate: MemoryGate, copies: HostCopies) -> Held:
    """Fill a new trainer with the state of the task's step. Collective. Returns the state, with this trainer.

    Interrupted at any time, the gate's state stays what it was, or has the update of the last step besides.

    Raises:
        StateMissingError: this rank does not hold what it should.
    """
    memory, held = task.memory, gate.held
    assert memory is not None
    if memory.holders is not None:
        return _restore_copies(task.run, memory, trainer, mesh, held, copies)
    keeps = mesh.rank in keeping_ranks(memory)
    if keeps and (held is None or held.state.step > memory.step):
        raise StateMissingError(f"rank {mesh.rank} does not hold the state of step {memory.step}")
    known = _announce(memory, _Known(held.state, held.origin, held.sums) if held else None, mesh)
    state = known.state
    if keeps and held is not None:
        _catch_up(held, memory, known.sums, gate)
        _copy(held.trainer, trainer)
    _transfer(task.run, memory, trainer, mesh)
    trainer.optimizer.set_step_count(state.step - state.skipped)
    trainer.restore_state(state)
    samples, unreported = task.run.training.global_batch_size, _unreported(memory, held, mesh)
    return Held(trainer, state, samples, origin=known.origin, sums=known.sums, unreported=unreported)


def _restore_copies(
    run: NativeRun, memory: MemoryRecovery, trainer: Trainer, mesh: Mesh, held: Held | None, copies: HostCopies
) -> Held:
    """Go back to the copies of the step: a rank's own, or that which a peer has of it."""
    own = copies.get(mesh.rank, memory.step) if mesh.rank in keeping_ranks(memory) else None
    if mesh.rank in keeping_ranks(memory) and own is None:
        raise StateMissingError(f"rank {mesh.rank} has no copy of step {memory.step}")
    origin = held.origin if held is not None else None
    known = _announce(memory, _Known(own.state, origin) if own is not None and own.state is not None else None, mesh)
    state = known.state
    tensors = trainer.inventory()
    for rank, holder in transfers(run, memory).items():
        if holder is None:
            raise StateMissingError(f"no rank has a copy of rank {rank}")
        if mesh.rank == holder:
            copy = copies.get(rank, memory.step)
            if copy is None:
                raise StateMissingError(f"rank {holder} has no copy of rank {rank} of step {memory.step}")
            for piece in pieces(copy.content):
                dist.send(piece, rank, group=mesh.checkpoint_group)
        elif mesh.rank == rank:
            received = torch.empty_like(pack(tensors))
            for piece in pieces(received):
                dist.recv(piece, holder, group=mesh.checkpoint_group)
            own = HostCopy(received, state)
            copies.put(rank, memory.step, own)
    assert own is not None
    unpack(own.content, tensors)
    trainer.optimizer.set_step_count(state.step - state.skipped)
    trainer.restore_state(state)
    unreported = _unreported(memory, held, mesh)
    return Held(trainer, state, run.training.global_batch_size, origin=known.origin, unreported=unreported)


def _announce(memory: MemoryRecovery, known: _Known | None, mesh: Mesh) -> _Known:
    """Broadcast what the leader knows of the step."""
    content = b""
    if mesh.rank == memory.leader:
        assert known is not None
        fields: dict[str, Any] = {"state": known.state.model_dump(), "sums": None, "digest": 0, "origin": None}
        if known.sums is not None:
            fields |= {"sums": known.sums.results.tolist(), "digest": known.sums.digest}
        if known.origin is not None:
            fields["origin"] = known.origin.model_dump(mode="json")
        content = json.dumps(fields).encode()
    length = torch.tensor([len(content)])
    dist.broadcast(length, memory.leader, group=mesh.checkpoint_group)
    payload = torch.zeros(int(length), dtype=torch.uint8)
    if content:
        payload = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    dist.broadcast(payload, memory.leader, group=mesh.checkpoint_group)
    header = json.loads(bytes(payload.tolist()))
    values, record = header["sums"], header["origin"]
    results = torch.tensor(values, dtype=torch.float64, device=mesh.device) if values is not None else None
    return _Known(
        TrainingState(**header["state"]),
        Origin.model_validate(record) if record is not None else None,
        StepSums(results, header["digest"]) if results is not None else None,
    )


def _catch_up(held: Held, memory: MemoryRecovery, sums: StepSums | None, gate: MemoryGate) -> None:
    """Make the update that others have made before this rank was interrupted."""
    reduced = held.reduced
    if held.state.step < memory.step and sums is not None and reduced is not None and reduced.number == memory.step:
        with gate.update(sums):
            gate.updated(held.trainer.update(reduced, sums))
    if held.state.step != memory.step:
        raise StateMissingError(f"the state is of step {held.state.step}, and all go on from step {memory.step}")


def _unreported(memory: MemoryRecovery, held: Held | None, mesh: Mesh) -> StepResult | None:
    """The result of the step from which all go on, if it is not reported: rank 0 knows, which reports, or the leader if
    rank 0 is new. Collective.
    """
    source = 0 if 0 in keeping_ranks(memory) else memory.leader
    known = [held.unreported if held is not None and held.state.step == memory.step else None]
    dist.broadcast_object_list(known, source, group=mesh.checkpoint_group)
    return known[0]


def _copy(old: Trainer, new: Trainer) -> None:
    for source, target in zip(old.inventory(), new.inventory(), strict=True):
        target.copy_(source)


def _transfer(run: NativeRun, memory: MemoryRecovery, trainer: Trainer, mesh: Mesh) -> None:
    """Send and receive the state of the ranks that have none, in host memory."""
    for rank, source in transfers(run, memory).items():
        if source is None:
            raise StateMissingError(f"no rank has the state of rank {rank}")
        if mesh.rank == source:
            for tensor in trainer.inventory():
                dist.send(tensor.cpu().contiguous(), rank, group=mesh.checkpoint_group)
        elif mesh.rank == rank:
            for tensor in trainer.inventory():
                received = torch.empty(tensor.shape, dtype=tensor.dtype)
                dist.recv(received, source, group=mesh.checkpoint_group)
                tensor.copy_(received)
