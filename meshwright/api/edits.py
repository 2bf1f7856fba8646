"""What an edit of a running job does, by field. Operator, documentation and tests read this table.

An edit of a field that is not listed restarts the gang, because plan, pods and ranks depend on it.
"""

from __future__ import annotations

import json
from enum import StrEnum

from meshwright.api.spec import ParallelTrainingJobSpec


class Effect(StrEnum):
    """What an edit of a field does."""

    LIVE = "takes effect at once"
    NEXT_START = "takes effect when ranks start next"
    RESTART = "restarts the gang from a checkpoint"
    REFUSED = "rejected once the job has started; `managedBy` always"


LIVE = (
    "suspend",
    "activeDeadlineSeconds",
    "ttlSecondsAfterFinished",
    "recovery",
    "successPolicy",
    "priority",
)
"""Fields that the operator reads at each reconcile. Pods and ranks do not depend on them."""

NEXT_START = ("checkpoint.everySteps", "checkpoint.keep")
"""Fields that ranks receive when a mesh generation starts."""

REFUSED = (
    "managedBy",
    "model",
    "data",
    "training.seed",
    "training.sequenceLength",
    "training.initialWeights",
    "training.lora",
    "checkpoint.claimName",
)
"""Fields that the rules of `rules/transition.py` protect."""

FORMER_DEFAULTS = {
    "parallelism.context": 1,
    "parallelism.schedule": "1F1B",
    "training.activationCheckpointing": "None",
}
"""Former defaults of fields that the planner now chooses. Stored objects contain them, with the same meaning."""


def effect_of(path: str) -> Effect:
    """The effect of editing the field at a dotted path below `spec`."""
    for effect, table in ((Effect.REFUSED, REFUSED), (Effect.LIVE, LIVE), (Effect.NEXT_START, NEXT_START)):
        if any(path == entry or path.startswith(f"{entry}.") for entry in table):
            return effect
    return Effect.RESTART


def with_live_fields(running: ParallelTrainingJobSpec, wanted: ParallelTrainingJobSpec) -> ParallelTrainingJobSpec:
    """`running` with the fields of `wanted` that take effect at once."""
    names = {info.alias or name: name for name, info in ParallelTrainingJobSpec.model_fields.items()}
    return running.model_copy(update={names[entry]: getattr(wanted, names[entry]) for entry in LIVE})


def restarting_parts(spec: ParallelTrainingJobSpec) -> dict[str, object]:
    """The fields that determine plan, pods and ranks, in the wire form.

    Defaults are left out, so that a new field in an upgraded CRD restarts no job.
    """
    parts: dict[str, object] = json.loads(spec.model_dump_json(by_alias=True, exclude_defaults=True))
    for entry in (*LIVE, *NEXT_START, "managedBy"):
        _drop(parts, entry)
    for entry, value in FORMER_DEFAULTS.items():
        _drop(parts, entry, value)
    return parts


def _drop(parts: dict[str, object], path: str, value: object = None) -> None:
    """Remove a field, or only if it has the given value."""
    *parents, last = path.split(".")
    holder: object = parts
    for name in parents:
        holder = holder.get(name) if isinstance(holder, dict) else None
    if isinstance(holder, dict) and (value is None or holder.get(last) == value):
        holder.pop(last, None)
