"""Which edits of a running job restart its workers, and which do not: one hash says so."""

from __future__ import annotations

import hashlib
import json

from meshwright.api.edits import restarting_parts
from meshwright.api.spec import ParallelTrainingJobSpec


def revision_of(spec: ParallelTrainingJobSpec) -> str:
    """Ten hex digits over everything that plan, pods and run configuration are made from."""
    return hashlib.sha256(json.dumps(restarting_parts(spec), sort_keys=True).encode()).hexdigest()[:10]
