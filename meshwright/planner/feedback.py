"""What running jobs teach the planner: constants refitted to the steps that were really measured.

A job's estimate and its measured steps differ by what the constants got wrong for this cluster: slower links, other
kernels, a throttled GPU. The next plan is made with constants that explain what was measured, drawn towards the shipped
ones, so that one odd job moves them little and several that agree move them all the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright.layout import Layout
from meshwright.planner.cost.calibrate import calibrate
from meshwright.planner.cost.constants import Constants
from meshwright.planner.cost.groups import Groups
from meshwright.planner.pricing import Calibration, Pricer

MIN_STEPS = 10
"""Steps before a job's step time counts: the first ones warm up."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A running job's step time, and the layout that took it."""

    pricer: Pricer
    layout: Layout
    micro_batches: int
    step_seconds: float
    steps: int
    """Steps that the time is a mean of; they are its weight."""
    groups: Groups | None = None
    """Its groups where it runs: a scattered job is no slow network."""

    @property
    def counts(self) -> bool:
        """Whether it says anything yet."""
        return self.steps >= MIN_STEPS and self.step_seconds > 0


def recalibrated(shipped: Calibration, measurements: Iterable[Measured]) -> Calibration:
    """The calibration that explains what jobs measure, starting from the shipped one.

    GPUs of which nothing was measured keep what they have. The result depends on the measurements alone, not on their
    order or on earlier results, so that a restarted operator arrives at the same constants.
    """
    by_gpu: dict[str, list[Measured]] = {}
    for one in measurements:
        if one.counts:
            by_gpu.setdefault(one.pricer.machine.gpu.name, []).append(one)
    found = shipped
    for gpu, several in sorted(by_gpu.items()):
        start = shipped.on(several[0].pricer.machine).constants
        found = found.with_constants(gpu, _fitted(several, start))
    return found


def _fitted(several: Sequence[Measured], start: Constants) -> Constants:
    several = sorted(several, key=lambda one: (one.step_seconds, one.steps))
    return calibrate(
        [_estimator(one) for one in several],
        [one.step_seconds for one in several],
        prior=start,
        weights=[min(1.0, one.steps / 100) for one in several],
    )


def _estimator(one: Measured) -> Callable[[Constants], float]:
    def seconds(constants: Constants) -> float:
        machine = replace(one.pricer.machine, constants=constants)
        return replace(one.pricer, machine=machine).price(one.layout, one.micro_batches, one.groups).seconds

    return seconds
