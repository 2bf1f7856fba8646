"""FLOPs of a step, and the loss scale's rules."""

from __future__ import annotations

import torch

from meshwright.api.precision import LossScaleSpec, Precision
from meshwright.api.training import ActivationCheckpointing, TrainingSpec
from meshwright.models.presets import PRESETS
from meshwright_worker.loss_scale import LossScale
from meshwright_worker.metrics import TrainerMetrics
from meshwright_worker.task import StepReport
from meshwright_worker.utilisation import work_of

CPU = torch.device("cpu")


def training(**more: object) -> TrainingSpec:
    return TrainingSpec.model_validate({"steps": 1, "globalBatchSize": 2, "sequenceLength": 4096, **more})


def test_flops_of_a_step_are_the_published_ones() -> None:
    model = PRESETS["llama-3-8b"]
    work = work_of(model, training(), 1, CPU)
    # 6 x (8.03 - 0.525) G parameters + 12 x 32 x 4096 x 4096 a token.
    assert abs(work.model / (2 * 4096) - 51.5e9) < 0.2e9
    assert work.hardware == work.model
    assert work.peak is None
    again = work_of(model, training(activationCheckpointing=ActivationCheckpointing.FULL), 1, CPU)
    output = 6 * model.vocab_size * model.hidden_size * 2 * 4096
    assert again.hardware - again.model == (again.model - output) / 3
    selective = work_of(model, training(activationCheckpointing=ActivationCheckpointing.SELECTIVE), 1, CPU)
    assert selective.hardware == selective.model


def test_utilisation_is_told_where_the_peak_is_known() -> None:
    for peak, told in ((None, False), (4e12, True)):
        metrics = TrainerMetrics("team-a", "job")
        metrics.step(0, StepReport(1, 1.0, 1.0, 1e-3, 10, 1, 0.5, 0.0, 1e12, 1.5e12, peak))
        text = metrics.render().decode()
        assert ('ptj_mfu{job_name="job",namespace="team-a"} 0.5' in text) is told
        assert ('ptj_hfu{job_name="job",namespace="team-a"} 0.75' in text) is told
        assert 'ptj_hardware_flops_total{job_name="job",namespace="team-a"} 1.5e+12' in text


def test_the_loss_scale_halves_grows_and_gives_up() -> None:
    scale = LossScale.of(
        training(precision=Precision.FP16, lossScale=LossScaleSpec(initial=4, growth_interval=2).wire())
    )
    assert scale.skip()
    assert (scale.value, scale.skipped) == (2.0, 1)
    scale.passed()
    assert scale.value == 2.0
    scale.passed()
    assert scale.value == 4.0
    scale.value = 2.0**-14
    assert not scale.skip()
    fixed = LossScale.of(training(precision=Precision.BF16))
    assert not fixed.skip()
    assert fixed.value == 1.0
