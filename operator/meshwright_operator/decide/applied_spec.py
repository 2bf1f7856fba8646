"""Which spec runs: the revision that an edit changes, and the spec that plan, pods and ranks were made from, in status.

`spec` holds only what the owner wants now. If that is invalid or does not fit yet, lost pods must still be replaced by
pods like the others of the gang, and ranks must get the run configuration they had: the applied spec says which.
"""

from __future__ import annotations

import hashlib
import json

from pydantic import ValidationError

from meshwright.api.edits import restarting_parts
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import MAX_APPLIED_SPEC, ParallelTrainingJobStatus
from meshwright_operator.decide.observed import has_started


def revision_of(spec: ParallelTrainingJobSpec) -> str:
    """Ten hex digits over all that plan, pods and run configuration are made from: another one restarts the workers."""
    return hashlib.sha256(json.dumps(restarting_parts(spec), sort_keys=True).encode()).hexdigest()[:10]


def encode_spec(spec: ParallelTrainingJobSpec) -> str:
    """The spec as JSON without defaults; empty when it is too large to be kept, which only costs the safety net."""
    text = spec.model_dump_json(by_alias=True, exclude_defaults=True)
    return text if len(text) <= MAX_APPLIED_SPEC else ""


def running_spec(status: ParallelTrainingJobStatus) -> ParallelTrainingJobSpec | None:
    """The spec that a started job runs; None before its start, and when status does not hold it or was damaged."""
    if status.plan is None or not status.applied_spec or not has_started(status):
        return None
    try:
        spec = ParallelTrainingJobSpec.model_validate_json(status.applied_spec)
    except ValidationError:
        return None
    return spec if revision_of(spec) == status.plan.revision else None
