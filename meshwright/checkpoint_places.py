"""Where a job's checkpoints are, as its worker pods see it, and what a pod needs to read them there."""

from __future__ import annotations

from meshwright.api import labels
from meshwright.api.checkpoint import SECRET_VARIABLES, CheckpointSpec
from meshwright.api.objects import KubeObject

_S3 = ("s3", "s3a")


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


def store_credentials(checkpoint: CheckpointSpec | None) -> list[KubeObject]:
    """The variables with the credentials of the object store, from the job's Secret. Each key may be missing in it."""
    if checkpoint is None or checkpoint.uri is None or checkpoint.store is None or not checkpoint.store.secret_name:
        return []
    names = SECRET_VARIABLES.get(checkpoint.uri.partition("://")[0], ())
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
