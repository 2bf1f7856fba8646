"""What a queue outside of the operator, such as Kueue, says about a job: whether it may run, how large, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.workers import Toleration

WAITING_FOR_QUOTA = "WaitingForQuota"
"""Reason of a job that its queue has not admitted, or not again."""
QUEUE_UNAVAILABLE = "QueueUnavailable"
"""Reason of a job whose queue the cluster does not have, or whose assigned flavor."""


@dataclass(frozen=True, slots=True)
class Domain:
    """A part of the cluster that the queue assigned to some of the workers."""

    name: str
    """The values of its labels, such as `block1/rack2`."""
    nodes: frozenset[str]
    """Its nodes now."""
    workers: int
    """How many workers run there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The state of a job in its queue."""

    admitted: bool
    message: str = ""
    """Why it is not admitted, or why it lost its admission."""
    evicted: bool = False
    """Whether it was admitted, and has to stop."""
    unavailable: bool = False
    """Whether there is no queue to ask, or what it assigned does not exist. Then the job does not start, but one that
    runs goes on."""
    workers: int | None = None
    """The number of admitted workers, if it may be less than the job wants."""
    replicas: int | None = None
    """The replicas that these workers run."""
    node_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that the job's nodes must have, besides those of the spec."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that the pods tolerate, besides those of the spec."""
    domains: tuple[Domain, ...] = ()
    """Where the workers run. Empty: anywhere."""
    pod_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels by which the queue knows the pods."""
    pod_annotations: Mapping[str, str] = field(default_factory=dict)

    def placed(self, spec: ParallelTrainingJobSpec) -> ParallelTrainingJobSpec:
        """The spec with what the queue requires of nodes."""
        workers = spec.workers
        more = [one for one in self.tolerations if one not in workers.tolerations]
        if not self.node_labels and not more:
            return spec
        update = {
            "node_selector": {**workers.node_selector, **self.node_labels},
            "tolerations": [*workers.tolerations, *more],
        }
        return spec.model_copy(update={"workers": workers.model_copy(update=update)})
