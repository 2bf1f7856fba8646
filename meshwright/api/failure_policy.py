"""The job's policy for exit codes, in the terms of `batch/v1`'s `podFailurePolicy`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel

ExitCode = Annotated[int, Field(ge=1, le=255)]


class FailureAction(StrEnum):
    """What a failure leads to."""

    FAIL_JOB = "FailJob"
    """The job fails at once, because a retry would not help."""
    IGNORE = "Ignore"
    """The run restarts, and the restart does not count toward `recovery.maxRestarts`."""
    COUNT = "Count"
    """The run restarts, and the restart counts, as without a rule."""


class ExitCodeRule(ApiModel):
    """What to do if the process of a rank or worker exits with one of these codes."""

    values: Annotated[list[ExitCode], Field(min_length=1, max_length=64)]
    """Exit codes. A process killed by a signal has 128 plus the signal's number, so 137 for out of memory."""
    action: FailureAction
    """`FailJob`: fail the job at once. `Ignore`: restart without counting. `Count`: restart and count."""
