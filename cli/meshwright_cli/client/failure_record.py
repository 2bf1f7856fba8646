"""Reads what agents recorded of failed ranks on the checkpoint claim, after the pod of the rank is gone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.api.status import FailureStatus
from meshwright_cli.client.checkpoints.read import read_on_claim
from meshwright_cli.client.errors import MeshwrightError
from meshwright_cli.client.job_reader import JobReader
from meshwright_cli.client.objects import Job, WorkerPod

_READ = """
import json, os, sys
path = os.path.join(sys.argv[1], "failures", sys.argv[2])
def text(name, limit=1 << 17):
    try:
        with open(os.path.join(path, name), errors="replace") as file:
            return file.read(limit)
    except FileNotFoundError:
        return ""
print(json.dumps({"record": text("failure.json"), "log": text("log.txt"), "stacks": text("stacks.txt")}))
"""


@dataclass(frozen=True, slots=True)
class RecordedFailure:
    """What is left of a failed rank."""

    failure: FailureStatus
    log: str
    stacks: str
    phases: tuple[tuple[str, float], ...] = ()
    """Name and seconds of the phases of its start."""
    step: int | None = None
    """Last step that it completed in its mesh generation."""
    where: str = ""
    """Where it was read, for people."""


async def read_failure(reader: JobReader, job: Job, pods: Sequence[WorkerPod]) -> RecordedFailure | None:
    """The latest recorded failure of a job, from its claim if it can be read, else from its status. None without one.

    If the claim cannot be read, `where` says why.
    """
    failure = job.status.last_failure
    if failure is None:
        return None
    short = RecordedFailure(failure, failure.log, failure.stacks, where="the job's status")
    if (
        not failure.path
        or failure.rank is None
        or job.spec.checkpoint is None
        or job.spec.checkpoint.claim_name is None
    ):
        return short
    name = failure.path.rstrip("/").rpartition("/")[2]
    try:
        content = await read_on_claim(reader, job, pods, _READ, name)
        return _parsed(failure, content, f"claim {job.spec.checkpoint.claim_name}")
    except (MeshwrightError, ValueError) as error:
        why = f"the job's status, because claim {job.spec.checkpoint.claim_name} cannot be read: {error}"
        return RecordedFailure(failure, failure.log, failure.stacks, where=why)


def _parsed(failure: FailureStatus, content: str, where: str) -> RecordedFailure:
    """Raises ValueError if there is no record."""
    line = next((line for line in content.splitlines() if line.startswith("{")), "")
    found = json.loads(line)
    record = json.loads(found["record"]) if found.get("record") else None
    if not isinstance(record, dict):
        raise ValueError("it has no record of this failure")
    phases = tuple((str(phase["name"]), float(phase["seconds"])) for phase in record.get("phases") or ())
    return RecordedFailure(failure, str(found["log"]), str(found["stacks"]), phases, record.get("step"), where)
