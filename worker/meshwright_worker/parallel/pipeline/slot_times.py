"""Times the slots of a few steps on one rank of a pipeline, for a picture of what it really did.

Between those steps it costs nothing. In one of them it reads the step clock twice for each slot, and twice for each
receive: less than a microsecond on a CPU, one event on a GPU. All ranks of a pipeline choose the same steps, without
communication. One pipeline of the job records: that of the first rank of every other dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from meshwright.schedules.actions import Slot
from meshwright.schedules.measured import MAX_SLOTS, MICROSECOND, RankTimeline, slot_text
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.distributed.step_clock import current_clock, seconds_between

FIRST = 2
"""Steps of a mesh generation before the first one that is timed: they are slower."""
EVERY = 50
"""Steps from one that is timed to the next."""


def is_timed(step: int, first: int) -> bool:
    """Whether the slots of a step are timed, in a mesh generation whose first step is `first`."""
    return (step - first) % EVERY == FIRST


def slot_recorder(mesh: Mesh, slots: int) -> SlotRecorder | None:
    """The recorder of this rank. None on ranks of other pipelines, and for steps that are too long to be sent.

    `slots` is the number of slots of the longest rank, so that all ranks of the pipeline have one or none has.
    """
    at = mesh.coordinates
    first = at.tensor == at.context == at.data == 0
    return SlotRecorder(at.pipeline, mesh.layout.pipeline) if first and slots <= MAX_SLOTS else None


@dataclass(slots=True)
class _TimedSlot:
    slot: Slot
    began: Any
    ended: Any = None
    waits: list[tuple[Any, Any]] = field(default_factory=list)


class SlotRecorder:
    """Records the slots of a step between `begin` and `end`, and returns them once they are known.

    Args:
        stage: index of the rank in the pipeline.
        stages: number of its ranks.
    """

    def __init__(self, stage: int, stages: int) -> None:
        self._stage, self._stages = stage, stages
        self._mark: Callable[[], Any] | None = None
        self._step = 0
        self._slots: list[_TimedSlot] = []
        self._end: Any = None

    @property
    def running(self) -> bool:
        """Whether a step is being recorded."""
        return self._mark is not None

    def begin(self, step: int) -> None:
        """Record a step, if it is timed at all."""
        clock = current_clock()
        self._mark = clock.mark if clock is not None else None
        self._step, self._slots, self._end = step, [], None

    def begin_slot(self, slot: Slot) -> None:
        """A slot begins; its receives may still be awaited."""
        assert self._mark is not None
        self._slots.append(_TimedSlot(slot, self._mark()))

    def wait(self, receive: Callable[[], Any]) -> Any:
        """Call `receive`, and count its time as a wait of the slot."""
        assert self._mark is not None
        began = self._mark()
        result = receive()
        self._slots[-1].waits.append((began, self._mark()))
        return result

    def end_slot(self) -> None:
        """The slot is over."""
        assert self._mark is not None
        self._slots[-1].ended = self._mark()

    def end(self) -> None:
        """All ranks of the pipeline are here together: call it where a collective of the step has ended, and before
        what each rank does by itself.
        """
        if self._mark is not None:
            self._end, self._mark = self._mark(), None

    def take(self) -> RankTimeline | None:
        """The slots of the recorded step, once. None before the device has passed its end, or if there is none."""
        if self._end is None or not self._slots:
            return None
        slots = []
        for timed in self._slots:
            before_end, length = seconds_between(timed.began, self._end), seconds_between(timed.began, timed.ended)
            waits = [seconds_between(*wait) for wait in timed.waits]
            if before_end is None or length is None:
                return None  # the stream has not come so far
            waited = min(length, sum(wait for wait in waits if wait is not None))
            start = round((waited - before_end) / MICROSECOND)
            slots.append((slot_text(timed.slot), start, round((length - waited) / MICROSECOND)))
        self._slots, self._end = [], None
        return RankTimeline(self._step, self._stage, self._stages, slots)
