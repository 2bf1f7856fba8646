"""FLOPs of a step, and the loss scale's rules."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meshwright.api.precision import LossScaleSpec, Precision
from meshwright.api.training import ActivationCheckpointing, TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.models.presets import PRESETS
from meshwright_worker.agent.metrics import WorkerMetrics
from meshwright_worker.data.batch import Batch
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.init_weights import init_weights
from meshwright_worker.models.lora import apply_lora
from meshwright_worker.parallel.parallelize import LocalStage, apply_memory_options
from meshwright_worker.parallel.pipeline.stage import PipelineStage
from meshwright_worker.precision.loss_scale import LossScale
from meshwright_worker.rank.task import StepReport
from meshwright_worker.trainer.step_reports import step_flops
from tests.tiers import mostly_long

CPU = torch.device("cpu")


def training(**more: object) -> TrainingSpec:
    return TrainingSpec.model_validate({"steps": 1, "globalBatchSize": 2, "sequenceLength": 4096, **more})


def test_flops_of_a_step_are_the_published_ones() -> None:
    model = PRESETS["llama-3-8b"]
    work = step_flops(model, training(), 1, CPU)
    # 6 x (8.03 - 0.525) G parameters + 12 x 32 x 4096 x 4096 a token.
    assert abs(work.model / (2 * 4096) - 51.5e9) < 0.2e9
    assert work.hardware == work.model
    assert work.peak is None
    again = step_flops(model, training(activationCheckpointing=ActivationCheckpointing.FULL), 1, CPU)
    output = 6 * model.vocab_size * model.hidden_size * 2 * 4096
    assert again.hardware - again.model == (again.model - output) / 3
    selective = step_flops(model, training(activationCheckpointing=ActivationCheckpointing.SELECTIVE), 1, CPU)
    assert selective.hardware == selective.model


def test_utilization_is_reported_where_the_peak_is_known() -> None:
    for peak, told in ((None, False), (4e12, True)):
        metrics = WorkerMetrics("team-a", "job")
        metrics.step(0, StepReport(1, 1.0, 1.0, 1e-3, 10, 1, 0.5, 0.0, 1e12, 1.5e12, peak))
        text = metrics.exposition().decode()
        assert ('ptj_mfu{job_name="job",namespace="team-a"} 0.5' in text) is told
        assert ('ptj_hfu{job_name="job",namespace="team-a"} 0.75' in text) is told
        assert 'ptj_hardware_flops_total{job_name="job",namespace="team-a"} 1.5e+12' in text


def test_the_loss_scale_halves_grows_and_gives_up() -> None:
    scale = LossScale.of(
        training(precision=Precision.FP16, lossScale=LossScaleSpec(initial=4, growth_interval=2).wire())
    )
    assert scale.may_overflow
    scale.record_overflow()
    assert (scale.value, scale.skipped) == (2.0, 1)
    scale.record_success()
    assert scale.value == 2.0
    scale.record_success()
    assert scale.value == 4.0
    scale.value = 2.0**-14
    assert not scale.may_overflow
    fixed = LossScale.of(training(precision=Precision.BF16))
    assert not fixed.may_overflow
    assert fixed.value == 1.0


MODEL = Architecture(layers=4, hidden_size=64, intermediate_size=128, heads=4, kv_heads=2, vocab_size=512)
LORA = {"rank": 8, "targets": ["Query", "Value", "Down"]}


COMBINATIONS = list(product(["None", "Selective", "Full", "Sqrt"], [False, True], [None, LORA]))
OFTEN = [("None", False, None), ("Selective", True, LORA), ("Full", False, LORA), ("Sqrt", True, None)]
"""Each option, and recomputed stages with and without adapters. To count operations takes seconds."""


@pytest.mark.parametrize(("checkpointing", "rematerializes", "lora"), mostly_long(COMBINATIONS, OFTEN.__contains__))
def test_hardware_flops_are_those_of_the_matrix_products(
    checkpointing: str, rematerializes: bool, lora: dict[str, object] | None
) -> None:
    rows, length = 2, 8
    spec = training(sequenceLength=length, activationCheckpointing=checkpointing, lora=lora)
    with torch.device("meta"):
        stage = DecoderStage(MODEL, torch.float32)
    if spec.lora is not None:
        apply_lora(stage, spec.lora)
    init_weights(stage, MODEL, 0, CPU)
    apply_memory_options(stage, spec, CPU)
    chunk = PipelineStage(LocalStage(0, stage, {}), rows * length, rematerialize=rematerializes)
    batch = Batch.of(torch.arange(rows * (length + 1)).view(rows, -1))
    with FlopCounterMode(display=False) as counted:
        chunk.forward(0, batch, None, split=False)
        chunk.backward(0, None)
    products = sum(
        flops for operator, flops in counted.get_flop_counts()["Global"].items() if "attention" not in str(operator)
    )
    attention = 12 * MODEL.layers * MODEL.heads * MODEL.head_size * length
    spec = spec.model_copy(update={"global_batch_size": rows})
    work = step_flops(MODEL, spec, 1, CPU, rematerializes=rematerializes)
    again = (work.hardware - work.model) / work.model
    counted_as = work.hardware - rows * length * attention * (1 + again)
    # torch ends a recomputation where nothing more is needed: before a group's last product.
    groups = {"Full": MODEL.layers, "Sqrt": 2}.get(checkpointing, 0)
    left_out = groups * 2 * MODEL.hidden_size * MODEL.intermediate_size * rows * length
    assert products == pytest.approx(counted_as - left_out, rel=0.05)
