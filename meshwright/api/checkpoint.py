"""`spec.checkpoint`: where and how often checkpoints are saved."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel, ClaimName, ShortText

DEFAULT_CHECKPOINT_INTERVAL = 100
"""Steps between checkpoints where `checkpoint.everySteps` is left out."""

AUTO = "Auto"
"""The interval that wastes the least time."""
UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Steps = Annotated[int, Field(ge=1, le=1000000000)]
EVERY = r"^(Auto|[1-9][0-9]{0,5}[smhd])$"
Every = Annotated[str, Field(max_length=8, pattern=EVERY)]
"""`Auto`, or a number with a unit."""
AGE = r"^[1-9][0-9]{0,5}[smhd]$"
Age = Annotated[str, Field(max_length=8, pattern=AGE)]
"""A number with a unit, such as `7d`."""
Keep = Annotated[int, Field(ge=1, le=10000)]

SECRET_VARIABLES: dict[str, tuple[str, ...]] = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "s3a": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "abfs": (
        *("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"),
        *("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_CLIENT_ID", "AZURE_STORAGE_CLIENT_SECRET"),
        "AZURE_STORAGE_TENANT_ID",
    ),
}
"""Scheme of `checkpoint.uri` -> keys of `checkpoint.store.secretName`, which ranks get as variables of these names."""


class Encryption(StrEnum):
    """Encryption by the object store."""

    S3 = "S3"
    KMS = "KMS"


class Staging(StrEnum):
    """When the copy of the state is made that is written."""

    BLOCKING = "Blocking"
    OVERLAPPED = "Overlapped"


class Writer(StrEnum):
    """What writes checkpoints."""

    THREAD = "Thread"
    PROCESS = "Process"


class StoreSpec(ApiModel):
    """How the object store of `checkpoint.uri` is used."""

    secret_name: ShortText | None = None
    """Secret in the job's namespace with the credentials, for `s3://` and `abfs://`: its keys are named like the
    variables `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`, or `AZURE_STORAGE_...`. By default
    pods use their identity (`workers.serviceAccountName`)."""
    endpoint: Annotated[str, Field(min_length=8, max_length=253, pattern=r"^https?://[^/?#@\s]+/?$")] | None = None
    """Address of an S3-compatible store, such as `https://s3.example.com`. By default that of the cloud."""
    region: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """Region of the bucket. By default the store's."""
    encryption: Encryption | None = None
    """Server-side encryption. `S3`: with keys of the store. `KMS`: with a key of its key management service. By
    default that of the bucket."""
    kms_key: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Id or ARN of the key of `encryption: KMS`. By default the account's."""
    every_steps: Steps | None = None
    """Steps between checkpoints in the store, a multiple of `checkpoint.everySteps`. Defaults to that."""
    every: Every | None = None
    """Instead of `everySteps`: `checkpoint.every` of the store."""
    keep: Keep | None = None
    """Number of complete checkpoints to retain in the store. Defaults to `checkpoint.keep`."""
    keep_for: Age | None = None
    """`checkpoint.keepFor` of the store, which is its default."""
    keep_every_steps: Steps | None = None
    """`checkpoint.keepEverySteps` of the store, which is its default."""
    keep_best: Keep | None = None
    """`checkpoint.keepBest` of the store, which is its default."""


@dataclass(frozen=True, slots=True)
class Interval:
    """How often a checkpoint is saved: after a number of steps, after a time, or `Auto` with neither."""

    steps: int | None = None
    seconds: float | None = None

    @property
    def is_auto(self) -> bool:
        """Whether the interval follows from measurements."""
        return self.steps is None and self.seconds is None


@dataclass(frozen=True, slots=True)
class Retention:
    """Which complete checkpoints are retained: those that any of the four retains."""

    newest: int
    """This many of the newest."""
    seconds: float | None = None
    """All that are younger."""
    every_steps: int | None = None
    """Forever, the first one at or after each multiple of this step."""
    best: int | None = None
    """This many of those with the lowest evaluation loss."""


def seconds_of(text: str) -> float:
    """The seconds of a number with a unit, such as `30m`."""
    return float(text[:-1]) * UNIT_SECONDS[text[-1]]


