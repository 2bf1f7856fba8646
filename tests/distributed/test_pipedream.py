"""PipeDream and PipeDream-2BW against what they are defined to compute, in one process that keeps every version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.func import functional_call

from meshwright.api.precision import Precision
from meshwright.layout import split_layers
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.manifest import read_manifest
from meshwright_worker.data.batch import Batch
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.init_weights import init_weights
from meshwright_worker.optimizers.learning_rate import learning_rate
from meshwright_worker.rank.task import Outcome, RankTask
from meshwright_worker.trainer.async_pipeline_trainer import AsyncPipelineTrainer
from tests.distributed.cases import Trained, samples_of, train_fully, whole_of
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.tiers import mostly_long

STEPS = 7
Weights = dict[str, torch.Tensor]


def stale_run(schedule: str, **layout: Any) -> NativeRun:
    return small_run(parallelism={"schedule": schedule}, clip=0.0, precision=Precision.FP64, **layout)


@dataclass(frozen=True)
class Unflushed:
    """One rank after its last step."""

    steps: list[int]
    losses: list[float]
    parameters: Weights
    evaluated: float


def train_without_flush(task: RankTask, steps: int, drain_after: int) -> Unflushed:
    model, training = task.run.architecture, task.run.training
    with join_mesh(task) as mesh:
        trainer = AsyncPipelineTrainer(task.run, mesh)
        share = training.global_batch_size // mesh.layout.data
        first = mesh.coordinates.data * share
        results = []
        for number in range(1, steps + 1):
            batch = samples_of(number, training.global_batch_size, training.sequence_length, model.vocab_size)
            result = trainer.step(number, Batch.of(batch[first : first + share]))
            results += [result] if result is not None else []
            if number == drain_after:
                results += trainer.drain()
        results += trainer.drain()
        parameters = {shard.name: whole_of(shard, shard.local) for shard in trainer.shards}
        held_out = samples_of(99, training.global_batch_size, training.sequence_length, model.vocab_size)
        evaluated = trainer.evaluate([Batch.of(held_out[first : first + share])])
        return Unflushed(
            [result.step for result in results], [result.loss for result in results], parameters, evaluated
        )


def by_definition(run: NativeRun, drain_after: int, *, double_buffered: bool) -> tuple[list[float], Weights, float]:
    """Losses and final weights, from the formula in `pipeline.stale` alone, and what those weights evaluate to."""
    model, training = run.architecture, run.training
    torch.manual_seed(0)
    with torch.device("meta"):
        module = DecoderStage(model, torch.float64).double()
    init_weights(module, model, training.seed, torch.device("cpu"))
    stage_of = _stages(module, model.layers, run.pipeline)
    current = {name: p.detach().clone() for name, p in module.named_parameters()}
    groups = [
        {"params": [p for p in current.values() if p.ndim > 1], "weight_decay": training.optimizer.weight_decay},
        {"params": [p for p in current.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(training.optimizer.beta1, training.optimizer.beta2))
    versions = [{name: p.clone() for name, p in current.items()}]
    losses = []
    for step in range(1, STEPS + 1):
        base = drain_after if step > drain_after else 0
        late = {name: 2 if double_buffered else run.pipeline - stage for name, stage in stage_of.items()}
        seen = {name: versions[max(base, step - late[name])][name].clone().requires_grad_() for name in current}
        samples = samples_of(step, training.global_batch_size, training.sequence_length, model.vocab_size)
        batch = Batch.of(samples)
        loss = functional_call(module, seen, (batch.tokens,), {"targets": batch.targets}) / batch.targets.numel()
        loss.backward()
        losses.append(float(loss.detach()))
        for name, parameter in current.items():
            parameter.grad = seen[name].grad
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training.steps, training.optimizer)
        optimizer.step()
        versions.append({name: p.clone() for name, p in current.items()})
    held_out = Batch.of(samples_of(99, training.global_batch_size, training.sequence_length, model.vocab_size))
    loss = functional_call(module, versions[-1], (held_out.tokens,), {"targets": held_out.targets})
    return losses, versions[-1], float(loss) / held_out.targets.numel()


def _stages(module: DecoderStage, layers: int, stages: int) -> dict[str, int]:
    of_layer = {str(layer): s for s, own in enumerate(split_layers(layers, stages)) for layer in own}
    found = {}
    for name, _ in module.named_parameters():
        part = name.split(".")
        found[name] = of_layer[part[1]] if part[0] == "layers" else 0 if part[0] == "embedding" else stages - 1
    return found


@pytest.mark.parametrize(
    ("schedule", "layout"),
    mostly_long(
        [
            ("PipeDream", {"pipeline": 2, "micro_batches": 1}),
            ("PipeDream", {"pipeline": 3, "micro_batches": 1}),
            ("PipeDream", {"pipeline": 2, "micro_batches": 1, "data": 2}),
            ("PipeDream", {"pipeline": 2, "micro_batches": 1, "tensor": 2}),
            ("PipeDream2BW", {"pipeline": 2, "micro_batches": 2}),
            ("PipeDream2BW", {"pipeline": 3, "micro_batches": 4}),
            ("PipeDream2BW", {"pipeline": 2, "micro_batches": 4, "data": 2}),
            ("PipeDream2BW", {"pipeline": 2, "micro_batches": 2, "tensor": 2}),
        ],
        lambda case: case[1]["pipeline"] == 3,
    ),
    ids=str,
)
@pytest.mark.parametrize("drain_after", [STEPS, 4])
def test_gradients_are_as_stale_as_written(
    pool: RankPool, schedule: str, layout: dict[str, Any], drain_after: int
) -> None:
    run = stale_run(schedule, **layout)
    losses, weights, evaluated = by_definition(run, drain_after, double_buffered=schedule == "PipeDream2BW")
    ranks = pool.run(train_without_flush, run, STEPS, drain_after)
    for rank in ranks:
        assert rank.steps == list(range(1, STEPS + 1))
        assert rank.losses == pytest.approx(losses, rel=1e-12)
        assert rank.evaluated == pytest.approx(evaluated, rel=1e-12)
        for name, got in rank.parameters.items():
            assert float((got - weights[name]).abs().max() / weights[name].abs().max()) <= 1e-10, name
    assert set(weights) == set().union(*(rank.parameters for rank in ranks))


def test_a_stage_keeps_as_many_versions_as_batches_on_their_way(pool: RankPool) -> None:
    run = stale_run("PipeDream", pipeline=3, micro_batches=1)
    assert [rank.local_elements for rank in pool.run(versions_on_the_way, run)] == [3, 2, 1]
    run = stale_run("PipeDream2BW", pipeline=3, micro_batches=4)
    assert [rank.local_elements for rank in pool.run(versions_on_the_way, run)] == [2, 2, 2]


def versions_on_the_way(task: RankTask) -> Trained:
    """`local_elements` is the number of versions after some steps of a full pipeline."""
    model, training = task.run.architecture, task.run.training
    with join_mesh(task) as mesh:
        trainer = AsyncPipelineTrainer(task.run, mesh)
        for number in range(1, 6):
            batch = samples_of(number, training.global_batch_size, training.sequence_length, model.vocab_size)
            trainer.step(number, Batch.of(batch))
        versions = len(trainer._pipeline.stash.versions)
        trainer.drain()
        return Trained([], {}, {}, versions)


def test_training_resumes_from_a_checkpoint_as_if_it_had_not_stopped(pool: RankPool, tmp_path: Any, text: Any) -> None:
    run = stale_run("PipeDream2BW", pipeline=2, micro_batches=2, every=4, steps=12)
    whole = pool.run(train_fully, run, checkpoint_dir=tmp_path / "whole", data_dir=text)
    pool.run(train_fully, run, -1, None, 12, checkpoint_dir=tmp_path / "cut", data_dir=text)
    again = pool.run(train_fully, run, checkpoint_dir=tmp_path / "cut", data_dir=text)
    assert again[0][0] is Outcome.COMPLETE
    assert again[0][1].began_at in (4, 8)  # the save of step 8 was perhaps not durable yet
    assert again[0][1].reports[-1].loss == whole[0][1].reports[-1].loss
    assert [report.step for report in whole[0][1].reports] == list(range(1, 13))
    assert [report.samples for report in whole[0][1].reports] == [8 * step for step in range(1, 13)]
    assert all(report.seconds > 0 for report in whole[0][1].reports)


def test_steps_that_were_skipped_before_stay_uncounted(pool: RankPool, tmp_path: Any, text: Any) -> None:
    """A resumed run sets the optimizer's count of updates from it, and would correct its moments' bias otherwise."""
    overflows = {"loss_scale": {"initial": 2**20, "growth_interval": 1000}}
    before = small_run(steps=4, every=4, keep=9, precision=Precision.FP16, training=overflows)
    pool.run(train_fully, before, checkpoint_dir=tmp_path, data_dir=text)
    after = stale_run("PipeDream", pipeline=2, micro_batches=1, every=2, steps=6)
    pool.run(train_fully, after, checkpoint_dir=tmp_path, data_dir=text)
    first, last = (read_manifest(CheckpointDirectory(tmp_path).path(step)).state.skipped for step in (4, 6))
    assert first == last > 0


def test_a_stop_request_is_seen_when_checkpoints_come_before_results(pool: RankPool, tmp_path: Any, text: Any) -> None:
    # Every checkpoint drains the pipeline before it is long enough under way to tell anything.
    run = stale_run("PipeDream", pipeline=2, micro_batches=1, every=3, steps=12)
    for outcome, recorder in pool.run(train_fully, run, 1, 2, checkpoint_dir=tmp_path, data_dir=text):
        assert outcome is Outcome.STOPPED
        assert recorder.reports[-1].step == 6
