"""Whether published weights are whole and of a model, by their headers alone."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.models.architecture import Architecture
from meshwright.models.huggingface import ConfigError
from meshwright_worker.models.llama import DecoderStage
from meshwright_worker.pretrained.files import PretrainedError, TensorFiles
from meshwright_worker.pretrained.load import check_architecture, check_shape, has_router_biases
from meshwright_worker.pretrained.names import Source, sources


def check_pretrained(model: Architecture, directory: Path) -> None:
    """Refuse a directory that `load_pretrained` could not fill every parameter of the model from.

    Raises:
        PretrainedError: a file is missing or cut off, or a tensor is missing or of another shape.
    """
    published = check_architecture(model, directory)
    files = TensorFiles(directory)
    try:
        known = sources(model)
    except ConfigError as error:
        raise PretrainedError(f"`training.initialWeights: {directory}`: {error}") from error
    with torch.device("meta"):
        whole = DecoderStage(model, torch.float32)
    tensors: dict[str, torch.Tensor] = dict(whole.named_parameters())
    if has_router_biases(published):
        tensors |= dict(whole.named_buffers())
    for name, tensor in tensors.items():
        source = known.get(name)
        if source is None:
            raise PretrainedError(f"published weights have nothing for the parameter `{name}`")
        if isinstance(source, Source):
            check_shape(source, files.find(source.tensor).shape, tuple(tensor.shape))
            continue
        for part in source.parts:
            check_shape(part, files.find(part.tensor).shape, tuple(tensor.shape[1:]))
