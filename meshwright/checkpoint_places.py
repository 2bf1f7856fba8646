"""Where a job's checkpoints are, as its worker pods see it, and what a pod needs to read them there."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshwright.api import labels
from meshwright.api.checkpoint import SECRET_VARIABLES, CheckpointSpec
from meshwright.api.objects import KubeObject

_S3 = ("s3", "s3a")
_CHECKPOINT = re.compile(r"step-(\d{8,})(-g\d+)?")
"""Name of a checkpoint: in an object store, with its mesh generation."""


def checkpoint_directory(name: str, uid: str) -> str:
    """The directory of the job's checkpoints in its worker pods.

    It contains the job's uid, so that a new job does not load the checkpoints of a deleted job with the same name. Two
    jobs can share a volume.
    """
    return f"{labels.CHECKPOINT_MOUNT}/{name}-{uid[:8]}"


def checkpoint_uri(uri: str, name: str, uid: str) -> str:
    """The prefix of the job's checkpoints in an object store: see `checkpoint_directory`."""
    return f"{uri.rstrip('/')}/{name}-{uid[:8]}"


def checkpoint_places(checkpoint: CheckpointSpec, name: str, uid: str) -> list[str]:
    """The job's directory on the claim, its prefix in the object store, or both, in the order of their use."""
    places = [checkpoint_directory(name, uid)] if checkpoint.claim_name is not None else []
    return places + ([checkpoint_uri(checkpoint.uri, name, uid)] if checkpoint.uri is not None else [])


@dataclass(frozen=True, slots=True)
class ResumeSource:
    """The run that `checkpoint.resumeFrom` names."""

    place: str
    """The run's directory, or its prefix in an object store."""
    step: int | None = None
    """The checkpoint that is named; None for the newest one."""
    name: str = ""
    """The name of that checkpoint, if it contains the mesh generation."""


def resume_source(resume_from: str, claim: str) -> ResumeSource:
    """What `checkpoint.resumeFrom` names. `claim` is the directory at which the claim is mounted."""
    path = resume_from.rstrip("/")
    before, _, last = path.rpartition("/")
    is_uri = "://" in path
    named = _CHECKPOINT.fullmatch(last)
    if named is None or (named[2] and not is_uri):
        return ResumeSource(path if is_uri else f"{claim}/{path}")
    place = before if is_uri else f"{claim}/{before}".rstrip("/")
    return ResumeSource(place, int(named[1]), last if named[2] else "")


def store_credentials(checkpoint: CheckpointSpec | None) -> list[KubeObject]:
    """The variables with the credentials of the object store, from the job's Secret. Each key may be missing in it."""
    if checkpoint is None or checkpoint.store is None or not checkpoint.store.secret_name:
        return []
    of_uris = [SECRET_VARIABLES.get(uri.partition("://")[0], ()) for uri in checkpoint.uris]
    names = dict.fromkeys(name for found in of_uris for name in found)
    secret = checkpoint.store.secret_name
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name, "optional": True}}} for name in names
    ]


def store_settings(checkpoint: CheckpointSpec | None) -> list[KubeObject]:
    """The variables with which fsspec finds the object store in a pod that does not get the job's spec."""
    store = checkpoint.store if checkpoint is not None else None
    if checkpoint is None or checkpoint.uri is None or store is None:
        return []
    found = {"FSSPEC_S3_ENDPOINT_URL": store.endpoint, "AWS_DEFAULT_REGION": store.region}
    is_s3 = checkpoint.uri.partition("://")[0] in _S3
    return [{"name": name, "value": value} for name, value in found.items() if value is not None and is_s3]
