"""The manifest of a checkpoint: its content, and records to verify it. A directory with a manifest is a checkpoint.

`format` changes only if an older reader would misread the checkpoint. A reader rejects any format that it does not
know, and ignores unknown fields within those that it knows. The exceptions are `architecture` and `lora`, whose fields
determine what the tensors mean: there an unknown field is ignored only if it is null, false, 0 or empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from meshwright.api.base import ApiModel
from meshwright.api.data import Tokenizer
from meshwright.api.lora import LoraSpec
from meshwright.data.tokenizers import BYTE_SEPARATOR
from meshwright.manifest_checksum import checksum_error, with_checksum
from meshwright.models.architecture import Architecture
from meshwright_worker.checkpoint.files import CheckpointFiles, CheckpointPath, files_of
from meshwright_worker.checkpoint.provenance import Provenance
from meshwright_worker.checkpoint.tensor_index import checked_name
from meshwright_worker.checkpoint_errors import DamagedCheckpointError, ForeignCheckpointError
from meshwright_worker.rank.task import Progress, WorkProgress, no_report

MANIFEST = "meshwright.json"
FORMAT, BINARY_INDEX_FORMAT = 1, 2
"""Format 2 differs from format 1 only in the encoding of the index. Format 1 is written as long as it can be, so that
earlier versions read the checkpoint."""
_READ_FORMATS = (FORMAT, BINARY_INDEX_FORMAT)


class Record(ApiModel):
    """A part of a manifest. Unknown fields are ignored: a later version may have written them."""

    model_config = ConfigDict(extra="ignore")


def _without_unset_fields_of_later_versions(model: type[BaseModel]) -> BeforeValidator:
    known = {name for field, info in model.model_fields.items() for name in (field, info.alias or field)}

    def keep(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: item for name, item in value.items() if item or name in known}

    return BeforeValidator(keep)


def _none_if_unknown(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Nothing depends on the record: one that this version cannot read is none."""
    try:
        return validate(value)
    except ValidationError:
        return None


class TokenizerRecord(Record):
    """The tokenizer of a run's corpus, so that text can be generated from its checkpoints."""

    kind: Tokenizer
    """How text is tokenized."""
    identity: str
    """See `Tokenizer.identity`: a file with another identity gives other tokens."""
    file: str | None = None
    """Path or URI at which the run found the tokenizer's file; None for bytes."""
    separator: Annotated[int | None, Field(exclude_if=lambda number: number is None)] = None
    """The token after each document; None for bytes, and in checkpoints of versions that did not record it."""

    @property
    def end_token(self) -> int | None:
        """The token after each document, if it is known."""
        return BYTE_SEPARATOR if self.kind is Tokenizer.BYTE else self.separator


class FileRecord(Record):
    """Size and checksum of a file as it was written."""

    size: int
    """Size in bytes."""
    crc32: int
    """CRC-32 of its content."""


class LayoutRecord(Record):
    """The layout that wrote the checkpoint. Informational: any layout can load it."""

    tensor: int
    """Tensor-parallel degree."""
    pipeline: int
    """Pipeline-parallel degree."""
    data: int
    """Data-parallel degree."""
    context: int = 1
    """Context-parallel degree."""
    expert: int = 1
    """Expert-parallel degree."""
    zero_stage: int
    """ZeRO stage."""


class AnomalyState(Record):
    """What `training.anomalies` remembers: see `LossAnomalies`."""

    losses: list[float] = []
    """Losses of the last updates, oldest first."""
    gradient_norms: list[float] = []
    """Their gradient norms."""
    skipped: int = 0
    """Steps of the run that were skipped because of an anomaly."""
    skipped_in_a_row: int = 0
    """How many of them are the last steps."""
    went_back: int = 0
    """How often the run went back to an older checkpoint."""


