"""What an edit of a job does, by field: one table for operator, API server, documentation and tests.

An edit of a field that is not listed restarts the gang, because plan, pods and ranks depend on it. `IMMUTABLE` is
checked in CEL by the API server, and in Python for objects that did not pass admission. Its CEL rules are at the
object's root: there they see whether a step is finished, and also compare a field that is removed and added again,
which `self == oldSelf` on an optional field does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import NoneType
from typing import get_args

from pydantic import BaseModel

from meshwright.api.elastic import ElasticSpec
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.rules.revision import restarting_fields

_TRAINED = (
    "has(oldSelf.status) && has(oldSelf.status.startTime) && (has(oldSelf.status.checkpoint)"
    " || has(oldSelf.status.step) && oldSelf.status.step > 0"
    " || has(oldSelf.spec.runtime) && has(oldSelf.spec.runtime.command))"
)
"""In CEL: whether a step is finished. A user's command reports no steps, so for one: whether the job has started."""


class Effect(StrEnum):
    """What an edit of a field does."""

    LIVE = "takes effect at once"
    NEXT_START = "takes effect when ranks start next"
    RESTART = "restarts the gang from a checkpoint"
    REJECTED = "rejected once a step is finished; `managedBy` always"


LIVE = (
    "suspend",
    "activeDeadlineSeconds",
    "ttlSecondsAfterFinished",
    "recovery",
    "successPolicy",
    "priority",
    "preemptible",
    "updatePolicy",
    "preflight",
    "elastic",
)
"""Fields that the operator reads at each reconcile. Pods and ranks do not depend on them."""

RESTARTING = ("elastic.scaledBatch",)
"""Members of fields of `LIVE` that restart the gang: ranks depend on them."""

NEXT_START = (
    "checkpoint.everySteps",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.keepFor",
    "checkpoint.keepEverySteps",
    "checkpoint.keepBest",
    "checkpoint.staging",
    "checkpoint.writer",
)
"""Fields that ranks receive when a mesh generation starts."""


@dataclass(frozen=True, slots=True)
class Immutable:
    """A field of the spec that an edit must not change once a step is finished.

    Until then nothing depends on it, and a mistake in it can be corrected.
    """

    field: str
    """The field that errors name: a field of `spec`."""
    why: str
    """What an edit would break."""
    members: tuple[str, ...] = ()
    """The members of the field that are protected. Empty: the entire field."""
    always: bool = False
    """Whether the field is also protected before that."""
    may_be_added: bool = False
    """Whether an edit may add the field if the spec does not have it."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The protected paths below `spec`."""
        return tuple(f"{self.field}.{member}" for member in self.members) or (self.field,)

    @property
    def message(self) -> str:
        """What must not change, and what to do instead."""
        *names, last = (f"`{path}`" for path in self.paths)
        subject = f"{', '.join(names)} and {last} " if names else f"{last} " if self.members else ""
        verb = "changed or removed" if self.may_be_added else "changed"
        when = "" if self.always else " once a step is finished"
        return f"{subject}cannot be {verb}{when}, because {self.why}: create a new job"

    @property
    def cel(self) -> str:
        """The condition over `self` and `oldSelf`, two objects with their defaults."""
        unchanged = self._members_unchanged() if self.members else _unchanged(self.field)
        return unchanged if self.always else f"!({_TRAINED}) || ({unchanged})"

    def _members_unchanged(self) -> str:
        new, old = f"self.spec.{self.field}", f"oldSelf.spec.{self.field}"
        optional = _optional_members(self.field)
        same = " && ".join(
            f"({_unchanged(path)})" if member in optional else f"self.spec.{path} == oldSelf.spec.{path}"
            for member, path in zip(self.members, self.paths, strict=True)
        )
        if self.may_be_added:
            return f"!has({old}) || (has({new}) && {same})"
        return f"has({new}) == has({old}) && (!has({new}) || ({same}))"

    def holds(self, old: ParallelTrainingJobSpec, new: ParallelTrainingJobSpec) -> bool:
        """Whether the edit keeps the condition."""
        name = _attributes(ParallelTrainingJobSpec)[self.field]
        before, after = getattr(old, name), getattr(new, name)
        if not self.members:
            return bool(before == after)
        if before is None or after is None:
            return before is None and (self.may_be_added or after is None)
        names = _attributes(type(before))
        return all(getattr(before, names[member]) == getattr(after, names[member]) for member in self.members)


