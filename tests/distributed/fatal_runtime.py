"""Meshwright's runtime, of which a rank kills itself at a point of a step that its environment names.

`FATAL=12:backward` kills it in the backward pass of step 12. The fork server preloads this module, so that every rank
has the points.
"""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

from meshwright_worker.in_memory import supervisor
from meshwright_worker.in_memory.generation import Generation
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.optimizers.adamw import AdamW
from meshwright_worker.trainer.train import preload, train
from meshwright_worker.trainer.trainer import Trainer

__all__ = ["POINTS", "preload", "supervisor", "train"]

POINTS = ("forward", "backward", "reduction", "reduced", "agreed", "update", "updated")
"""Where in a step a rank can be killed, in order."""
JOINING = "joining"
"""The point of a rank that has its groups, and not its state."""

_now: list[int] = [0]
"""The step under way."""


def _die_at(point: str) -> None:
    if os.environ.get("FATAL") == f"{_now[0]}:{point}":
        os.kill(os.getpid(), signal.SIGKILL)


def _around(owner: type, name: str, before: str = "", after: str = "") -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        if before:
            _die_at(before)
        result = original(*args, **options)
        if after:
            _die_at(after)
        return result

    setattr(owner, name, call)


def _around_reduce() -> None:
    original = Trainer._reduce

    @functools.wraps(original)
    def reduce(self: Trainer, number: int, *args: Any, **options: Any) -> Any:
        _now[0] = number
        return original(self, number, *args, **options)

    Trainer._reduce = reduce  # type: ignore[method-assign]


def _in_backward() -> None:
    original = DecoderStage.forward

    @functools.wraps(original)
    def forward(self: DecoderStage, *args: Any, **options: Any) -> Any:
        _die_at("forward")
        result = original(self, *args, **options)
        if result.requires_grad:
            result.register_hook(lambda _: _die_at("backward"))
        return result

    DecoderStage.forward = forward  # type: ignore[method-assign]


def _joining() -> None:
    original = Generation.restore

    @functools.wraps(original)
    def restore(self: Generation, *args: Any) -> Any:
        if os.environ.get("FATAL") == f"{self.task.generation}:{JOINING}":
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args)

    Generation.restore = restore  # type: ignore[method-assign]


_around_reduce()
_in_backward()
_joining()
_around(Trainer, "_gradients", before="reduction", after="reduced")
_around(Trainer, "_agree", after="agreed")
_around(AdamW, "step", before="update", after="updated")
