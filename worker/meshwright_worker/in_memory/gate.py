"""What a rank holds when its generation is interrupted, and the gate at which steps stop then.

A step has three parts: its gradients are reduced, all ranks agree on its sums, and each updates its own state. Whoever
has the sums knows that every rank has the gradients. So if one rank has made the update, every other can make it too,
with the same sums, and needs nobody for it. An update that has begun always ends; after `leave` none begins.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from meshwright_worker.checkpoint.manifest import Origin, TrainingState
from meshwright_worker.data.sample_order import MODULUS
from meshwright_worker.in_memory.copies import Copier
from meshwright_worker.trainer.trainer import ReducedStep, StepGate, StepResult, StepSums, Trainer


class LeftError(Exception):
    """The rank has left the generation to which this thread belongs."""


@dataclass
class Held:
    """The state of a rank."""

    trainer: Trainer
    """Has the parameters and moments. Its groups may be gone."""
    state: TrainingState
    """All other state after the last update, the same on every rank."""
    samples_per_step: int
    reduced: ReducedStep | None = None
    """The next step, if its gradients are reduced."""
    origin: Origin | None = None
    """What its checkpoints say about the beginning of the run, the same on every rank."""
    sums: StepSums | None = None
    """The sums of the last update, for ranks that have not received them. None if this process has made none."""
    unreported: StepResult | None = None
    """The result of the last update, until its step is evaluated and reported."""

    def advance(self, result: StepResult, sums: StepSums) -> None:
        """Record an update."""
        state = TrainingState(
            step=result.step,
            samples=self.state.samples + self.samples_per_step,
            digest=(self.state.digest + result.digest) % MODULUS,
            loss=result.loss.hex(),
        )
        self.state = self.trainer.update_state(state)
        self.reduced, self.sums, self.unreported = None, sums, result


class MemoryGate(StepGate):
    """The gate of one rank in one generation. The main thread may close it at any time."""

    wants_digest = True

    def __init__(self, held: Held | None = None) -> None:
        """`held` is the state that this process has from an earlier generation."""
        self._lock = threading.RLock()
        self._left = False
        self._held = held
        self._sums: StepSums | None = None
        self.copier: Copier | None = None
        """Makes copies of the state, if the job wants them."""

    @property
    def left(self) -> bool:
        """Whether the rank has left the generation."""
        return self._left

    @property
    def held(self) -> Held | None:
        """The state; None before the first is complete."""
        return self._held

    def hold(self, held: Held) -> None:
        """Replace the state, once all of it is in another place.

        Raises:
            LeftError: the rank has left the generation.
        """
        with self._lock:
            self._check()
            self._held = held

    def leave(self) -> Held | None:
        """Let no further update begin. Return the state, which then changes no more."""
        with self._lock:
            self._left = True
            return self._held

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Leave the generation before or after the block, which must be short.

        Raises:
            LeftError: the rank has left the generation.
        """
        with self._lock:
            self._check()
            yield

    def reduced(self, step: ReducedStep) -> None:
        """See `StepGate.reduced`."""
        with self._lock:
            self._check()
            if self._held is not None:
                self._held.reduced = step

    @contextmanager
    def update(self, sums: StepSums) -> Iterator[None]:
        """See `StepGate.update`."""
        with self._lock:
            self._check()
            self._sums = sums
            yield

    def updated(self, result: StepResult) -> None:
        """See `StepGate.updated`."""
        if self._held is not None and self._sums is not None:
            self._held.advance(result, self._sums)

    def completed(self) -> None:
        """See `StepGate.completed`."""
        held, copier = self._held, self.copier
        if held is not None and copier is not None and copier.due(held.state.step):
            copier.take(held.trainer.inventory(), held.state)

    def reported(self, step: int) -> None:
        """See `StepGate.reported`."""
        with self._lock:
            self._check()
            if self._held is not None and self._held.state.step == step:
                self._held.unreported = None

    def _check(self) -> None:
        if self._left:
            raise LeftError("the generation is over")
