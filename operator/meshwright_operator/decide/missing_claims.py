"""A job that names PersistentVolumeClaims which do not exist: it gets no nodes, and its conditions name them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.api import conditions as names
from meshwright.api.conditions import find
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright_operator.decide.decision import Decision
from meshwright_operator.kube.job_event import WARNING
from meshwright_operator.text import sentences
from meshwright_operator.timestamps import seconds_since

CLAIM_NOT_FOUND = "ClaimNotFound"
"""Reason of a job that names a claim which does not exist."""
UNALLOCATED = "Unallocated"
"""Kind of a claim that exists, but has no devices that several pods could share."""
STALLED_AFTER_SECONDS = 20.0
"""Until then the job only waits: `kubectl apply` may create the claim right after it."""
RETRY_SECONDS = 2.0
STALLED_RETRY_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class MissingClaim:
    """A claim that does not exist."""

    field: str
    """The path below `spec` that names it."""
    name: str
    similar: tuple[str, ...] = ()
    """Claims of the namespace with similar names."""
    kind: str = "PersistentVolumeClaim"
    """Empty if the cluster does not have the kind itself, whose name is `name`."""

    def __str__(self) -> str:
        hint = f", did you mean {' or '.join(f'`{name}`' for name in self.similar)}?" if self.similar else ""
        return f"`{self.name}` (`spec.{self.field}`{hint})"


def claims_of(spec: ParallelTrainingJobSpec) -> Iterator[tuple[str, str]]:
    """The claims that the workers mount: path below `spec`, and name."""
    if spec.checkpoint is not None and spec.checkpoint.claim_name is not None:
        yield "checkpoint.claimName", spec.checkpoint.claim_name
    if spec.data is not None and spec.data.claim_name is not None:
        yield "data.claimName", spec.data.claim_name
    for index, volume in enumerate(spec.workers.volumes):
        if volume.claim_name is not None:
            yield f"workers.volumes[{index}].claimName", volume.claim_name


def _messages(missing: Sequence[MissingClaim], namespace: str) -> Iterator[str]:
    """What is missing and what to do, for each kind."""
    for kind in dict.fromkeys(claim.kind for claim in missing):
        claims = [claim for claim in missing if claim.kind == kind]
        listed = ", ".join(str(claim) for claim in claims)
        verb, plural, them = ("does", "", "it") if len(claims) == 1 else ("do", "s", "them")
        if kind == UNALLOCATED:
            yield f"ResourceClaim{plural} {listed} {'has' if len(claims) == 1 else 'have'} no devices yet"
            yield "Several pods cannot share it then: use `resourceClaimTemplateName`, so that each pod gets its own"
        elif kind:
            yield f"{kind}{plural} {listed} {verb} not exist in namespace {namespace}"
            yield f"Create {them}, or correct the field"
        else:
            yield f"The cluster does not have {listed}"
            yield "Install NVIDIA's DRA driver for GPUs, or remove the field"


def wait_for_claims(decision: Decision, missing: Sequence[MissingClaim], namespace: str) -> None:
    """Replaces the request for nodes by a wait for the claims."""
    decision.place = None
    message = sentences(*_messages(missing, namespace))
    old = find(decision.observed.status.conditions, names.PLACED)
    since = old.last_transition_time if old is not None and old.reason == CLAIM_NOT_FOUND else None
    if old is None or since is None or old.message != message:
        decision.add_event(CLAIM_NOT_FOUND, message, WARNING)
    stalled = since is not None and seconds_since(since, decision.observed.now) >= STALLED_AFTER_SECONDS
    decision.condition(names.PLACED, False, CLAIM_NOT_FOUND, message)
    decision.job_state(CLAIM_NOT_FOUND, message, stalled=stalled)
    decision.requeue_within(STALLED_RETRY_SECONDS if stalled else RETRY_SECONDS)
