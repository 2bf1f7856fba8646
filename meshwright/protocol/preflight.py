"""What an agent checks before its ranks start: what its pod needs, and what it found."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from meshwright.api.base import ApiModel

MAX_FINDINGS = 32


class PodNeeds(ApiModel):
    """What the operator knows about a pod that the agent cannot see. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    network: Annotated[str, Field(max_length=32)] = ""
    """Kind of the network: InfiniBand, RoCE, EFA, Plugin or TCP. Empty if it is not known."""
    rdma: bool = False
    """Whether the pod requests devices of a network."""
    huge_pages: Annotated[dict[str, str], Field(max_length=4)] = {}
    """Requested huge pages by page size, such as `2Mi: 5120Mi`."""
    several_workers: bool = False
    """Whether the job has several workers."""


class Finding(ApiModel):
    """What is wrong with a pod, and its fix."""

    model_config = ConfigDict(extra="ignore")

    check: Annotated[str, Field(max_length=32)]
    """Name of the check. An unknown one is that of a newer agent."""
    message: Annotated[str, Field(max_length=512)]
    """What was found."""
    fix: Annotated[str, Field(max_length=512)] = ""
    """What to do."""


class PreflightReport(ApiModel):
    """The result of all checks of a pod."""

    model_config = ConfigDict(extra="ignore")

    findings: Annotated[list[Finding], Field(max_length=MAX_FINDINGS)] = []
    """What was found. Empty if all checks passed."""
    volume: Annotated[str, Field(max_length=64)] = ""
    """Id of the checkpoint volume. Workers with other ids have another volume. Empty without a checkpoint."""