class CheckpointSpec(ApiModel):
    """Where and how often checkpoints are saved."""

    claim_name: ClaimName | None = None
    """PersistentVolumeClaim for the checkpoints, writable from every node that runs workers (ReadWriteMany). Needs
    this, `uri`, or both."""
    uri: Annotated[str, Field(min_length=6, max_length=512, pattern=r"^[a-z][a-z0-9+.-]*://[^\s]+$")] | None = None
    """Prefix for the checkpoints in an object store, as a URI that fsspec can write, such as `s3://bucket/runs`. The
    image must contain the package for the scheme, such as s3fs. Credentials are not part of it: see
    `store.secretName`."""
    store: StoreSpec | None = None
    """How the object store of `uri` is used, and that of `resumeFrom`."""
    resume_from: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Another run, to begin from its newest checkpoint, or one checkpoint of it: a directory on the claim, such as
    `base-0a1b2c3d` or `base-0a1b2c3d/step-00004000`, or a URI. It is only read, while this job has no checkpoint."""
    every_steps: Steps | None = None
    """Steps between checkpoints of Meshwright's runtime. Defaults to 100. Not allowed with `runtime.command`."""
    every: Every | None = None
    """Time between checkpoints instead of `everySteps`, such as `30m`. `Auto`: the interval that wastes the least time,
    from measured saves and the job's failures."""
    keep: Keep | None = None
    """Number of complete checkpoints to retain. Defaults to 2, and to all of those that `runtime.command` reports."""
    verify: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(min_length=1, max_length=64)] | None = None
    """Command that checks each checkpoint that `runtime.command` reports, by its path in MESHWRIGHT_CHECKPOINT_PATH. It
    counts if the exit code is 0."""
    keep_for: Age | None = None
    """Retain younger checkpoints too, such as `12h`."""
    keep_every_steps: Steps | None = None
    """Retain forever the first checkpoint at or after each multiple of this step."""
    keep_best: Keep | None = None
    """Retain this many with the lowest loss of `training.evaluation` too. An evaluation among these saves one."""
    staging: Staging | None = None
    """Experimental. When the state is copied: `Blocking`, before the next step, or `Overlapped`, while that runs until
    its update. Defaults to `Blocking`."""
    writer: Writer | None = None
    """Experimental. What plans and writes: a `Thread` of each rank, or a `Process` next to it. Defaults to `Thread`."""

    @property
    def interval(self) -> int:
        """Steps between checkpoints, unless `every` is set. The schema has no default, because the field must be absent
        with a command.
        """
        return DEFAULT_CHECKPOINT_INTERVAL if self.every_steps is None else self.every_steps

    @property
    def retained(self) -> int:
        """Number of complete checkpoints to retain."""
        return 2 if self.keep is None else self.keep

    def interval_of(self, store: StoreSpec | None = None) -> Interval:
        """The interval on the volume, or that of the store."""
        if store is not None and store.every is not None:
            return _timed(store.every)
        if store is not None and store.every_steps is not None:
            return Interval(steps=store.every_steps)
        return Interval(steps=self.interval) if self.every is None else _timed(self.every)

    def retention_of(self, store: StoreSpec | None = None) -> Retention:
        """What is retained on the volume, or in the store."""
        options = store or StoreSpec()
        age, every = options.keep_for or self.keep_for, options.keep_every_steps or self.keep_every_steps
        best = options.keep_best or self.keep_best
        return Retention(options.keep or self.retained, seconds_of(age) if age else None, every, best)

    @property
    def keeps_best(self) -> bool:
        """Whether the volume or the store retains the checkpoints with the lowest evaluation loss."""
        return self.keep_best is not None or (self.store is not None and self.store.keep_best is not None)

    @property
    def resume_uri(self) -> str | None:
        """`resume_from`, if it is a URI."""
        return self.resume_from if self.resume_from is not None and "://" in self.resume_from else None

    @property
    def uris(self) -> tuple[str, ...]:
        """Where checkpoints are written to and read from in object stores."""
        return tuple(uri for uri in (self.uri, self.resume_uri) if uri is not None)

    @property
    def place(self) -> str:
        """Where the checkpoints are, for messages."""
        return f"the claim `{self.claim_name}`" if self.claim_name is not None else f"`{self.uri}`"


def _timed(every: str) -> Interval:
    return Interval() if every == AUTO else Interval(seconds=seconds_of(every))
