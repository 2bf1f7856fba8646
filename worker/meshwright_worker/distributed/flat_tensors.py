"""Flattens many tensors into one, so that they are sent in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def flatten_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the elements of all tensors, [elements], in new memory."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, templates: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that `flat` was created from, or others of their shapes, as views of it."""
    parts = torch.split(flat, [template.numel() for template in templates])
    return [part.view_as(template) for part, template in zip(parts, templates, strict=True)]


def unflatten_into(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy `flat` back into the tensors that it was created from."""
    for tensor, part in zip(tensors, unflatten(flat, tensors), strict=True):
        tensor.copy_(part)
