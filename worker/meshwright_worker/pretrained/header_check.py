"""Checks by their headers that published weights are complete and fit a model."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.models.architecture import Architecture
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.pretrained.load import check_architecture, check_shape, has_router_biases
from meshwright_worker.pretrained.name_mapping import TensorSource, parameter_sources
from meshwright_worker.pretrained.tensor_files import PretrainedError, TensorFiles


def check_pretrained(model: Architecture, directory: Path) -> None:
    """Reject a directory from which `load_pretrained` could not fill every parameter of the model.

    Raises:
        PretrainedError: a file is missing or truncated, or a tensor is missing or of another shape.
    """
    published = check_architecture(model, directory)
    files = TensorFiles(directory)
    sources_by_name = parameter_sources(model)
    with torch.device("meta"):
        whole = DecoderStage(model, torch.float32)
    tensors: dict[str, torch.Tensor] = dict(whole.named_parameters())
    if has_router_biases(published):
        tensors |= dict(whole.named_buffers())
    for name, tensor in tensors.items():
        source = sources_by_name.get(name)
        if source is None:
            raise PretrainedError(f"published weights have nothing for the parameter `{name}`")
        if isinstance(source, TensorSource):
            check_shape(source, files.find(source.tensor).shape, tuple(tensor.shape))
            continue
        for part in source.parts:
            check_shape(part, files.find(part.tensor).shape, tuple(tensor.shape[1:]))
