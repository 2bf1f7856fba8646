"""What running jobs teach the planner: constants refitted to the steps that were really measured.

A job's estimate and its measured steps differ by what the constants got wrong for this cluster: slower links, other
kernels, a throttled GPU. The next plan is made with constants that explain what was measured, drawn towards the shipped
ones, so that one odd job moves them little and several that agree move them all the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright.planner.cost.calibration import calibrate
from meshwright.planner.cost.comm_groups import GroupSpans
from meshwright.planner.cost.constants import Constants
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.cost_model import Calibration, CostModel

MIN_STEPS = 10
"""Steps before a job's step time counts: the first ones warm up."""


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """A running job's step time, and the strategy that took it."""

    cost_model: CostModel
    strategy: Strategy
    step_seconds: float
    steps: int
    """Steps that the time is a mean of; they are its weight."""
    groups: GroupSpans | None = None
    """Its groups where it runs: a scattered job is no slow network."""

    @property
    def is_warm(self) -> bool:
        """Whether it says anything yet."""
        return self.steps >= MIN_STEPS and self.step_seconds > 0


def recalibrate(shipped: Calibration, measurements: Iterable[StepMeasurement]) -> Calibration:
    """The calibration that explains what jobs measure, starting from the shipped one.

    GPUs of which nothing was measured keep what they have. The result depends on the measurements alone, not on their
    order or on earlier results, so that a restarted operator arrives at the same constants.
    """
    by_gpu: dict[str, list[StepMeasurement]] = {}
    for measurement in measurements:
        if measurement.is_warm:
            by_gpu.setdefault(measurement.cost_model.machine.gpu.name, []).append(measurement)
    calibration = shipped
    for gpu, measurements_of_gpu in sorted(by_gpu.items()):
        start = shipped.on(measurements_of_gpu[0].cost_model.machine).constants
        calibration = calibration.with_constants(gpu, _fitted(measurements_of_gpu, start))
    return calibration


def _fitted(measurements_of_gpu: Sequence[StepMeasurement], start: Constants) -> Constants:
    measurements_of_gpu = sorted(
        measurements_of_gpu, key=lambda measurement: (measurement.step_seconds, measurement.steps)
    )
    return calibrate(
        [_estimator(measurement) for measurement in measurements_of_gpu],
        [measurement.step_seconds for measurement in measurements_of_gpu],
        prior=start,
        weights=[min(1.0, measurement.steps / 100) for measurement in measurements_of_gpu],
    )


def _estimator(measurement: StepMeasurement) -> Callable[[Constants], float]:
    def seconds(constants: Constants) -> float:
        machine = replace(measurement.cost_model.machine, constants=constants)
        return replace(measurement.cost_model, machine=machine).price(measurement.strategy, measurement.groups).seconds

    return seconds
