"""`parallelism.stageBalance: Measured`: once the first steps are timed, the layers of the stages are dealt again.

The times are those that ranks report, without waits. The result is written to `status.plan`, from which the next mesh
generation follows, in the same write that ends the present one. It is measured once: nothing oscillates.
"""

from __future__ import annotations

from statistics import median

from meshwright.api.parallelism import StageBalance
from meshwright.protocol.run_config import NativeRun
from meshwright.schedules.measured_balance import measured_split
from meshwright.schedules.registry import kind_of
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.mesh_generation import rank_zero_report
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.restart_policy import REBALANCED, Interruption
from meshwright_operator.decide.stragglers import by_stage, rank_times

WARM_UP_STEPS = 20
"""Steps of a generation before its times count: kernels are compiled, and caches filled."""


def rebalance(decision: Decision) -> Interruption | None:
    """Write the measured split to status. If it is another one, the present generation is over."""
    observed, plan = decision.observed, decision.status.plan
    run = observed.run
    if plan is None or plan.measured_layers is not None or not isinstance(run, NativeRun):
        return None
    if observed.spec.parallelism.stage_balance is not StageBalance.MEASURED or run.pipeline == 1:
        return None
    if kind_of(run.parallelism.order).bidirectional:
        return None  # two ranks share the times of a stage
    present = run.parallelism.layer_split
    seconds = _stage_seconds(observed)
    if present is None or seconds is None:
        return None
    split = measured_split(run.parallelism, run.pipeline, run.architecture, run.training.sequence_length, seconds)
    plan.measured_layers = split
    times = ", ".join(f"{1000 * seconds[rank]:.1f}" for rank in range(run.pipeline))
    if split == present:
        decision.add_event(
            "StagesMeasured", f"Pipeline ranks compute {times} ms per step: layers stay {_text(present)}"
        )
        return None
    return Interruption(
        REBALANCED,
        f"Pipeline ranks compute {times} ms per step. Layers of the stages: {_text(split)} instead of {_text(present)}",
    )


def _stage_seconds(observed: Observed) -> dict[int, float] | None:
    """Pipeline rank -> median time of its passes over all replicas; None while a rank has no time yet."""
    layout, report = observed.plan.layout, rank_zero_report(observed)
    if report is None or report.progress is None or report.progress.step < _first_step(observed) + WARM_UP_STEPS:
        return None
    reports = (received.report for received in observed.agents.reports.values() if received.fresh)
    times = rank_times(reports, observed.mesh.generation)
    if len({entry.rank for entry in times}) < layout.world_size:
        return None
    return {stage: median(entry.compute for entry in found) for stage, found in by_stage(times, layout).items()}


def _first_step(observed: Observed) -> int:
    """The step that the generation began with, as far as status knows."""
    checkpoint, began = observed.status.checkpoint, observed.status.resumed_from
    if checkpoint is not None and observed.mesh.generation > 1:
        return checkpoint.step
    return began.step if began is not None else 0


def _text(split: list[int]) -> str:
    return " ".join(map(str, split))
