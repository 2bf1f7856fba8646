"""The settings of a framework's configuration, and which of them were read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from meshwright.api.training import RateDecay


class ImportFileError(ValueError):
    """The file is not a configuration that can be read. The message says why."""


def default_left_out(names: Mapping[RateDecay, str]) -> dict[str, str | None]:
    """A framework's names of decays, and `decay` of a job with each: None for the cosine."""
    return {name: None if decay is RateDecay.COSINE else str(decay) for decay, name in names.items()}


@dataclass(slots=True)
class Settings:
    """Settings by name. What nobody reads has no equivalent in a job."""

    values: Mapping[str, Any]
    read: set[str] = field(default_factory=set)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a setting, which is now read."""
        self.read.add(name)
        return self.values.get(name, default)

    def integer(self, name: str, default: int | None = None) -> int | None:
        """The value of a setting with an integer.

        Raises:
            ImportFileError: it is not an integer.
        """
        value = self.get(name, default)
        if value in (None, "auto"):
            return default
        try:
            return int(str(value).replace("_", ""))
        except ValueError:
            raise ImportFileError(f"`{name}` must be an integer, got {value!r}") from None

    def number(self, name: str, default: float | None = None) -> float | None:
        """The value of a setting with a number.

        Raises:
            ImportFileError: it is not a number.
        """
        value = self.get(name, default)
        if value in (None, "auto"):
            return default
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ImportFileError(f"`{name}` must be a number, got {value!r}") from None

    def flag(self, name: str) -> bool:
        """Whether a setting is on."""
        return self.get(name) in (True, "True", "true", "1", 1, "")

    @property
    def unread(self) -> list[str]:
        """The settings that were not read."""
        return sorted(set(self.values) - self.read)


@dataclass(slots=True)
class Imported:
    """A job's spec, as far as the configuration has it."""

    framework: str
    spec: dict[str, Any]
    without_equivalent: list[str]
    """Settings that a job does not have."""
    notes: list[str] = field(default_factory=list)
    """What differs, and what the configuration does not have."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Name, namespace, labels and annotations, if the file has them."""


def job_name(text: str) -> str:
    """A name for a job from any text. Empty if no character of it may be in one."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested settings, with their path."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{path}.")
        else:
            yield path, value


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are known, also of nested dictionaries; empty ones are left out."""
    cleaned = {name: without_none(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    return {name: value for name, value in cleaned.items() if value is not None and value != {}}


def replicas_of(gpus: int, **degrees: int) -> int:
    """Replicas on this number of GPUs; `degrees` are those of a replica.

    Raises:
        ImportFileError: a part of a replica would be left.
    """
    ranks = prod(degrees.values())
    if gpus < ranks or gpus % ranks:
        text = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        raise ImportFileError(f"the number of GPUs ({gpus}) must be a multiple of {ranks} ({text})")
    return gpus // ranks


def micro_batches(global_batch: int | None, micro_batch: int | None, replicas: int | None) -> int | None:
    """Micro-batches per replica and step, if they are known.

    Raises:
        ImportFileError: the batch does not divide.
    """
    if not (global_batch and micro_batch and replicas):
        return None
    if global_batch % (micro_batch * replicas):
        raise ImportFileError(
            f"the global batch ({global_batch}) must be a multiple of the micro-batch ({micro_batch}) times the "
            f"replicas ({replicas})"
        )
    return global_batch // (micro_batch * replicas)
