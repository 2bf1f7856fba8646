"""Feature gates: parts of the operator that an administrator turns on or off while they are alpha or beta.

Alpha is off by default and may change or go in any release. Beta is on by default. A gate whose feature is generally
available has no effect, is still accepted for two releases, and then is unknown. docs/api-policy.md lists them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

_VALUES = {"true": True, "false": False}


class Stage(StrEnum):
    """How stable a feature is."""

    ALPHA = "Alpha"
    BETA = "Beta"


@dataclass(frozen=True, slots=True)
class Gate:
    """One feature."""

    name: str
    stage: Stage
    since: str
    """The release that introduced the feature in this stage."""
    text: str
    """What the operator does only while the gate is on."""

    @property
    def default(self) -> bool:
        """Whether it is on unless the administrator says otherwise."""
        return self.stage is Stage.BETA


PLAN_CALIBRATION = Gate(
    "PlanCalibration",
    Stage.BETA,
    "0.2.0",
    "New plans use the speed that jobs of the same GPU product have measured. Off: only the cost model",
)
KUEUE_QUEUES = Gate(
    "KueueQueues",
    Stage.BETA,
    "0.2.0",
    "Jobs that name a queue of Kueue wait for its quota. Off: the operator does not look for Kueue, and such jobs are"
    " `Stalled`",
)
DYNAMIC_RESOURCES = Gate(
    "DynamicResources",
    Stage.BETA,
    "0.2.0",
    "Placement counts the devices behind Dynamic Resource Allocation. Off: they are not read, and kube-scheduler alone"
    " checks claims",
)
GATES: Mapping[str, Gate] = MappingProxyType(
    {gate.name: gate for gate in (PLAN_CALIBRATION, KUEUE_QUEUES, DYNAMIC_RESOURCES)}
)


@dataclass(frozen=True, slots=True)
class FeatureGates:
    """Which features are on."""

    given: tuple[tuple[str, bool], ...] = ()
    """What the administrator set, by name."""

    def enabled(self, gate: Gate) -> bool:
        """Whether a feature is on."""
        return dict(self.given).get(gate.name, gate.default)

    @classmethod
    def parse(cls, text: str) -> FeatureGates:
        """Read `NAME=true,OTHER=false`.

        Raises:
            ValueError: A gate is unknown or named twice, or a value is neither true nor false.
        """
        given: dict[str, bool] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if name not in GATES:
                raise ValueError(_unknown(name))
            if not equals or value not in _VALUES:
                raise ValueError(f"`{name}` must be true or false, such as {name}=true, got `{part}`")
            if given.setdefault(name, _VALUES[value]) != _VALUES[value]:
                raise ValueError(f"`{name}` is both true and false")
        return cls(tuple(sorted(given.items())))


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, GATES, 1, 0.4)
    hint = f"did you mean `{near[0]}`? Gates: " if near else "use one of "
    return f"unknown feature gate `{name}`: {hint}{', '.join(GATES)}"
