"""`spec.elastic`: how many replicas a job may run with."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel
from meshwright.api.data_parallel import Degree


class LossAction(StrEnum):
    """What a job does that lost workers."""

    REPLACE = "Replace"
    SHRINK = "Shrink"


class RateScaling(StrEnum):
    """How the learning rate follows the batch."""

    CONSTANT = "Constant"
    LINEAR = "Linear"
    SQUARE_ROOT = "SquareRoot"


class ScaledBatch(ApiModel):
    """A global batch in proportion to the replicas in effect."""

    replicas: Degree
    """Number of replicas with which `training.globalBatchSize` and the learning rates apply as they are."""
    learning_rate: RateScaling
    """Factor of the learning rates for n times the batch: 1 (`Constant`), n (`Linear`), or its `SquareRoot`."""


class ElasticSpec(ApiModel):
    """How the number of replicas follows the cluster. A resize restarts ranks in the pods that stay."""

    min_replicas: Degree = 1
    """Smallest number of replicas. With fewer, the job waits for nodes."""
    max_replicas: Degree | None = None
    """Largest number of replicas. Defaults to `replicas`."""
    fill: bool = False
    """Whether the job grows up to `maxReplicas` while nodes are free. Otherwise it grows up to `replicas`."""
    replacement_seconds: Annotated[int, Field(ge=0, le=86400)] = 30
    """How long a job that lost workers waits for nodes to replace them before it continues with fewer replicas."""
    on_loss: LossAction = LossAction.REPLACE
    """What happens when workers are lost. `Replace`: the ranks wait until replacements have started, if nodes are free
    within `replacementSeconds`. `Shrink`: the complete replicas that are left continue at once, if there are at least
    `minReplicas`, and the job grows again once replacements have started beside them."""
    pause_seconds: Annotated[int, Field(ge=10, le=86400)] = 300
    """Shortest time between a resize and the next growth, or the next shrink for a waiting job of the same priority.
    An edit of `replicas` does not wait."""
    min_gain_percent: Annotated[int, Field(ge=0, le=1000)] = 0
    """Growth of less than this part of the current replicas is not worth a restart of the ranks. An edit of `replicas`
    takes effect in any case."""
    replan: bool = False
    """Whether the job is planned anew, for the GPUs that are left, if fewer than `minReplicas` fit on the nodes: with
    other degrees and another ZeRO stage. It continues from the resharded checkpoint, and returns to its full layout
    when nodes are free. Not with `runtime.command`."""
    min_gpus: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Smallest number of GPUs that the job is planned anew for. Needs `replan: true`. Defaults to one worker."""
    scaled_batch: ScaledBatch | None = None
    """Each replica keeps its number of sequences per step, so the global batch follows the replicas in effect. By
    default the global batch stays the same. An edit restarts the gang."""