class TrainingState(Record):
    """The state of training after a step, except for tensors."""

    step: int = 0
    """Number of completed steps."""
    samples: int = 0
    """Samples consumed since the beginning of the run."""
    digest: int = 0
    """Multiset hash of those samples; equal for two runs exactly when they consumed the same ones."""
    loss: str = ""
    """Loss of the last step as a hexadecimal float, so that it is exact."""
    skipped: int = 0
    """Steps that updated nothing, because gradients overflowed fp16 or because of `training.anomalies`."""
    loss_scale: float | None = None
    """Loss scale of the next step; None without loss scaling."""
    steady: int = 0
    """Steps without an overflow since the scale last changed."""
    anomalies: Annotated[AnomalyState | None, Field(exclude_if=lambda state: state is None)] = None
    """What `training.anomalies` remembers; None if nothing."""
    evaluation_loss: Annotated[float | None, Field(exclude_if=lambda loss: loss is None)] = None
    """Loss of the evaluation after this step, with `checkpoint.keepBest`. None if it was not evaluated, or the loss is
    not a finite number."""


class BaseManifest(Record):
    """The part of `meshwright.json` that every checkpoint has."""

    format: int = FORMAT
    """Version of the checkpoint format."""
    state: TrainingState
    """The state of training."""
    files: dict[Annotated[str, AfterValidator(checked_name)], FileRecord] = {}
    """Every other file of the checkpoint."""


class Manifest(BaseManifest):
    """The manifest of a checkpoint of a built-in model."""

    architecture: Annotated[Architecture, _without_unset_fields_of_later_versions(Architecture)]
    """The model."""
    seed: int
    """Seed of the run."""
    sequence_length: int
    """Tokens per sample."""
    stream: str
    """Identity of the sample stream that `state.samples` counts in."""
    tokenizer: TokenizerRecord | None = None
    """The tokenizer of the run's corpus; None in checkpoints of versions that did not record it."""
    layout: LayoutRecord
    """The layout that wrote it."""
    lora: Annotated[LoraSpec | None, _without_unset_fields_of_later_versions(LoraSpec)] = None
    """The adapters that the checkpoint contains instead of the model's parameters; None if it contains the model."""
    initial_weights: str | None = None
    """Path of the model that the adapters belong to; None for random weights from `seed`."""
    base_fingerprint: Annotated[str | None, Field(exclude_if=lambda text: text is None)] = None
    """Fingerprint of that model's weights. None without adapters, and in checkpoints of versions that did not record
    it."""
    weights_in_tiles: bool = False
    """Whether these random weights are drawn in tiles. Version 0.1.0, which does not say so, drew whole matrices."""
    provenance: Annotated[
        Provenance | None, WrapValidator(_none_if_unknown), Field(exclude_if=lambda record: record is None)
    ] = None
    """Where the checkpoint comes from; None in those of versions that did not record it."""


class Origin(Record):
    """What a run's checkpoints say about its beginning. Ranks that continue from memory keep it with their state: files
    may be others by then.
    """

    provenance: Provenance | None = None
    """See `Manifest.provenance`."""
    base_fingerprint: str | None = None
    """See `Manifest.base_fingerprint`."""
    weights_in_tiles: bool = False
    """See `Manifest.weights_in_tiles`."""


def origin_of(manifest: Manifest) -> Origin:
    """Return what a manifest says about the beginning of its run."""
    return Origin(
        provenance=manifest.provenance,
        base_fingerprint=manifest.base_fingerprint,
        weights_in_tiles=manifest.weights_in_tiles,
    )


def has_other_base(one: str | None, other: str | None) -> bool:
    """Return whether two fingerprints are of different weights. Those of other schemes do not say."""
    if one is None or other is None or one.partition("-")[0] != other.partition("-")[0]:
        return False
    return one != other


class ModuleManifest(BaseManifest):
    """The manifest of a checkpoint of a custom module."""

    module: str
    """The module's class."""
    layout: LayoutRecord
    """The layout that wrote it."""


ManifestType = TypeVar("ManifestType", bound=BaseManifest)


def encode_manifest(manifest: BaseManifest) -> bytes:
    """The content of the manifest's file, with its checksum."""
    fields = with_checksum(manifest.model_dump(mode="json", by_alias=True))
    return json.dumps(fields, indent=1, ensure_ascii=False).encode()


def read_manifest(checkpoint: CheckpointPath) -> Manifest:
    """Read the manifest of a built-in model's checkpoint, see `read_manifest_as`."""
    return read_manifest_as(checkpoint, Manifest)


