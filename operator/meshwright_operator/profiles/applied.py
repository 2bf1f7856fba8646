"""The profile that a job's pods use, and its copy in the job's status.

A job keeps the profile with which its pods started, whatever the administrator changes, until none of its pods is left
or an edit restarts the gang. So all its pods are alike, and a change of a profile restarts nothing. The copy is sealed
with the operator's key: who may write the status of a job cannot grant its pods anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError

from meshwright.api.parsing import parse_known_fields
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright.profiles.document import Profiles
from meshwright.profiles.profile import Profile

Seal = Callable[[str], str]
"""From a text to its seal, for one job."""


@dataclass(frozen=True, slots=True)
class AppliedProfile:
    """A profile, as the pods of one revision of a job use it."""

    name: str
    profile: Profile
    record: str
    """The copy for the job's status."""


def choose_profile(
    name: str,
    namespace: str,
    revision: str,
    status: ParallelTrainingJobStatus,
    profiles: Profiles,
    seal: Seal,
    *,
    has_pods: bool,
) -> AppliedProfile | str:
    """The profile for the pods of a job, or why it gets none.

    Args:
        name: `spec.workers.profile`.
        namespace: The job's namespace.
        revision: The revision of the pods.
        status: The job's status, with the profile of its pods so far.
        profiles: The administrator's profiles.
        seal: Seals texts of this job.
        has_pods: Whether pods of the job are left.
    """
    if has_pods:
        record = status.applied_profile or ""
        kept = _decode(record, seal)
        if kept is not None and kept[0] == (name, revision):
            return AppliedProfile(name, kept[1], record)
    profile = profiles.find(name, namespace)
    if isinstance(profile, str):
        return profile
    return AppliedProfile(name, profile, _encode(name, revision, profile, seal))


def _encode(name: str, revision: str, profile: Profile, seal: Seal) -> str:
    fields = profile.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, exclude={"namespaces", "description"}
    )
    document = {"name": name, "revision": revision, "profile": fields}
    return _json({**document, "seal": seal(_json(document))})


def _decode(record: str, seal: Seal) -> tuple[tuple[str, str], Profile] | None:
    """Name, revision and profile of a record. None if it is empty, damaged, or was sealed with another key."""
    try:
        document = json.loads(record) if record else None
        if not isinstance(document, dict) or document.pop("seal", None) != seal(_json(document)):
            return None
        profile = parse_known_fields(Profile, document["profile"])
        return (document["name"], document["revision"]), profile
    except (ValidationError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _json(document: object) -> str:
    return json.dumps(document, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
