"""Specs and statuses of jobs, each parsed once: a status per version of its object, a spec until it changes.

A job is reconciled for every change of its pods and agents, but its object changes rarely, and a status with a thousand
workers takes long to parse. Most changes of an object are the operator's own, of its status. What is returned is shared
by all callers: nobody may change it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from meshwright.api.objects import KubeObject
from meshwright.api.parsing import InvalidSpecError, parse_spec, parse_status
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import ParallelTrainingJobStatus

MAX_JOBS = 4096
"""Jobs that are kept; beyond them, the one that nobody asked for the longest is parsed again."""


@dataclass(slots=True)
class _Parsed:
    """What was parsed so far of one version of an object."""

    version: str
    generation: object = None
    raw_spec: object = None
    spec: ParallelTrainingJobSpec | str | None = None
    """The spec, or the message about an invalid one."""
    status: ParallelTrainingJobStatus | None = None
    readable_status: KubeObject | None = None


class ParsedJobs:
    """Parses jobs, and remembers the newest version of each by its uid. Used from one event loop only."""

    def __init__(self) -> None:
        self._by_uid: OrderedDict[str, _Parsed] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_uid)

    def spec(self, job: KubeObject) -> ParallelTrainingJobSpec:
        """The spec of a job.

        Raises:
            InvalidSpecError: It violates the schema.
        """
        parsed = self._parsed(job)
        if parsed.spec is None:
            try:
                parsed.spec = parse_spec(job)
            except InvalidSpecError as error:
                parsed.spec = str(error)
        if isinstance(parsed.spec, str):
            raise InvalidSpecError(parsed.spec)
        return parsed.spec

    def status(self, job: KubeObject) -> ParallelTrainingJobStatus:
        """The status of a job, without its invalid parts."""
        parsed = self._parsed(job)
        if parsed.status is None:
            parsed.status = parse_status(job)
        return parsed.status

    def readable_status(self, job: KubeObject) -> KubeObject:
        """What this version can read of a job's status, as JSON."""
        parsed = self._parsed(job)
        if parsed.readable_status is None:
            parsed.readable_status = dict(self.status(job).wire())
        return parsed.readable_status

    def forget(self, uid: str) -> None:
        """Drop a deleted job."""
        self._by_uid.pop(uid, None)

    def _parsed(self, job: KubeObject) -> _Parsed:
        metadata = job["metadata"]
        uid, version = metadata.get("uid"), metadata.get("resourceVersion")
        if not uid or not version:
            return _Parsed("")  # An object that no server stored has no version by which to know it again.
        parsed = self._by_uid.get(uid)
        if parsed is None or parsed.version != version:
            generation, raw = metadata.get("generation"), job.get("spec")
            # An edit is a new generation, but a default that a new CRD adds to what is stored is none. And to Python,
            # `true` equals 1.
            known = None
            if parsed is not None and parsed.generation == generation and parsed.raw_spec == raw:
                known = parsed.spec
            parsed = self._by_uid[uid] = _Parsed(version, generation, raw, known)
        self._by_uid.move_to_end(uid)
        while len(self._by_uid) > MAX_JOBS:
            self._by_uid.popitem(last=False)
        return parsed