def read_manifest_as(checkpoint: CheckpointPath, manifest_type: type[ManifestType]) -> ManifestType:
    """Read the manifest of a checkpoint.

    Raises:
        OSError: it cannot be read, which does not mean that the checkpoint is damaged.
        DamagedCheckpointError: it is not a JSON object, or differs from its checksum.
        ForeignCheckpointError: it is of another kind or version.
    """
    files = files_of(checkpoint)
    content, label = files.read(MANIFEST), files.label(MANIFEST)
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise DamagedCheckpointError(f"{label} is damaged: it is not a JSON object")
    if damage := checksum_error(fields):
        raise DamagedCheckpointError(f"{label} is damaged: {damage}")
    if fields.get("format") not in _READ_FORMATS:
        known = f"{FORMAT} to {BINARY_INDEX_FORMAT}"
        raise _foreign_version_error(files, f"its format is {fields.get('format')}, this version reads {known}")
    try:
        return manifest_type.model_validate_json(content)
    except ValidationError as error:
        for other in (Manifest, ModuleManifest):
            if other is not manifest_type and _validates_as(content, other):
                raise ForeignCheckpointError(
                    f"{files} is a checkpoint of {_NAMES[other]}, not of {_NAMES[manifest_type]}: use another directory"
                ) from None
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _foreign_version_error(files, f"this version cannot read `{where}`: {first['msg']}") from None


def read_evaluation_loss(checkpoint: CheckpointPath) -> float | None:
    """Return the evaluation loss in the manifest of a checkpoint of any kind or version. None if it has none, or if it
    is damaged.

    Raises:
        OSError: it cannot be read.
    """
    content = files_of(checkpoint).read(MANIFEST)
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return evaluation_loss_in(fields) if isinstance(fields, dict) and not checksum_error(fields) else None


def evaluation_loss_in(fields: Mapping[str, Any]) -> float | None:
    """Return the evaluation loss in the fields of a manifest, if they have one that is a finite number."""
    state = fields.get("state")
    loss = state.get("evaluationLoss") if isinstance(state, dict) else None
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


_NAMES: dict[type[BaseManifest], str] = {
    Manifest: "one of the runtime's models",
    ModuleManifest: "a custom module",
}


def _validates_as(content: bytes, manifest_type: type[BaseManifest]) -> bool:
    try:
        manifest_type.model_validate_json(content)
    except ValidationError:
        return False
    return True


def _foreign_version_error(files: CheckpointFiles, reason: str) -> ForeignCheckpointError:
    return ForeignCheckpointError(
        f"{files} was written by another version of Meshwright ({reason}): use that version's image, or move the "
        "checkpoint away to continue from the previous one"
    )


def check_files(
    checkpoint: CheckpointPath,
    manifest: BaseManifest,
    rank: int = 0,
    world_size: int = 1,
    progress: WorkProgress | None = None,
) -> None:
    """Read every byte of this rank's share of a checkpoint's files; by default of all files. `progress` counts them.

    Raises:
        DamagedCheckpointError: one is missing, or differs from what was written.
        OSError: one cannot be read, which does not mean that the checkpoint is damaged.
    """
    files, names = files_of(checkpoint), sorted(manifest.files)[rank::world_size]
    counted = (progress or WorkProgress()).begin("verify", sum(manifest.files[name].size for name in names))
    for name in names:
        check_file(files, name, manifest.files[name], counted)


def check_file(files: CheckpointFiles, name: str, record: FileRecord, progress: Progress = no_report) -> None:
    """Verify one file.

    Raises:
        DamagedCheckpointError, OSError: as `check_files`.
    """
    path = files.label(name)
    try:
        actual = files.checksum(name, progress)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is damaged: the file is missing", name) from None
    except IsADirectoryError:
        raise DamagedCheckpointError(f"{path} is damaged: it is a directory", name) from None
    if actual[0] != record.size:
        raise DamagedCheckpointError(f"{path} is damaged: it has {actual[0]} bytes, expected {record.size}", name)
    if actual[1] != record.crc32:
        raise DamagedCheckpointError(f"{path} is damaged: its checksum differs from the manifest", name)
