"""The administrator's policy: bounds on the jobs of a namespace, and its weight in the queue.

The policy is one document, with defaults for all namespaces and entries for names or globs. It bounds what starts:
a running job is never stopped because of it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import Field, PrivateAttr, model_validator

from meshwright.api.base import ApiModel
from meshwright_operator.documents import DocumentError, parse_document

LARGEST = 1_000_000_000

UriPrefix = Annotated[str, Field(min_length=6, max_length=512, pattern=r"^[a-z][a-z0-9+.-]*://[^\s]+$")]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
PriorityValue = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]


class PolicyError(DocumentError):
    """The policy document is invalid. The message names the fields and what they must be."""


class PriorityBounds(ApiModel):
    """Bounds of `spec.priority`."""

    min: PriorityValue = -LARGEST
    """Lowest priority."""
    max: PriorityValue = LARGEST
    """Highest priority."""

    @model_validator(mode="after")
    def _check_order(self) -> PriorityBounds:
        if self.min > self.max:
            raise ValueError(f"`min` ({self.min}) must be at most `max` ({self.max})")
        return self

    def clamp(self, priority: int) -> int:
        """The closest priority within the bounds."""
        return min(max(priority, self.min), self.max)


class Bounds(ApiModel):
    """Bounds on the jobs of one namespace. A bound that is left out does not apply."""

    priority: PriorityBounds = PriorityBounds()
    """Bounds of `spec.priority`."""
    max_spare_nodes: Count | None = None
    """Largest `spec.recovery.spareNodes` of one job."""
    max_replicas: Count | None = None
    """Largest number of data-parallel replicas of one job."""
    max_gpus_per_job: Count | None = None
    """Largest number of GPUs of one job."""
    max_gpus_in_use: Count | None = None
    """GPUs that all jobs of the namespace use at the same time."""
    max_waiting_jobs: Count | None = None
    """Jobs of the namespace that wait for nodes at the same time."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2147483647)] | None = None
    """Time after which finished jobs without `spec.ttlSecondsAfterFinished` are deleted. By default they are not."""
    checkpoint_prefixes: Annotated[list[UriPrefix], Field(max_length=1000)] | None = None
    """Prefixes of `spec.checkpoint.uri`, and of a URI in `spec.checkpoint.resumeFrom`, such as
    `s3://bucket/{namespace}/`, in which `{namespace}` is the job's. An empty list allows no URI."""
    weight: Annotated[float, Field(gt=0, le=1_000_000)] = 1.0
    """Share of the namespace: at the same priority, the namespace that uses the fewest GPUs for its weight is first."""


class NamespaceBounds(Bounds):
    """Bounds on the jobs of the namespaces that an entry matches."""

    match: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-a-z0-9*?\[\]!]+$")]
    """Name of a namespace, or a glob such as `research-*`."""


class Policy(ApiModel):
    """The document."""

    defaults: Bounds = Bounds()
    """Bounds on jobs in every namespace."""
    namespaces: Annotated[list[NamespaceBounds], Field(max_length=10_000)] = []
    """Bounds for some namespaces. The first entry that matches applies; what it leaves out is taken from `defaults`."""

    _known: dict[str, Bounds] = PrivateAttr(default_factory=dict)

    def of(self, namespace: str) -> Bounds:
        """The bounds on jobs in a namespace."""
        bounds = self._known.get(namespace)
        if bounds is None:
            entry = next((entry for entry in self.namespaces if fnmatchcase(namespace, entry.match)), None)
            bounds = self._known[namespace] = self.defaults if entry is None else _merged(self.defaults, entry)
        return bounds


def parse_policy(text: str) -> Policy:
    """Parse a policy document, in YAML or JSON. An empty document has no bounds.

    Raises:
        PolicyError: The document is invalid.
    """
    return parse_document(text, Policy, "a mapping with `defaults` and `namespaces`", PolicyError)


def _merged(defaults: Bounds, entry: NamespaceBounds) -> Bounds:
    given = {name: getattr(entry, name) for name in entry.model_fields_set if name != "match"}
    if "priority" in given:
        own = entry.priority
        inherited = {name: getattr(defaults.priority, name) for name in ("min", "max")}
        given["priority"] = PriorityBounds.model_construct(
            **{**inherited, **{name: getattr(own, name) for name in own.model_fields_set}}
        )
    return defaults.model_copy(update=given)
