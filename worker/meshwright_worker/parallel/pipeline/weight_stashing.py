"""Versions of one stage's weights, for pipelines without flushes: weights change while micro-batches are in flight.

A micro-batch's backward pass must use the weights of its forward pass (PipeDream, arXiv 1806.03377, section 3.3).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


class WeightStash:
    """Copies of a stage's weights by version: the number of updates that they contain."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._versions: dict[int, dict[str, nn.Parameter]] = {}

    @property
    def versions(self) -> list[int]:
        """The stored versions, oldest first."""
        return sorted(self._versions)

    def keep(self, version: int) -> None:
        """Copy the current weights, except frozen ones, which have only one version."""
        self._versions[version] = {
            name: nn.Parameter(parameter.detach().clone())
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad
        }

    def drop_before(self, version: int) -> None:
        """Delete older versions."""
        for old in [known for known in self._versions if known < version]:
            del self._versions[old]

    @contextmanager
    def of(self, version: int) -> Iterator[None]:
        """Use the weights of a version inside the block.

        Run backward passes inside such a block too: activation checkpointing recomputes forward passes there.
        """
        weights, now = self._versions[version], dict(self._module.named_parameters())
        self._set(weights)
        try:
            yield
        finally:
            self._set({name: now[name] for name in weights})

    def _set(self, weights: dict[str, nn.Parameter]) -> None:
        for name, weight in weights.items():
            owner, _, own = name.rpartition(".")
            setattr(self._module.get_submodule(owner), own, weight)

    def move_gradients(self, version: int) -> None:
        """Move a version's accumulated gradients to the weights that the optimizer updates."""
        trained = dict(self._module.named_parameters())
        for name, weight in self._versions[version].items():
            trained[name].grad, weight.grad = weight.grad, None
