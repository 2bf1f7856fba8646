"""Which steps are anomalous, and which checkpoint a run goes back to."""

from __future__ import annotations

import math

import pytest

from meshwright.api.training import AnomaliesSpec, AnomalyAction
from meshwright_worker.checkpoint.manager import checkpoints_to_go_back_to
from meshwright_worker.checkpoint.manifest import AnomalyState
from meshwright_worker.trainer.loss_anomalies import LossAnomalies

SPIKES = AnomaliesSpec(spike=AnomalyAction.SKIP, window=8, spike_sigmas=6, max_skipped=2)


def after_updates(spec: AnomaliesSpec, *losses: float) -> LossAnomalies:
    anomalies = LossAnomalies(spec)
    for loss in losses:
        anomalies.record_update(loss, 1.0)
    return anomalies


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
@pytest.mark.parametrize("action", AnomalyAction)
def test_numbers_that_are_not_finite(loss: float, norm: float, action: AnomalyAction) -> None:
    anomaly = LossAnomalies(AnomaliesSpec(non_finite=action)).check(7, loss, norm)
    assert anomaly is not None
    assert anomaly.action is action
    assert anomaly.message == f"step 7: loss {loss}, gradient norm {norm}"


def test_without_a_spec_only_numbers_that_are_not_finite_are_anomalous() -> None:
    anomalies = after_updates(AnomaliesSpec(), *[1.0] * 200)
    assert LossAnomalies(None).check(1, 1e30, 1e30) is None
    assert anomalies.check(1, 1e30, 1e30) is None
    assert anomalies.state is None


def test_a_spike_is_far_above_the_window() -> None:
    anomalies = after_updates(SPIKES, 2.0, 2.2, 2.0, 2.2, 2.0, 2.2, 2.0, 2.2)
    # Mean 2.1, standard deviation 0.1.
    assert anomalies.check(9, 2.69, 1.0) is None
    spike = anomalies.check(9, 2.75, 1.0)
    assert spike is not None
    assert spike.message == "step 9: loss 2.75 is 6.5 standard deviations above the mean of 8 updates, 2.1"
    assert anomalies.check(9, 0.0, 1.0) is None


def test_a_spike_of_the_gradient_norm_alone() -> None:
    anomalies = after_updates(SPIKES, *[2.0] * 8)
    assert anomalies.check(9, 2.0, 4.9) is None, "far above its mean of 1, but norms have a long tail"
    spike = anomalies.check(9, 2.0, 5.0)
    assert spike is not None
    assert "gradient norm 5 is 400 standard deviations" in spike.message


def test_no_spike_before_half_a_window_and_none_of_a_per_mille() -> None:
    assert after_updates(SPIKES, 1.0, 1.0, 1.0).check(4, 100.0, 1.0) is None
    assert after_updates(SPIKES, *[1.0] * 4).check(5, 100.0, 1.0) is not None
    assert after_updates(SPIKES, *[1.0] * 8).check(9, 1.05, 1.0) is None


def test_too_many_skipped_steps_in_a_row_fail() -> None:
    anomalies = after_updates(SPIKES, *[1.0] * 8)
    for _ in range(2):
        found = anomalies.check(9, 100.0, 1.0)
        assert found is not None
        assert found.action is AnomalyAction.SKIP
        anomalies.record_skip()
    found = anomalies.check(11, 100.0, 1.0)
    assert found is not None
    assert found.action is AnomalyAction.FAIL
    assert found.message.endswith("; the 2 steps before were skipped")
    anomalies.record_update(1.0, 1.0)
    found = anomalies.check(13, 100.0, 1.0)
    assert found is not None
    assert found.action is AnomalyAction.SKIP


def test_a_restored_run_decides_as_an_uninterrupted_one() -> None:
    anomalies = after_updates(SPIKES, 2.0, 2.2, 2.0, 2.2, 2.0, 2.2, 2.0, 2.2)
    anomalies.record_skip()
    resumed = LossAnomalies(SPIKES)
    assert anomalies.state is not None
    resumed.restore(AnomalyState.model_validate_json(anomalies.state.model_dump_json()))
    assert resumed.state == anomalies.state
    assert [resumed.check(9, loss, 1.0) for loss in (2.69, 2.75)] == [anomalies.check(9, x, 1.0) for x in (2.69, 2.75)]


@pytest.mark.parametrize(
    ("steps", "step", "at_least", "targets"),
    [
        ([300, 200, 100], 310, 100, [200, 100, 300]),
        ([300, 200, 100], 300, 100, [200, 100]),
        ([300, 200, 100], 310, 5, [300, 200, 100]),
        ([300, 200], 310, 200, [200, 300]),
        ([300], 300, 1, []),
        ([], 10, 1, []),
    ],
)
def test_the_checkpoints_to_go_back_to(steps: list[int], step: int, at_least: int, targets: list[int]) -> None:
    assert checkpoints_to_go_back_to(steps, step, at_least) == targets
