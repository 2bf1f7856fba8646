"""States of a job that a caller can wait for. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshwright.api import conditions
from meshwright_cli.client.errors import suggestion
from meshwright_cli.client.objects import Job
from meshwright_cli.text import plural

FORMS = "condition=NAME[=STATUS], step=N, complete, finished, running or deleted"


@dataclass(frozen=True, slots=True)
class Target:
    """A state to wait for."""

    condition: str = ""
    status: str = "True"
    step: int | None = None
    phase: str = ""
    """`running`, `finished` or `deleted`, which no single condition expresses."""
    replicas: int | None = None
    """With `running`: the number of replicas that train. An elastic job is running while it grows, too."""

    def __str__(self) -> str:
        if self.replicas is not None:
            return f"{self.phase} with {plural(self.replicas, 'replica')}"
        if self.phase:
            return self.phase
        if self.step is not None:
            return f"step {self.step:,}"
        return self.condition if self.status == "True" else f"{self.condition}={self.status}"

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read a state, in one of the forms of `FORMS`; case does not matter.

        Raises:
            ValueError: it has another form. The message lists the forms, or names the nearest condition.
        """
        lowered = text.strip().lower()
        if lowered in SHORT:
            return SHORT[lowered]
        if found := re.fullmatch(r"step=(\d+)", lowered):
            return cls(step=int(found[1]))
        if found := re.fullmatch(r"condition=([a-z]+)(?:=(true|false|unknown))?", lowered):
            names = {name.lower(): name for name in conditions.KNOWN}
            if found[1] not in names:
                hint = suggestion(found[1], names) or f": use one of {', '.join(conditions.KNOWN)}"
                raise ValueError(f"unknown condition `{found[1]}`{hint}")
            return cls(names[found[1]], (found[2] or "true").capitalize())
        raise ValueError(f"`{text}` is not a state: use {FORMS}")

    def reached(self, job: Job | None) -> bool:
        """Whether the job, or None if it does not exist, is in this state."""
        if job is None or self.phase == "deleted":
            return job is None and self.phase == "deleted"
        if self.phase == "finished":
            return job.finished
        if self.phase == "running":
            is_size = self.replicas is None or job.status.replicas == self.replicas
            return job.state == "Running" and job.observed and is_size
        if self.step is not None:
            return (job.status.step or 0) >= self.step
        found = conditions.find(job.status.conditions, self.condition)
        # A condition about an earlier spec says nothing about the current one.
        return found is not None and found.status == self.status and job.observed

    def hopeless(self, job: Job) -> str:
        """Why a job can no longer reach this state. Empty while it can."""
        if self.phase == "deleted" or self.reached(job) or (self.condition and self.status != "True"):
            return ""
        if job.failed:
            return f"the job failed: {_why(job, conditions.FAILED)}"
        if job.complete:
            return f"the job is complete at step {job.status.step or 0:,}"
        if job.is_true(conditions.STALLED) and job.observed:
            return f"the job has stalled: {_why(job, conditions.STALLED)}"
        return ""


def _why(job: Job, condition: str) -> str:
    found = conditions.find(job.status.conditions, condition)
    return (found.message or found.reason) if found else job.message


COMPLETE = Target(conditions.COMPLETE)
RUNNING = Target(phase="running")
FINISHED = Target(phase="finished")
DELETED = Target(phase="deleted")
SHORT = {"complete": COMPLETE, "running": RUNNING, "finished": FINISHED, "deleted": DELETED}
"""States with a name of their own."""
