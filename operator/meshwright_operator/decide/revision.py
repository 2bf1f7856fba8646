"""Which edits of a running job restart its workers, and which do not: one hash says so."""

from __future__ import annotations

import hashlib
import json

from meshwright.api.spec import ParallelTrainingJobSpec

# These take effect on the job as it runs.
AT_ONCE = frozenset({"suspend", "activeDeadlineSeconds", "ttlSecondsAfterFinished", "recovery"})


def revision_of(spec: ParallelTrainingJobSpec) -> str:
    """Ten hex digits over everything that plan, pods and run configuration are made from.

    Fields at their defaults are left out: a new field, added by an upgrade of the CRD, restarts nobody.
    """
    parts = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    relevant = {name: value for name, value in parts.items() if name not in AT_ONCE}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:10]
