"""Versions of one stage's weights: what a pipeline without a flush needs, since weights change under its micro-batches.

A micro-batch's backward pass must see the weights of its forward pass (PipeDream, arXiv 1806.03377, section 3.3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call


class Stash:
    """Copies of a stage's weights by version, the number of updates that were made to them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._versions: dict[int, dict[str, torch.Tensor]] = {}

    @property
    def versions(self) -> list[int]:
        """The versions that are kept, oldest first."""
        return sorted(self._versions)

    def keep(self, version: int) -> None:
        """Copy the weights as they are now."""
        self._versions[version] = {
            name: parameter.detach().clone().requires_grad_() for name, parameter in self._module.named_parameters()
        }

    def forget_before(self, version: int) -> None:
        """Drop older versions."""
        for old in [known for known in self._versions if known < version]:
            del self._versions[old]

    def run(self, version: int, *inputs: Any, **more: Any) -> torch.Tensor:
        """The stage's output with the weights of a version."""
        output: torch.Tensor = functional_call(self._module, self._versions[version], inputs, more)
        return output

    def hand_over_gradients(self, version: int) -> None:
        """Move what was added up in a version's gradients to those of the weights that the optimizer updates."""
        for name, parameter in self._module.named_parameters():
            weight = self._versions[version][name]
            parameter.grad, weight.grad = weight.grad, None
