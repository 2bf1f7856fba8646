"""Meshwright's runtime, of which a rank kills itself at a point of a step that its environment names.

`FATAL=12:backward:2` kills it in the second backward pass of step 12. `STALL=12:agreed` makes a rank wait at a point
until it leaves its generation: others then make the update of that step, and this one does not. The fork server
preloads this module, so that every rank has the points.

With `LIVE=DIRECTORY` a rank writes how many bytes of copies in host memory it had at most.
"""

from __future__ import annotations

import functools
import os
import signal
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright_worker.checkpoint.async_save import AsyncCheckpointer
from meshwright_worker.checkpoint.manifest import BaseManifest
from meshwright_worker.checkpoint.store import Tier
from meshwright_worker.in_memory import supervisor
from meshwright_worker.in_memory.copies import Copier, HostCopies, HostCopy
from meshwright_worker.in_memory.gate import MemoryGate
from meshwright_worker.in_memory.generation import Generation
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.optimizers.adamw import AdamW
from meshwright_worker.optimizers.master_adamw import MasterAdamW
from meshwright_worker.trainer.train import preload, preload_for, train
from meshwright_worker.trainer.trainer import StepGate, Trainer

__all__ = [
    "COPYING",
    "EVALUATING",
    "JOINING",
    "PASSES",
    "POINTS",
    "SAVING",
    "preload",
    "preload_for",
    "supervisor",
    "train",
]

POINTS = ("forward", "backward", "reduction", "reduced", "agreed", "update", "updated")
"""Where in a step a rank can be killed, in order."""
JOINING = "joining"
"""The point of a rank that has its groups, and not its state."""

COPYING = "copying"
"""The point of a rank that has copied its state, and not sent the copy: it may be in the next step by then."""

SAVING = "saving"
"""The point of a rank whose thread begins to write its part of a checkpoint: it may be in a later step by then."""

EVALUATING = "evaluating"
"""The point of a rank that has made a step's update, and evaluates."""

PASSES = ("forward", "backward")
"""The points that a step of several micro-batches reaches several times."""
STALL_SECONDS = 300.0


@dataclass
class _Now:
    """The step under way."""

    step: int = 0
    gate: weakref.ref[StepGate] | None = None
    """Weak: a gate has its generation's state, whose groups would stay for another generation."""
    reached: Counter[str] = field(default_factory=Counter)

    @property
    def left(self) -> bool:
        """Whether the rank has left the step's generation: its thread may come here later."""
        gate = self.gate() if self.gate is not None else None
        return isinstance(gate, MemoryGate) and gate.left


_now = _Now()


def _reach(point: str) -> None:
    _now.reached[point] += 1
    if os.environ.get("FATAL") == f"{_now.step}:{point}:{_now.reached[point]}" and not _now.left:
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.monotonic() + STALL_SECONDS
    while os.environ.get("STALL") == f"{_now.step}:{point}" and not _now.left and time.monotonic() < end:
        time.sleep(0.002)


def _around(owner: type, name: str, before: str = "", after: str = "") -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        if before:
            _reach(before)
        result = original(*args, **options)
        if after:
            _reach(after)
        return result

    setattr(owner, name, call)


def _around_reduce() -> None:
    original = Trainer._reduce

    @functools.wraps(original)
    def reduce(self: Trainer, number: int, *args: Any, **options: Any) -> Any:
        _now.step, _now.gate = number, weakref.ref(self._gate)
        _now.reached.clear()
        return original(self, number, *args, **options)

    Trainer._reduce = reduce  # type: ignore[method-assign]


def _in_backward() -> None:
    original = DecoderStage.forward

    @functools.wraps(original)
    def forward(self: DecoderStage, *args: Any, **options: Any) -> Any:
        _reach("forward")
        result = original(self, *args, **options)
        if result.requires_grad:
            result.register_hook(lambda _: _reach("backward"))
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


def _copying() -> None:
    original = Copier._run

    @functools.wraps(original)
    def run(self: Copier, step: int, own: HostCopy) -> None:
        if os.environ.get("FATAL") == f"{step}:{COPYING}:1":
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, step, own)

    Copier._run = run  # type: ignore[method-assign]


def _saving() -> None:
    original = AsyncCheckpointer._write

    @functools.wraps(original)
    def write(self: AsyncCheckpointer, tensors: Any, manifest: BaseManifest, tier: Tier) -> None:
        if os.environ.get("FATAL") == f"{manifest.state.step}:{SAVING}:1":
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, tensors, manifest, tier)

    AsyncCheckpointer._write = write  # type: ignore[method-assign]


def _live_copies() -> None:
    original = HostCopies.put
    most = 0

    @functools.wraps(original)
    def put(self: HostCopies, rank: int, step: int, copy: HostCopy) -> None:
        nonlocal most
        original(self, rank, step, copy)
        live = sum(content.nbytes for content in {id(c.content): c.content for c in self._copies.values()}.values())
        if os.environ.get("LIVE") and live > most:
            most = live
            (Path(os.environ["LIVE"]) / str(os.getpid())).write_text(str(live))

    HostCopies.put = put  # type: ignore[method-assign]


_live_copies()
_saving()
_around_reduce()
_copying()
_in_backward()
_joining()
_around(Trainer, "_gradients", before="reduction", after="reduced")
_around(Trainer, "_agree", after="agreed")
_around(Trainer, "evaluate", before=EVALUATING)
for _optimizer in (AdamW, MasterAdamW):
    _around(_optimizer, "step", before="update", after="updated")
