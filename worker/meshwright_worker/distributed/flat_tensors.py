"""Flattens many tensors into one, so that they are sent in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def flatten_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the elements of all tensors, [elements], in new memory."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten_into(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy `flat` back into the tensors that it was created from."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
