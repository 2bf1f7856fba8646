"""Where a rank's time of a step went: the clock's parts as a report has them, and the bubble of the pipeline.

The measured bubble of a rank is the part of the pipeline's time in which it waits for other stages: for hidden states
and gradients during its passes, and at the step's end for ranks that still compute. Their mean over the ranks is what
the simulator predicts. Waits for gradients of other replicas are not part of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from meshwright.protocol.run_config import NativeRun
from meshwright.schedules.registry import kind_of
from meshwright.schedules.simulator import simulate
from meshwright_worker.distributed.mesh import PIPELINE
from meshwright_worker.distributed.step_clock import PASSES, UPDATE, Part
from meshwright_worker.distributed.timed_collectives import JOB
from meshwright_worker.parallel.parallelize import pipeline_layout_of
from meshwright_worker.rank.task import StepTimes

_OF_STEPS = (PASSES, UPDATE, "")
"""The phases of a step. Evaluations and checkpoints are not part of it."""


def step_times(parts: Mapping[Part, float], *, checkpoint: float, stages: int) -> StepTimes:
    """Return the times of a step from the clock's parts. `stages` is the number of ranks of the pipeline."""
    waits: defaultdict[str, float] = defaultdict(float)
    for (phase, dimension), seconds in parts.items():
        if dimension and phase in _OF_STEPS:
            waits[dimension] += seconds
    return StepTimes(
        compute=parts.get((PASSES, ""), 0.0),
        update=parts.get((UPDATE, ""), 0.0),
        checkpoint=checkpoint,
        waits=dict(waits),
        bubble=_bubble(parts, waits) if stages > 1 else None,
    )


def _bubble(parts: Mapping[Part, float], waits: Mapping[str, float]) -> float | None:
    passes = sum(seconds for (phase, _), seconds in parts.items() if phase == PASSES)
    idle = waits.get(PIPELINE, 0.0) + waits.get(JOB, 0.0)
    outside = idle - parts.get((PASSES, PIPELINE), 0.0) - parts.get((PASSES, JOB), 0.0)
    window = passes + outside
    return idle / window if passes > 0 else None


def simulated_bubble(run: NativeRun) -> float | None:
    """Return the mean part of a step in which ranks wait if all stages take as long; None without a pipeline."""
    if run.pipeline == 1:
        return None
    if kind_of(run.parallelism.order).asynchronous:
        return 0.0
    return simulate(pipeline_layout_of(run).schedule.serialized()).bubble
