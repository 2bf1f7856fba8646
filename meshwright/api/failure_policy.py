"""What an exit code says about a failure: the job's own policy, in the words of `batch/v1`'s `podFailurePolicy`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel

ExitCode = Annotated[int, Field(ge=1, le=255)]


class FailureAction(StrEnum):
    """What to do about a failure."""

    FAIL_JOB = "FailJob"
    """The job fails at once: trying again would not help."""
    IGNORE = "Ignore"
    """The run is started again, and `recovery.maxRestarts` does not count it."""
    COUNT = "Count"
    """The run is started again and counted, as without a rule."""


class ExitCodeRule(ApiModel):
    """What to do when a rank's or worker's process ends with one of these codes."""

    values: Annotated[list[ExitCode], Field(min_length=1, max_length=64)]
    """Exit codes; 128 plus the signal's number for a process that a signal ended, so 137 for out of memory."""
    action: FailureAction
    """`FailJob`: the job fails at once. `Ignore`: started again, not counted. `Count`: started again and counted."""
