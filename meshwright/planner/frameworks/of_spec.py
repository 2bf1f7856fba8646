"""The framework that a job's command starts. Imports no target whose configuration needs a YAML library."""

from __future__ import annotations

from meshwright.api.spec import Framework, ParallelTrainingJobSpec
from meshwright.planner.frameworks.deepspeed import DEEPSPEED
from meshwright.planner.frameworks.megatron_lm import MEGATRON_LM
from meshwright.planner.frameworks.target import Target
from meshwright.planner.frameworks.torchtitan import TORCHTITAN

_OF_FRAMEWORK = {
    Framework.MEGATRON_LM: MEGATRON_LM,
    Framework.TORCH_TITAN: TORCHTITAN,
    Framework.DEEP_SPEED: DEEPSPEED,
}


def target_of(spec: ParallelTrainingJobSpec) -> Target | None:
    """The framework that a job's command starts, by `runtime.framework`. None if the planner chooses nothing for it."""
    framework = spec.runtime.framework
    return _OF_FRAMEWORK[framework] if framework is not None and spec.runtime.planned else None
