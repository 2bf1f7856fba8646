"""What ranks run to have the peak of their activations measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from meshwright_worker.data.batch import Batch
from meshwright_worker.parallel.pipeline import schedule_executor
from meshwright_worker.parallel.pipeline.schedule_executor import ScheduleExecutor
from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer.async_pipeline_trainer import AsyncPipelineTrainer
from meshwright_worker.trainer.trainer import Trainer
from tests.distributed.cases import samples_of
from tests.distributed.gloo_threads import most_of
from tests.distributed.mesh_cache import kept_mesh, uses_kept_mesh
from tests.distributed.tensor_memory import Allocated


class _Sampled(schedule_executor._Step):
    """A step that notes after every pass how much of what it has made is alive: messages between stages left out."""

    def __init__(self, made: Allocated, peaks: list[int], executor: ScheduleExecutor, *more: Any) -> None:
        super().__init__(executor, *more)
        self._made, self._peaks, self._channels = made, peaks, executor._channels

    def _run_action(self, *arguments: Any) -> None:
        super()._run_action(*arguments)
        self._peaks.append(most_of(self._peaks[-1], self._bytes))

    def _bytes(self) -> int:
        messages: list[torch.Tensor] = [pending._buffer for pending in self._pending_receives.values()]
        messages += [tensor for tensor in self._local_outputs.values() if tensor is not None]
        messages += [tensor for _, tensor in self._channels._in_flight]
        return self._made.bytes(but=messages)


@uses_kept_mesh
def most_activations(task: RankTask) -> int:
    """The largest number of bytes that a step's passes hold between two of them on this rank, gradients left out."""
    model, training = task.run.architecture, task.run.training
    with kept_mesh(task) as mesh:
        trainer = Trainer(task.run, mesh)
        executor = trainer._executor
        assert isinstance(executor, ScheduleExecutor)
        batch = Batch.of(samples_of(1, training.global_batch_size, training.sequence_length, model.vocab_size))
        # Gradients have their memory from here on, and add up in place.
        executor.run(batch.chunk(task.run.micro_batches))
        real, peaks = schedule_executor._Step, [0]
        with Allocated() as made:
            schedule_executor._Step = partial(_Sampled, made, peaks)  # type: ignore[assignment, misc]
            try:
                executor.run(batch.chunk(task.run.micro_batches))
            finally:
                schedule_executor._Step = real  # type: ignore[misc]
        return max(peaks)


@uses_kept_mesh
def most_versions(task: RankTask) -> tuple[int, int]:
    """Bytes of this stage's kept versions, the most after any of some steps, and of the weights that it updates."""
    model, training = task.run.architecture, task.run.training
    with kept_mesh(task) as mesh:
        trainer, most = AsyncPipelineTrainer(task.run, mesh), 0
        weights = [shard.parameter for shard in trainer.shards]
        own = {weight.untyped_storage().data_ptr() for weight in weights}
        for number in range(1, 6):
            batch = samples_of(number, training.global_batch_size, training.sequence_length, model.vocab_size)
            trainer.step(number, Batch.of(batch))
            kept = [tensor for one in trainer._pipeline.stash._versions.values() for tensor in one.values()]
            storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
            assert not own & set(storages)
            most = max(most, sum(storages.values()))
        trainer.drain()
        return most, sum(weight.untyped_storage().nbytes() for weight in weights)


class _Peak(Allocated):
    """Notes how much is alive whenever a matrix is multiplied or a collective begins."""

    most = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "c10d" or func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm"):
            self.most = most_of(self.most, self.bytes)
        return output


@uses_kept_mesh
def most_in_a_step(task: RankTask) -> int:
    """The most bytes of tensors that are alive on this rank during its second step, all of them."""
    model, training = task.run.architecture, task.run.training
    with kept_mesh(task) as mesh, _Peak() as made:
        trainer = Trainer(task.run, mesh)
        share = training.global_batch_size // mesh.layout.data
        samples = samples_of(1, training.global_batch_size, training.sequence_length, model.vocab_size)
        batch = Batch.of(samples[mesh.coordinates.data * share :][:share])
        made.most = sys.maxsize  # nothing is larger, so nothing is waited for
        trainer.step(1, batch)
        made.most = 0
        trainer.step(2, batch)
        return made.most
