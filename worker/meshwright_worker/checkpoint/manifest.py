"""The manifest of a checkpoint: what it holds and how to tell that it is whole. Its presence makes a checkpoint one."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from meshwright.api.base import ApiModel
from meshwright.api.lora import LoraSpec
from meshwright.models.architecture import Architecture
from meshwright_worker.data.tokenizer import TokenizerRecord

MANIFEST = "meshwright.json"
FORMAT = 1


class FileRecord(ApiModel):
    """A file as it was written."""

    size: int
    """Bytes."""
    crc32: int
    """CRC-32 of its content."""


class LayoutRecord(ApiModel):
    """The layout that wrote the checkpoint. For people: any layout can load it."""

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


class TrainingState(ApiModel):
    """Where training stands after a step: all of its state that is not a tensor."""

    step: int = 0
    """Steps finished."""
    samples: int = 0
    """Samples consumed since the beginning of the run."""
    digest: int = 0
    """Multiset hash of those samples; equal for two runs exactly when they consumed the same ones."""
    loss: str = ""
    """Loss of the last step as a hexadecimal float, so that it is exact."""
    skipped: int = 0
    """Steps that changed nothing because gradients overflowed fp16."""
    loss_scale: float | None = None
    """Scale of the next step; None where nothing was scaled."""
    steady: int = 0
    """Steps without an overflow since the scale last changed."""


class Manifest(ApiModel):
    """The content of `meshwright.json`."""

    format: int = FORMAT
    """Version of the checkpoint format."""
    state: TrainingState
    """Where training stands."""
    architecture: Architecture
    """The model."""
    seed: int
    """Seed of the run."""
    sequence_length: int
    """Tokens per sample."""
    stream: str
    """Identity of the sample stream that `state.samples` counts in."""
    tokenizer: TokenizerRecord | None = None
    """What the run's text is written in; None in checkpoints from before this was kept."""
    layout: LayoutRecord
    """Who wrote it."""
    lora: LoraSpec | None = None
    """The adapters that the checkpoint holds, in place of the model's parameters; None where it holds the model."""
    initial_weights: str | None = None
    """Where the model that adapters belong to was read from; None for random weights by `seed`."""
    files: dict[str, FileRecord] = {}
    """Every other file of the checkpoint."""


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a checkpoint directory; None when there is none that this version can read."""
    try:
        manifest = Manifest.model_validate_json((directory / MANIFEST).read_bytes())
    except (OSError, ValidationError):
        return None
    return manifest if manifest.format == FORMAT else None