def _unchanged(path: str) -> str:
    """In CEL: the field is absent before and after, or equal."""
    new, old = f"self.spec.{path}", f"oldSelf.spec.{path}"
    return f"has({new}) == has({old}) && (!has({new}) || {new} == {old})"


def _attributes(model: type[BaseModel]) -> dict[str, str]:
    """Name of a field on the wire -> attribute."""
    return {info.alias or name: name for name, info in model.model_fields.items()}


def _optional_members(field: str) -> set[str]:
    """The members of a field of the spec that may be absent. CEL must not read them without `has`."""
    annotation = ParallelTrainingJobSpec.model_fields[_attributes(ParallelTrainingJobSpec)[field]].annotation
    (model,) = (part for part in get_args(annotation) if part is not NoneType)
    return {info.alias or name for name, info in model.model_fields.items() if info.default is None}


IMMUTABLE = (
    Immutable(
        "managedBy",
        "two controllers would act on the job",
        always=True,
    ),
    Immutable(
        "model",
        "checkpoints contain this model",
    ),
    Immutable(
        "data",
        "samples would be lost or repeated",
    ),
    Immutable(
        "training",
        "samples would be lost or repeated, or weights mixed",
        members=("seed", "sequenceLength", "initialWeights", "lora"),
    ),
    Immutable(
        "checkpoint",
        "training would start again at step 0",
        members=("claimName", "uri"),
        may_be_added=True,
    ),
)
"""Every field that an edit must not change."""

IMMUTABLE_PATHS = tuple(path for immutable in IMMUTABLE for path in immutable.paths)
"""The paths of `IMMUTABLE`."""


def effect_of(path: str) -> Effect:
    """The effect of editing the field at a dotted path below `spec`."""
    tables = (
        (Effect.REJECTED, IMMUTABLE_PATHS),
        (Effect.RESTART, RESTARTING),
        (Effect.LIVE, LIVE),
        (Effect.NEXT_START, NEXT_START),
    )
    for effect, table in tables:
        if any(path == entry or path.startswith(f"{entry}.") for entry in table):
            return effect
    return Effect.RESTART


def live_fields(running: ParallelTrainingJobSpec, wanted: ParallelTrainingJobSpec) -> tuple[str, ...]:
    """The fields that take effect at once. With `elastic`, `replicas` is one of them.

    An edit that adds or removes `elastic` restarts the gang: workers that run keep theirs until then.
    """
    if (running.elastic is None) != (wanted.elastic is None):
        return tuple(field for field in LIVE if field != "elastic")
    return (*LIVE, "replicas") if running.elastic is not None else LIVE


def with_live_fields(running: ParallelTrainingJobSpec, wanted: ParallelTrainingJobSpec) -> ParallelTrainingJobSpec:
    """`running` with the fields of `wanted` that take effect at once."""
    return _with_fields(running, wanted, live_fields(running, wanted))


def with_later_fields(running: ParallelTrainingJobSpec, wanted: ParallelTrainingJobSpec) -> ParallelTrainingJobSpec:
    """`running` with the fields of `wanted` that take effect at once or at the next start, without a restart."""
    return _with_fields(running, wanted, (*live_fields(running, wanted), *NEXT_START))


def _with_fields(
    running: ParallelTrainingJobSpec, wanted: ParallelTrainingJobSpec, paths: tuple[str, ...]
) -> ParallelTrainingJobSpec:
    names = _attributes(ParallelTrainingJobSpec)
    update: dict[str, object] = {}
    for path in paths:
        field, _, member = path.partition(".")
        name = names[field]
        before, after = update.get(name, getattr(running, name)), getattr(wanted, name)
        if name == "elastic" and isinstance(before, ElasticSpec) and isinstance(after, ElasticSpec):
            update[name] = after.model_copy(update={"scaled_batch": before.scaled_batch})
        elif not member:
            update[name] = after
        elif isinstance(before, BaseModel) and isinstance(after, BaseModel):
            attribute = _attributes(type(before))[member]
            update[name] = before.model_copy(update={attribute: getattr(after, attribute)})
    return running.model_copy(update=update)


def restarting_parts(spec: ParallelTrainingJobSpec) -> dict[str, object]:
    """The fields that determine plan, pods and ranks, in the canonical form of a revision."""
    return restarting_fields(spec.wire())
