"""The frameworks that plans can be written for, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from meshwright.api.spec import Framework, ParallelTrainingJobSpec
from meshwright.planner.frameworks.deepspeed import DEEPSPEED
from meshwright.planner.frameworks.megatron_lm import MEGATRON_LM
from meshwright.planner.frameworks.nanotron import NANOTRON
from meshwright.planner.frameworks.target import Target
from meshwright.planner.frameworks.torchtitan import TORCHTITAN

TARGETS: Mapping[str, Target] = MappingProxyType(
    {target.name: target for target in (DEEPSPEED, MEGATRON_LM, NANOTRON, TORCHTITAN)}
)

_OF_FRAMEWORK = {
    Framework.MEGATRON_LM: MEGATRON_LM,
    Framework.TORCH_TITAN: TORCHTITAN,
    Framework.DEEP_SPEED: DEEPSPEED,
}


def target_of(spec: ParallelTrainingJobSpec) -> Target | None:
    """The framework that a job's command starts, by `runtime.framework`. None if that is left out."""
    framework = spec.runtime.framework
    return None if framework is None else _OF_FRAMEWORK[framework]
