"""The frameworks that plans can be written for, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from meshwright.planner.frameworks.deepspeed import DEEPSPEED
from meshwright.planner.frameworks.megatron_lm import MEGATRON_LM
from meshwright.planner.frameworks.nanotron import NANOTRON
from meshwright.planner.frameworks.target import Target
from meshwright.planner.frameworks.torchtitan import TORCHTITAN

TARGETS: Mapping[str, Target] = MappingProxyType(
    {target.name: target for target in (DEEPSPEED, MEGATRON_LM, NANOTRON, TORCHTITAN)}
)
