"""The spec that plan, pods and ranks were made from, kept in status.

`spec` holds only what the owner wants now. When that is invalid, or has no room yet, lost pods must still be made again
as the others of the gang are, and the ranks be told what they were told before: this is where that stands.
"""

from __future__ import annotations

from pydantic import ValidationError

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import MAX_APPLIED_SPEC, ParallelTrainingJobStatus
from meshwright_operator.decide.observed import has_started
from meshwright_operator.decide.revision import revision_of


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
