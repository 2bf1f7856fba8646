"""Lists, verifies and copies checkpoints, wherever they are, without their tensors and without other ranks.

A manifest is read as JSON, and only what is needed of it: those of 0.1.0 and of custom modules have fewer fields, and
those of later versions more. A copy has the manifest of its source, byte by byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.manifest_checksum import checksum_error
from meshwright_worker.checkpoint.directory import DAMAGED
from meshwright_worker.checkpoint.files import CheckpointFiles, LocalFiles
from meshwright_worker.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    check_file,
    evaluation_loss_in,
    read_evaluation_loss,
)
from meshwright_worker.checkpoint.object_store import PART_BYTES
from meshwright_worker.checkpoint.provenance import EXPORT_RECORD
from meshwright_worker.checkpoint.ranking import NONE_IS_BEST, ranked
from meshwright_worker.checkpoint.store import CheckpointStore, object_files, open_store
from meshwright_worker.checkpoint.tensor_index import checked_name
from meshwright_worker.checkpoint_errors import CheckpointError, DamagedCheckpointError

COMPLETE = "complete"
_DEGREES = (("tensor", "TP"), ("pipeline", "PP"), ("data", "DP"), ("context", "CP"), ("expert", "EP"))


@dataclass(frozen=True, slots=True)
class Listed:
    """One checkpoint of a place."""

    place: str
    step: int
    state: str
    """`complete`, `incomplete` or `damaged`."""
    size: int | None = None
    """Bytes of its files; None if it is not complete."""
    saved_at: float | None = None
    """When it was saved, in seconds since 1970."""
    layout: str = ""
    """The layout that wrote it."""
    problem: str = ""
    """Why it is damaged."""
    evaluation_loss: float | None = None
    """Loss of the evaluation after its step, if it is recorded."""
    best: bool = False
    """Whether no other one of the job has a lower evaluation loss."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What reading every byte of a checkpoint has found."""

    place: str
    step: int
    files: int
    size: int
    problems: list[str]
    """Each names a file. Empty if the checkpoint is intact."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A checkpoint that was copied."""

    step: int
    source: str
    target: str
    files: int
    size: int


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a checkpoint or an export comes from."""

    place: str
    step: int | None
    digest: int | None
    """Digest of all samples until then."""
    provenance: dict[str, Any] | None
    """Its record; None in those of 0.1.0."""
    source: str = ""
    """The checkpoint that was exported."""


def found_at(place: str) -> list[tuple[int, CheckpointFiles, float | None]]:
    """Step, files and time of the complete checkpoints of a place, newest first. A place that is itself a checkpoint
    has one.

    Raises:
        FileNotFoundError: there is no such directory.
        OSError: the place cannot be read.
    """
    if "://" not in place and not Path(place).is_dir():
        raise FileNotFoundError(f"`{place}` is not a directory: pass a checkpoint, or a directory of checkpoints")
    store = open_store(place)
    found = [(step, store.files(step), store.saved_at(step)) for step in store.steps()]
    if found or (single := _single(place)) is None:
        return found
    return [(int(_manifest(single)["state"]["step"]), single, None)]


def listed(place: str) -> list[Listed]:
    """The checkpoints of a place, newest first, also those that are not complete.

    Raises:
        OSError: as `found_at`.
    """
    entries = [_listed(place, *one) for one in found_at(place)]
    unfinished = [Listed(place, step, state) for step, state in open_store(place).unfinished().items()]
    return sorted([*entries, *unfinished], key=lambda entry: -entry.step)


def _listed(place: str, step: int, files: CheckpointFiles, saved_at: float | None) -> Listed:
    try:
        manifest = _manifest(files)
    except DamagedCheckpointError as error:
        return Listed(place, step, DAMAGED, saved_at=saved_at, problem=str(error))
    size = sum(record.size for record in _records(manifest).values())
    layout, loss = _layout(manifest.get("layout")), evaluation_loss_in(manifest)
    return Listed(place, step, COMPLETE, size, saved_at, layout, evaluation_loss=loss)


def with_best(entries: Iterable[Listed]) -> list[Listed]:
    """The entries of all places of a job, of which the best are marked: one, or its copies in several places."""
    found = list(entries)
    losses = {entry.step: entry.evaluation_loss for entry in found if entry.evaluation_loss is not None}
    best = next(iter(ranked(losses)), None)
    return [replace(entry, best=entry.step == best and entry.evaluation_loss is not None) for entry in found]


def best_steps(places: Sequence[str]) -> list[int]:
    """The steps of the checkpoints with an evaluation loss, over all places, the lowest loss first.

    Raises:
        FileNotFoundError: none has one.
        OSError: as `found_at`.
    """
    read = ((step, read_evaluation_loss(files)) for place in places for step, files, _ in found_at(place))
    if not (steps := ranked({step: loss for step, loss in read if loss is not None})):
        raise FileNotFoundError(NONE_IS_BEST.format(place=", ".join(places)))
    return steps


def verified(place: str, step: int | None) -> Iterator[Verified]:
    """Read every byte of the checkpoint of a step, or of all complete ones, and compare sizes and checksums.

    Raises:
        FileNotFoundError: there is no complete checkpoint, or none of that step.
        OSError: a file cannot be read, which does not mean that it is damaged.
    """
    for number, files, _ in _chosen(place, step):
        problems: list[str] = []
        records: dict[str, FileRecord] = {}
        try:
            manifest = _manifest(files)
            records = _records(manifest)
            if problem := _wrong_name(files, manifest, number):
                problems.append(problem)
        except DamagedCheckpointError as error:
            problems.append(str(error))
        for name, record in sorted(records.items()):
            try:
                check_file(files, name, record)
            except DamagedCheckpointError as error:
                problems.append(str(error))
        yield Verified(place, number, len(records), sum(record.size for record in records.values()), problems)


def copied(places: Sequence[str], step: int | None, target: str, *, best: bool = False) -> Copied:
    """Copy a checkpoint, by default the newest one that is intact, to a directory or URI: completely or not at all.
    With `best`, the intact one with the lowest evaluation loss.

    Raises:
        FileNotFoundError: no place has a complete checkpoint, or one of that step, or with `best` one with a loss.
        DamagedCheckpointError: it is damaged. The message names the file.
        CheckpointError: the target has that step already.
        OSError: it cannot be read or written.
    """
    candidates = [found for place in places for found in _available(place, step)]
    if not candidates:
        which = f"no complete checkpoint of step {step}" if step is not None else "no complete checkpoint"
        raise FileNotFoundError(f"there is {which} in {', '.join(places)}")
    order = best_steps(places) if best else sorted({number for number, *_ in candidates}, reverse=True)
    chosen = [found for number in order for found in candidates if found[0] == number]
    damages: list[str] = []
    for number, files, _ in chosen:
        try:
            return _copy(number, files, open_store(target), target)
        except DamagedCheckpointError as error:
            damages.append(str(error))
    raise DamagedCheckpointError("; ".join(damages))


def lineage(place: str, step: int | None) -> Lineage:
    """Where the newest checkpoint of a place, that of a step, or an export comes from.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
        DamagedCheckpointError: its manifest is damaged.
        OSError: it cannot be read.
    """
    exported = Path(place) / EXPORT_RECORD
    if "://" not in place and exported.is_file():
        record = json.loads(exported.read_text(encoding="utf-8"))
        step, digest = record.get("step"), record.get("digest")
        return Lineage(place, step, digest, record.get("provenance"), record.get("path", ""))
    number, files, _ = _chosen(place, step)[0]
    manifest = _manifest(files)
    return Lineage(str(files), number, manifest["state"].get("digest"), manifest.get("provenance"))


def _copy(step: int, files: CheckpointFiles, store: CheckpointStore, target: str) -> Copied:
    manifest = _manifest(files)
    content, records = files.read(MANIFEST), _records(manifest)
    if problem := _wrong_name(files, manifest, step):
        raise DamagedCheckpointError(problem)
    if step in store.steps():
        raise CheckpointError(f"{target} has a checkpoint of step {step} already: it stays as it is")
    store.make_place(step)
    try:
        sink = store.sink(step)
        for name, record in sorted(records.items()):
            written = sink.copy(name, lambda name=name: _parts(files, name))  # type: ignore[misc]
            if written != record:
                raise DamagedCheckpointError(f"{files.label(name)} is damaged: it differs from the manifest")
        store.complete(step, content, records)
    except BaseException:
        store.discard(step)
        raise
    return Copied(step, str(files), target, len(records), sum(record.size for record in records.values()))


def _parts(files: CheckpointFiles, name: str) -> Iterator[bytes]:
    offset = 0
    while True:
        try:
            part = files.read_range(name, offset, PART_BYTES)
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{files.label(name)} is damaged: the file is missing") from None
        if not part:
            return
        yield part
        offset += len(part)


def _available(place: str, step: int | None) -> list[tuple[int, CheckpointFiles, float | None]]:
    return [found for found in found_at(place) if step in (None, found[0])]


def _chosen(place: str, step: int | None) -> list[tuple[int, CheckpointFiles, float | None]]:
    found = _available(place, step)
    if not found:
        which = f"no complete checkpoint of step {step}" if step is not None else "no complete checkpoint"
        raise FileNotFoundError(f"there is {which} in {place}")
    return found


def _single(place: str) -> CheckpointFiles | None:
    """The checkpoint that a place is itself."""
    files: CheckpointFiles = object_files(place) if "://" in place else LocalFiles(Path(place))
    try:
        files.read_range(MANIFEST, 0, 1)
    except FileNotFoundError:
        return None
    return files


def _manifest(files: CheckpointFiles) -> dict[str, Any]:
    """The fields of a manifest.

    Raises:
        DamagedCheckpointError: it is not a JSON object, or differs from its checksum.
        OSError: it cannot be read.
    """
    label = files.label(MANIFEST)
    try:
        fields = json.loads(files.read(MANIFEST))
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or not isinstance(fields.get("state"), dict):
        raise DamagedCheckpointError(f"{label} is damaged: it is not a manifest")
    if damage := checksum_error(fields):
        raise DamagedCheckpointError(f"{label} is damaged: {damage}")
    return fields


def _wrong_name(files: CheckpointFiles, manifest: Mapping[str, Any], step: int) -> str:
    """What is wrong if a checkpoint has the name of another step than it is of."""
    actual = manifest["state"].get("step")
    return "" if actual == step else f"{files.label(MANIFEST)} is of step {actual}: give the checkpoint its name again"


def _records(manifest: dict[str, Any]) -> dict[str, FileRecord]:
    return {checked_name(name): FileRecord.model_validate(record) for name, record in manifest["files"].items()}


def _layout(layout: object) -> str:
    """The degrees above 1, such as `TP 2 x DP 4, ZeRO 1`."""
    if not isinstance(layout, dict):
        return ""
    degrees = [f"{short} {layout[name]}" for name, short in _DEGREES if layout.get(name, 1) != 1]
    zero = layout.get("zeroStage") or 0
    return (" x ".join(degrees) or "1 rank") + (f", ZeRO {zero}" if zero else "")
