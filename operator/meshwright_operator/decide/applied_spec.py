"""The applied spec: the spec from which the plan, the pods and the ranks were created, stored in status.

`spec` is what the user requests now. If it is invalid or does not fit yet, the operator must still replace lost pods.
It takes the new pods' manifests and the ranks' run configuration from the applied spec, so that the gang stays uniform.
"""

from __future__ import annotations

import hashlib
import json

from pydantic import ValidationError

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import MAX_APPLIED_SPEC, ParallelTrainingJobStatus
from meshwright.rules.edits import restarting_parts
from meshwright_operator.decide.observed import has_started


def revision_of(spec: ParallelTrainingJobSpec) -> str:
    """The hash, ten hex digits, of the parts of the spec that need a restart of the workers when they change."""
    return hashlib.sha256(json.dumps(restarting_parts(spec), sort_keys=True).encode()).hexdigest()[:10]


def encode_spec(spec: ParallelTrainingJobSpec) -> str:
    """The spec as JSON without defaults. Empty if it is too large for status: then there is no applied spec."""
    text = spec.model_dump_json(by_alias=True, exclude_defaults=True)
    return text if len(text) <= MAX_APPLIED_SPEC else ""


def running_spec(status: ParallelTrainingJobStatus) -> ParallelTrainingJobSpec | None:
    """The spec that a started job runs. None before it starts, and if status does not contain it or is damaged."""
    if status.plan is None or not status.applied_spec or not has_started(status):
        return None
    try:
        spec = ParallelTrainingJobSpec.model_validate_json(status.applied_spec)
    except ValidationError:
        return None
    return spec if revision_of(spec) == status.plan.revision else None
