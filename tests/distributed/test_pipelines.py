"""What the parity matrix does not show of pipelines: shapes that change, evaluation, checkpoints, failures, memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.precision import Precision
from meshwright.protocol import RunConfig
from meshwright.schedules.division import schedule_of
from meshwright.schedules.simulate import simulate
from meshwright_worker.data.batch import Batch
from meshwright_worker.mesh import joined
from meshwright_worker.parallel import dispatch
from meshwright_worker.pipeline import overlap
from meshwright_worker.pipeline.scheduled import Scheduled
from meshwright_worker.step import Trainer
from meshwright_worker.task import RankTask
from meshwright_worker.validate import validate
from tests.distributed.cases import load_only, train_fully, whole_of
from tests.distributed.configs import small_run
from tests.distributed.pool import RankFailedError, RankPool
from tests.parity.cases.pipeline import SCHEDULES
from tests.tiers import mostly_long

EVERY = pytest.mark.parametrize("name", SCHEDULES)


def run_of(name: str, **more: Any) -> RunConfig:
    fields, model = SCHEDULES[name]
    layout = {"pipeline": 2, "micro_batches": 4, "parallelism": fields, "precision": Precision.FP64, **model}
    return small_run(**{**layout, **more})


def parts_of(sizes: list[tuple[int, int]], vocabulary: int) -> list[Batch]:
    """Micro-batches of (rows, length)."""
    generator = torch.Generator().manual_seed(1)
    return [Batch.of(torch.randint(0, vocabulary, (rows, length + 1), generator=generator)) for rows, length in sizes]


@dataclass
class Seen:
    loss: float
    evaluated: float
    gradients: dict[str, torch.Tensor]


STEPS_OF_SHAPES = [[(3, 8), (1, 16), (2, 4), (2, 12)], [(1, 4), (1, 4), (5, 20), (1, 6)]]
"""Growing and shrinking, within a step and from step to step."""


def varying(task: RankTask) -> Seen:
    model, _, training = validate(task.run)
    with joined(task) as mesh:
        trainer = Trainer(task.run, model, training, mesh)
        executor = trainer._executor
        assert isinstance(executor, Scheduled)
        total = sum(float(executor.run(parts_of(sizes, model.vocab_size))) for sizes in STEPS_OF_SHAPES)
        trainer._copies.add_up()
        gradients = {shard.name: whole_of(shard, shard.gradient()) for shard in trainer.shards}
        (batch,) = parts_of([(8, 16)], model.vocab_size)
        return Seen(total, float(executor.evaluate(batch.chunk(task.run.micro_batches))), gradients)


def alone(task: RankTask) -> Seen:
    model, _, training = validate(task.run)
    with joined(task) as mesh:
        trainer = Trainer(task.run, model, training, mesh)
        module, total = trainer.stages[0].module, 0.0
        for sizes in STEPS_OF_SHAPES:
            for part in parts_of(sizes, model.vocab_size):
                loss = module(part.tokens, targets=part.targets) / (8 * 16)
                loss.backward()
                total += float(loss.detach())
        gradients = {shard.name: shard.gradient() for shard in trainer.shards}
        (batch,) = parts_of([(8, 16)], model.vocab_size)
        evaluated = trainer._executor.evaluate(batch.chunk(task.run.micro_batches))
        return Seen(total, float(evaluated), gradients)


@EVERY
def test_micro_batches_may_differ_in_rows_and_length(pool: RankPool, name: str) -> None:
    model = SCHEDULES[name][1]
    (want,) = pool.run(alone, small_run(precision=Precision.FP64, **model))
    ranks = pool.run(varying, run_of(name))
    assert sum(rank.loss for rank in ranks) == pytest.approx(want.loss, rel=1e-12)
    assert sum(rank.evaluated for rank in ranks) == pytest.approx(want.evaluated, rel=1e-12)
    for rank in ranks:
        for parameter, gradient in rank.gradients.items():
            expected = want.gradients[parameter]
            assert float((gradient - expected).abs().max() / expected.abs().max()) <= 1e-12, parameter


@pytest.mark.parametrize("name", ["DualPipe", "ZB-V"])
def test_a_checkpoint_of_copies_is_one_of_any_layout(pool: RankPool, name: str, tmp_path: Path, text: Path) -> None:
    options: dict[str, Any] = {"tie_embeddings": True, "layers": 4, "steps": 6, "every": 2, "precision": Precision.FP32}
    run = run_of(name, **options)
    pool.run(train_fully, run, -1, None, 5, checkpoint_dir=tmp_path, data_dir=text)
    ((step, whole),) = pool.run(load_only, small_run(**options), checkpoint_dir=tmp_path, data_dir=text)
    assert step in (2, 4)  # the save of step 4 was perhaps not durable yet
    for _, tensors in pool.run(load_only, run, checkpoint_dir=tmp_path, data_dir=text):
        for tensor, value in tensors.items():
            assert torch.equal(value, whole[tensor]), tensor
    straight = pool.run(train_fully, run, checkpoint_dir=tmp_path / "straight", data_dir=text)
    resumed = pool.run(train_fully, run, checkpoint_dir=tmp_path, data_dir=text)
    assert resumed[0][1].began_at == step
    assert resumed[0][1].reports[-1].gradient_norm == straight[0][1].reports[-1].gradient_norm


def fail_in_a_stage(task: RankTask) -> None:
    model, _, training = validate(task.run)
    with joined(task) as mesh:
        trainer = Trainer(task.run, model, training, mesh)
        if mesh.rank == 1:

            def broken(*_: Any) -> None:
                raise ArithmeticError("this layer is broken")

            trainer.stages[0].module.register_forward_pre_hook(broken)
        (batch,) = parts_of([(8, 16)], model.vocab_size)
        trainer.step(1, batch)


def test_a_failing_stage_is_told_with_its_place_in_the_schedule(pool: RankPool) -> None:
    with pytest.raises(RankFailedError) as failure:
        pool.run(fail_in_a_stage, run_of("1F1B"))
    text = str(failure.value)
    assert "ArithmeticError: this layer is broken" in text
    assert "in schedule `1f1b`, slot 1 of 8: >>> F1.0 <<< B1.0" in text


def trace_of_exchanges(task: RankTask) -> list[str]:
    """Which pass of a pair computes (`F`, `B`) and where it starts to wait for an all-to-all, and has waited."""
    model, _, training = validate(task.run)
    trace: list[str] = []
    real = dispatch.finish

    def traced(work: overlap.Waitable) -> None:
        side = "" if overlap._pair is None else "FB"[overlap._pair._running]
        trace.append(f"{side} starts")
        real(work)
        trace.append(f"{side} ends")

    with joined(task) as mesh:
        trainer = Trainer(task.run, model, training, mesh)
        (batch,) = parts_of([(8, 16)], model.vocab_size)
        dispatch.finish = traced
        try:
            trainer._executor.run(batch.chunk(task.run.micro_batches))
        finally:
            dispatch.finish = real
    return trace


def test_one_passes_exchange_runs_during_the_others_computation(pool: RankPool) -> None:
    run = run_of("DualPipeV", data=2, expert=2, mixture="Mixtral", layers=4)
    for trace in pool.run(trace_of_exchanges, run):
        # Each pass has two exchanges a mixture. While one is on its way the other pass computes up to its own.
        assert "F starts, B starts, F ends, F starts, B ends, B starts, F ends" in ", ".join(trace)


def live_activations(task: RankTask) -> tuple[int, int]:
    """Most bytes of saved tensors during a step, parameters not counted; and those of one forward pass of a stage."""
    model, _, training = validate(task.run)
    with joined(task) as mesh:
        trainer = Trainer(task.run, model, training, mesh)
        executor = trainer._executor
        assert isinstance(executor, Scheduled)
        (batch,) = parts_of([(8, 16)], model.vocab_size)
        executor.run(batch.chunk(task.run.micro_batches))
        live = _Live(trainer)
        marks: dict[int, int] = {}
        chunk = next(iter(executor._chunks.values()))
        forward = chunk.forward

        def measured(*given: Any, **more: Any) -> torch.Tensor:
            before = live.bytes
            output = forward(*given, **more)
            marks.setdefault(0, live.bytes - before)
            return output

        chunk.forward = measured  # type: ignore[method-assign]
        with torch.autograd.graph.saved_tensors_hooks(live.pack, live.unpack):
            executor.run(batch.chunk(task.run.micro_batches))
        return live.peak, marks[0]


class _Live:
    """Counts bytes of storages that some graph has saved, each once."""

    def __init__(self, trainer: Trainer) -> None:
        self.peak = 0
        self._parameters = {shard.parameter.untyped_storage().data_ptr() for shard in trainer.shards}
        self._held: dict[int, tuple[int, int]] = {}

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self._held.values())

    def pack(self, tensor: torch.Tensor) -> _Saved:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._parameters:
            uses, _ = self._held.get(key, (0, 0))
            self._held[key] = (uses + 1, storage.nbytes())
            self.peak = max(self.peak, self.bytes)
        return _Saved(self, tensor, key)

    def unpack(self, saved: _Saved) -> torch.Tensor:
        return saved.tensor

    def release(self, key: int) -> None:
        if key in self._held:
            uses, size = self._held.pop(key)
            if uses > 1:
                self._held[key] = (uses - 1, size)


class _Saved:
    def __init__(self, live: _Live, tensor: torch.Tensor, key: int) -> None:
        self.live, self.tensor, self.key = live, tensor, key

    def __del__(self) -> None:
        self.live.release(self.key)


@pytest.mark.parametrize(
    "name",
    mostly_long(
        (name for name in SCHEDULES if "zero bubble" not in name and "ZB" not in name),
        lambda name: name in ("1F1B", "interleaved 1F1B", "DualPipeV"),
    ),
)
def test_a_rank_holds_as_many_activations_as_its_schedule_says(pool: RankPool, name: str) -> None:
    fields, _ = SCHEDULES[name]
    middle = {"pipeline": 4, "micro_batches": 8, "layers": 8, "parallelism": fields, "hidden_size": 64}
    run = run_of(name, **middle)
    ranks = pool.run(live_activations, run)
    held = simulate(schedule_of(run.parallelism, run.pipeline, run.micro_batches)).in_flight
    for rank in (1, 2):
        peak, each = ranks[rank]
        assert peak == pytest.approx(held[rank] * each, rel=0.05)
