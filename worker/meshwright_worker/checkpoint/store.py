"""Where the checkpoints of a job are: a directory, or a prefix of an object store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from meshwright.api.checkpoint import Encryption, Interval, Retention, StoreSpec
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.files import CheckpointFiles
from meshwright_worker.checkpoint.manifest import BaseManifest, FileRecord
from meshwright_worker.checkpoint.object_store import ObjectDirectory, ObjectFiles
from meshwright_worker.checkpoint.retry import RetryPolicy
from meshwright_worker.checkpoint_errors import CheckpointStoreError, UnusableStoreError

READ_SECONDS = 60
"""Time after which a request to S3 without an answer is repeated."""
_S3_SCHEMES = ("s3", "s3a")
_CONFIG = {"connect_timeout": 10, "retries": {"max_attempts": 1}}
"""Of botocore. It repeats nothing itself: with s3fs' and `retry` the attempts would multiply."""


class CheckpointSink(Protocol):
    """Writes the files of a checkpoint that is being saved. Durable on return.

    Raises:
        OSError: a file cannot be written.
    """

    def write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, int], FileRecord]:
        """Write a file with tensors; where each tensor's bytes begin in it."""

    def write(self, name: str, content: bytes) -> FileRecord:
        """Write a file."""

    def copy(self, name: str, parts: Callable[[], Iterable[bytes]]) -> FileRecord:
        """Write a file in parts. `parts` is called again for another attempt."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A store, and which checkpoints of the job it gets."""

    store: CheckpointStore
    retention: Retention
    """Which complete checkpoints stay."""
    interval: Interval = Interval(steps=1)
    """How often it gets one."""


class CheckpointStore(Protocol):
    """Names, commits and removes the checkpoints of one job. Its `str` is the path or URI.

    Only rank 0 changes anything, except through `sink`. Every method raises an OSError if the store does not work.
    """

    is_remote: bool
    """Whether every rank sees the same, so that only one has to list it. A volume may be another one on some node."""

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, newest first."""

    def files(self, step: int) -> CheckpointFiles:
        """The files of the complete checkpoint of a step."""

    def location(self, step: int) -> str:
        """Path or URI that the checkpoint of a step has when it is complete."""

    def prepare(self, step: int) -> object:
        """Make an empty place for a checkpoint that is about to be written.

        Raises:
            NewerCheckpointsError: there are checkpoints of later steps, so `retain` would remove this one first.
        """

    def make_place(self, step: int) -> object:
        """`prepare`, whatever checkpoints there are."""

    def sink(self, step: int) -> CheckpointSink:
        """Writes the files of the checkpoint of a step, until it is committed."""

    def commit(self, manifest: BaseManifest) -> object:
        """Complete the checkpoint of the manifest's step, all of whose files are written."""

    def complete(self, step: int, manifest: bytes, files: Iterable[str]) -> object:
        """`commit` with a manifest that another checkpoint has, and the names of its files."""

    def amend(self, manifest: BaseManifest) -> None:
        """Replace the manifest of a complete checkpoint, whose files stay. A reader sees the old or the new one."""

    def unfinished(self) -> dict[int, str]:
        """Step -> `incomplete` or `damaged`, of checkpoints that no reader uses."""

    def saved_at(self, step: int) -> float | None:
        """When the complete checkpoint of a step was saved, in seconds since 1970. None if the store does not know."""

    def evaluation_losses(self) -> dict[int, float | None]:
        """Step of each complete checkpoint -> the evaluation loss in its manifest; None without one."""

    def retain(self, retention: Retention) -> None:
        """Remove all complete checkpoints that nothing retains, and all replaced or damaged ones."""

    def discard(self, step: int) -> None:
        """Remove what a failed save has written of a checkpoint. Does not fail."""

    def remove_newer(self, step: int) -> None:
        """Remove all complete checkpoints of later steps than this one."""

    def clean(self) -> None:
        """Remove what earlier processes have not finished. Call before any save."""

    def quarantine(self, step: int) -> None:
        """Hide a damaged checkpoint. It stays until the next one is complete."""


def open_store(
    location: str, generation: int = 0, options: StoreSpec | None = None, field: str = ""
) -> CheckpointStore:
    """The store at a path or a URI; `field` of the spec names it, if one does.

    Raises:
        UnusableStoreError: the scheme is unknown, or its package is missing.
        CheckpointStoreError: it cannot be opened for another reason.
    """
    if "://" not in location:
        return CheckpointDirectory(Path(location), generation)
    filesystem, path = _open(location, options, field)
    return ObjectDirectory(filesystem, path, location, generation)


def object_files(location: str, options: StoreSpec | None = None) -> ObjectFiles:
    """The files of the checkpoint at a URI.

    Raises:
        UnusableStoreError: the scheme is unknown, or its package is missing.
        CheckpointStoreError: it cannot be opened for another reason.
    """
    filesystem, path = _open(location, options, "")
    return ObjectFiles(filesystem, path.rstrip("/"), location.rstrip("/"), RetryPolicy())


def _open(location: str, options: StoreSpec | None, field: str) -> tuple[Any, str]:
    """The file system of fsspec for a URI, and the path in it."""
    try:
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(location, **_settings(location, options or StoreSpec()))
    except Exception as error:  # a back end raises what it likes
        scheme, _, rest = location.partition("://")
        package = _missing_package(error)
        fix = "the image, or this machine, needs the package for the scheme, such as s3fs for s3://"
        if package:
            fix = f"the image, or this machine, needs the package {package}: `pip install {package}`"
        if scheme != scheme.lower():
            fix = f"write the scheme in lower case, as in `{scheme.lower()}://{rest}`"
        named = f"{field}: {location}" if field else location
        # fsspec's error of an unknown scheme is a ValueError.
        repeats = isinstance(error, ImportError | ValueError)
        kind = UnusableStoreError if repeats else CheckpointStoreError
        raise kind(f"`{named}` cannot be opened: {error}: {fix}") from error
    return filesystem, str(path)


def _missing_package(error: BaseException) -> str:
    """The package whose import failed, if an error or the one that caused it says so."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            return cause.name.partition(".")[0]
        cause = cause.__cause__
    return ""


def _settings(location: str, options: StoreSpec) -> dict[str, Any]:
    """The arguments of a back end of fsspec."""
    settings: dict[str, Any] = {"auto_mkdir": True} if location.startswith("file://") else {}
    if options.endpoint is not None:
        settings["endpoint_url"] = options.endpoint
    if location.partition("://")[0] in _S3_SCHEMES:
        # Lists are never cached, because other ranks write. `retry` repeats requests.
        settings |= {"use_listings_cache": False, "config_kwargs": dict(_CONFIG, read_timeout=READ_SECONDS)}
        if options.region is not None:
            settings["client_kwargs"] = {"region_name": options.region}
        if options.encryption is Encryption.S3:
            settings["s3_additional_kwargs"] = {"ServerSideEncryption": "AES256"}
        elif options.encryption is Encryption.KMS:
            key = {"SSEKMSKeyId": options.kms_key} if options.kms_key is not None else {}
            settings["s3_additional_kwargs"] = {"ServerSideEncryption": "aws:kms", **key}
    return settings
