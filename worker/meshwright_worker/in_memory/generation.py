"""One mesh generation of a rank that can leave it: a thread trains, and the main thread can leave it behind."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.manifest import Origin, TrainingState
from meshwright_worker.distributed.mesh import STEP_TIMEOUT, Mesh, build_mesh, connect, new_host_group
from meshwright_worker.in_memory.copies import Copier, HostCopies
from meshwright_worker.in_memory.gate import Held, LeftError, MemoryGate
from meshwright_worker.in_memory.leaving import Connections, destroy_groups
from meshwright_worker.in_memory.transfer import restore
from meshwright_worker.rank.task import Outcome, RankEvents, RankTask, StepReport, Work
from meshwright_worker.trainer.train import OpenedRun, train_on_mesh
from meshwright_worker.trainer.trainer import StepGate, StepResult, Trainer

PATIENCE_SECONDS = 0.5
"""Time for a thread to come out of a collective whose connections are shut down. Then it is left behind."""
_LOOK_SECONDS = 0.02


class StuckError(ConnectionError):
    """The rank cannot leave a rendezvous, and its process is of no use any more."""


class EventsOfGeneration:
    """The events of a generation. After `leave` nothing is reported: the thread may be left behind."""

    def __init__(self, events: RankEvents, gate: MemoryGate) -> None:
        self._events, self._gate = events, gate

    def phase(self, name: str, seconds: float) -> None:
        """See `RankEvents.phase`."""
        self._report(lambda: self._events.phase(name, seconds))

    def running(self, step: int, source: str = "") -> None:
        """See `RankEvents.running`."""
        self._report(lambda: self._events.running(step, source))

    def step(self, report: StepReport) -> None:
        """See `RankEvents.step`."""
        self._report(lambda: self._events.step(report))

    def at_work(self, work: Work | None = None) -> None:
        """See `RankEvents.at_work`. May be called in another thread."""
        with suppress(LeftError):
            self._report(lambda: self._events.at_work(work))

    def checkpoint(self, step: int, path: str, seconds: float) -> None:
        """See `RankEvents.checkpoint`."""
        self._report(lambda: self._events.checkpoint(step, path, seconds))

    def take_checkpoint_request(self) -> bool:
        """See `RankEvents.take_checkpoint_request`."""
        return self._events.take_checkpoint_request()

    def checkpoint_begun(self, step: int) -> None:
        """See `RankEvents.checkpoint_begun`."""
        self._report(lambda: self._events.checkpoint_begun(step))

    def stop_requested(self) -> bool:
        """See `RankEvents.stop_requested`."""
        return self._events.stop_requested()

    def _report(self, report: Callable[[], None]) -> None:
        with self._gate.inside():
            report()


class Generation(threading.Thread):
    """Training of one rank between two changes of the set of ranks."""

    def __init__(
        self,
        task: RankTask[NativeRun],
        events: RankEvents,
        opened: OpenedRun,
        held: Held | None,
        copies: HostCopies,
        on_end: Callable[[], None],
    ) -> None:
        """`held` and `copies` are what this process has; `on_end` is called in the thread when training ends."""
        super().__init__(name=f"generation-{task.generation}", daemon=True)
        self.task = task
        self.memory_gate = MemoryGate(held)
        self.outcome: Outcome | None = None
        self.error: BaseException | None = None
        self.ended = False
        """Whether training has ended. The thread is still alive for a moment after that."""
        self._events = EventsOfGeneration(events, self.memory_gate)
        self._opened, self._on_end = opened, on_end
        self._connections = Connections()
        self._formed = False
        self._restored: Held | None = None
        self._copies = copies

    def run(self) -> None:
        """Join, train, and record the result."""
        try:
            self.outcome = self._train()
        # torch's CheckpointException does not inherit from Exception; the main thread judges any error.
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            self._on_end()

    def _train(self) -> Outcome:
        started = time.monotonic()
        device = connect(self.task, cancelled=lambda: self.memory_gate.left)
        mesh = build_mesh(self.task, device.torch)
        if self.task.copies is not None:
            group = new_host_group(STEP_TIMEOUT, lazy=False)
            self.memory_gate.copier = Copier(self._copies, self.task.copies, group)
        self._events.phase("rendezvous", time.monotonic() - started)
        return train_on_mesh(self.task, self._events, self._opened, mesh, self)

    @property
    def gate(self) -> StepGate:
        """See `Memory.gate`."""
        return self.memory_gate

    def formed(self) -> None:
        """See `Memory.formed`."""
        self._connections.close()
        self._formed = True

    @property
    def origin(self) -> Origin | None:
        """See `Memory.origin`."""
        return self._restored.origin if self._restored is not None else None

    @property
    def unreported(self) -> StepResult | None:
        """See `Memory.unreported`."""
        held = self.memory_gate.held
        return held.unreported if held is not None else None

    def restore(self, trainer: Trainer, mesh: Mesh) -> TrainingState | None:
        """See `Memory.restore`."""
        if self.task.memory is None:
            return None
        self._restored = restore(self.task, trainer, mesh, self.memory_gate, self._copies)
        return self._restored.state

    def begin(self, trainer: Trainer, state: TrainingState, origin: Origin | None) -> None:
        """See `Memory.begin`."""
        if dist.get_backend() != "gloo":
            return  # its collectives cannot be left
        samples = self.task.run.training.global_batch_size
        held, self._restored = self._restored or Held(trainer, state, samples), None
        held.origin = origin
        self.memory_gate.hold(held)
        # The modules of the generation before are cycles, which keep its groups alive, whose threads spin.
        gc.collect()
        if self.memory_gate.copier is not None:
            # Until the first copy is complete, a loss needs storage.
            self.memory_gate.copier.take(trainer.inventory(), state)

    def leave(self) -> Held | None:
        """Leave the generation, from the main thread. Return the state, which then changes no more.

        Raises:
            StuckError: the thread forms groups, and does not come out.
        """
        held = self.memory_gate.leave()
        # Also if training has ended by itself: threads that write a checkpoint or exchange copies wait for peers that
        # live, and would for the time limit of their collective.
        self._connections.cut()
        end = time.monotonic() + PATIENCE_SECONDS
        while self.is_alive() and time.monotonic() < end:
            self._connections.cut()
            self.join(_LOOK_SECONDS)
        copying = self.memory_gate.copier.thread if self.memory_gate.copier is not None else None
        if copying is not None and not self.is_alive():
            copying.join(max(_LOOK_SECONDS, end - time.monotonic()))
        stuck: threading.Thread | None = self if self.is_alive() else None
        if stuck is not None and not self._formed:
            raise StuckError("connection closed, but the rank does not leave its rendezvous")
        if stuck is None and copying is not None and copying.is_alive():
            stuck = copying
        destroy_groups(stuck)
        if not self.is_alive() and self.error is not None:
            self.error = self.error.with_traceback(None)  # its frames keep groups alive
        return held
