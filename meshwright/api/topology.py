"""`spec.topology`: which levels of the fabric the groups of each dimension may cross."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel


class FabricLevel(StrEnum):
    """A level of the fabric, closest first."""

    NODE = "node"
    DOMAIN = "domain"
    RACK = "rack"
    SPINE = "spine"
    CORE = "core"
    ZONE = "zone"
    REGION = "region"


class TopologyLevels(ApiModel):
    """The levels that a dimension's groups must not, or should not, leave."""

    required: FabricLevel | None = None
    """Each group is inside one location of this level, or the job waits."""
    preferred: FabricLevel | None = None
    """As few groups as possible leave a location of this level."""


class TopologySpec(ApiModel):
    """Levels of the fabric that the ranks of a group share, by dimension. A level holds for the tensor-parallel groups
    of these ranks too.
    """

    tensor: TopologyLevels | None = None
    """Tensor-parallel groups. `required` defaults to `domain`."""
    context: TopologyLevels | None = None
    """Context-parallel groups."""
    pipeline: TopologyLevels | None = None
    """Pipelines: the stages of a replica."""
    expert: TopologyLevels | None = None
    """Expert-parallel groups."""
    data: TopologyLevels | None = None
    """Ranks that reduce the same gradients."""
    job: TopologyLevels | None = None
    """All ranks of the job."""
    multi_node_nvlink: Annotated[bool | None, Field(alias="multiNodeNVLink")] = None
    """Whether NVLink joins the GPUs of several nodes, as in an NVL72 rack: the operator makes a ComputeDomain of
    NVIDIA's driver for the job, and each pod claims its channel."""

    def stated(self) -> Iterator[tuple[str, TopologyLevels]]:
        """The dimensions with levels, and these."""
        for name in type(self).model_fields:
            levels = getattr(self, name)
            if isinstance(levels, TopologyLevels):
                yield name, levels
