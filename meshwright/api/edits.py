"""What an edit of a job that runs does, field by field: the one table that operator, documentation and tests read.

A field that is not named here restarts the gang: plan, pods and ranks are made from it.
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
    REFUSED = "refused once the job has started; `managedBy` always"


LIVE = (
    "suspend",
    "activeDeadlineSeconds",
    "ttlSecondsAfterFinished",
    "recovery",
    "successPolicy",
    "priority",
)
"""Read by the operator at each look; no pod and no rank knows them."""

NEXT_START = ("checkpoint.everySteps", "checkpoint.keep")
"""Part of what ranks are told when a mesh generation starts."""

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
"""What the rules of `rules/transition.py` guard."""

FORMER_DEFAULTS = {
    "parallelism.context": 1,
    "parallelism.schedule": "1F1B",
    "training.activationCheckpointing": "None",
}
"""Defaults that are chosen by the planner today. Stored objects have them, and mean what a running job has anyway."""


def effect_of(path: str) -> Effect:
    """The effect of editing the field at a dotted path below `spec`."""
    for effect, table in ((Effect.REFUSED, REFUSED), (Effect.LIVE, LIVE), (Effect.NEXT_START, NEXT_START)):
        if any(path == entry or path.startswith(f"{entry}.") for entry in table):
            return effect
    return Effect.RESTART


def with_live_fields(running: ParallelTrainingJobSpec, wanted: ParallelTrainingJobSpec) -> ParallelTrainingJobSpec:
    """`running`, with what takes effect at once as `wanted` has it."""
    names = {info.alias or name: name for name, info in ParallelTrainingJobSpec.model_fields.items()}
    return running.model_copy(update={names[entry]: getattr(wanted, names[entry]) for entry in LIVE})


def restarting_parts(spec: ParallelTrainingJobSpec) -> dict[str, object]:
    """What plan, pods and ranks are made from, in the wire form.

    Fields at their defaults are left out: a new field, added by an upgrade of the CRD, restarts nobody.
    """
    parts: dict[str, object] = json.loads(spec.model_dump_json(by_alias=True, exclude_defaults=True))
    for entry in (*LIVE, *NEXT_START, "managedBy"):
        _drop(parts, entry)
    for entry, value in FORMER_DEFAULTS.items():
        _drop(parts, entry, value)
    return parts


def _drop(parts: dict[str, object], path: str, value: object = None) -> None:
    """Removes a field; only where it has a value, if one is given."""
    *parents, last = path.split(".")
    holder: object = parts
    for name in parents:
        holder = holder.get(name) if isinstance(holder, dict) else None
    if isinstance(holder, dict) and (value is None or holder.get(last) == value):
        holder.pop(last, None)
