"""What an edit may not change, in CEL for the API server and in Python for objects that never passed it.

The rules stand at the object's root: there they see whether the job has started, and there a field that is removed and
added again is compared all the same, which `self == oldSelf` on an optional field does not do. Until a job has started
everything but its manager may be put right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.api.spec import ParallelTrainingJobSpec as Spec
from meshwright.api.training import TrainingSpec

_STARTED = "has(oldSelf.status) && has(oldSelf.status.startTime)"


@dataclass(frozen=True, slots=True)
class Transition:
    """A condition on an edit of the spec."""

    field: str
    """The field to blame: a path below `spec`."""
    message: str
    """What must hold, and what to do instead."""
    cel: str
    """The condition over `self` and `oldSelf`, whole objects with their defaults."""
    holds: Callable[[Spec, Spec], bool]
    """The same condition, of the spec before and after."""
    from_start: bool = False
    """Whether it holds only once the job has started."""


def _same(field: str) -> str:
    """CEL: the field is absent before and after, or equal."""
    new, old = f"self.spec.{field}", f"oldSelf.spec.{field}"
    return f"has({new}) == has({old}) && (!has({new}) || {new} == {old})"


def _after_start(cel: str) -> str:
    return f"!({_STARTED}) || ({cel})"


def _same_samples(old: Spec, new: Spec) -> bool:
    """Seed and sequence length decide with the text which tokens sample number i is; the others, what is trained."""
    if old.training is None or new.training is None:
        return (old.training is None) == (new.training is None)
    return _sample_identity(old.training) == _sample_identity(new.training)


def _sample_identity(training: TrainingSpec) -> tuple[object, ...]:
    return (training.seed, training.sequence_length, training.initial_weights, training.lora)


def _same_checkpoints(old: Spec, new: Spec) -> bool:
    if old.checkpoint is None:
        return True
    return new.checkpoint is not None and new.checkpoint.claim_name == old.checkpoint.claim_name


TRANSITIONS = (
    Transition(
        "managedBy",
        "may not be changed, added or removed: create a new job for another manager",
        _same("managedBy"),
        lambda old, new: old.managed_by == new.managed_by,
    ),
    Transition(
        "model",
        "may not be changed once the job has started: its checkpoints hold this model; create a new job",
        _after_start(_same("model")),
        lambda old, new: old.model == new.model,
        from_start=True,
    ),
    Transition(
        "data",
        "may not be changed once the job has started: samples would be lost or repeated; create a new job",
        _after_start(_same("data")),
        lambda old, new: old.data == new.data,
        from_start=True,
    ),
    Transition(
        "training",
        "`training.seed`, `training.sequenceLength`, `training.initialWeights` and `training.lora` may not be changed "
        "once the job has started: samples would be lost or repeated, or weights mixed; create a new job",
        _after_start(
            "has(self.spec.training) == has(oldSelf.spec.training) && (!has(self.spec.training)"
            " || (self.spec.training.seed == oldSelf.spec.training.seed"
            " && self.spec.training.sequenceLength == oldSelf.spec.training.sequenceLength"
            f" && ({_same('training.initialWeights')}) && ({_same('training.lora')})))"
        ),
        _same_samples,
        from_start=True,
    ),
    Transition(
        "checkpoint",
        "`checkpoint.claimName` may not be changed, nor `checkpoint` removed, once the job has started: it would begin "
        "again at step 0; create a new job",
        _after_start(
            "!has(oldSelf.spec.checkpoint) || (has(self.spec.checkpoint)"
            " && self.spec.checkpoint.claimName == oldSelf.spec.checkpoint.claimName)"
        ),
        _same_checkpoints,
        from_start=True,
    ),
)
