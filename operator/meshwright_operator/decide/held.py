"""An edit that cannot be put into effect (yet): the job goes on as it was, and its conditions say so."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright_operator.decide.conditions import Situation


@dataclass(frozen=True, slots=True)
class Held:
    """Why the spec as it stands is not what runs."""

    reason: str
    """CamelCase, for the conditions."""
    message: str
    waits: bool
    """Whether room or other nodes can help; else only another edit can."""


def situation_of(held: Held, revision: str, running: Situation) -> Situation:
    """Where a job stands of which `revision` goes on in the situation `running` instead of the spec as it stands.

    Never Ready, however well the old revision does: what its owner asks for now is not what runs.
    """
    message = f"{held.message}; until then revision {revision} goes on ({running.reason}: {running.message})"
    return replace(running, reason=held.reason, message=message, ready=False, stalled=not held.waits)
