"""The clock of a step: nested blocks count once, and waits belong to the phase and dimension in which they occur."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from meshwright_worker.agent import metrics
from meshwright_worker.distributed import step_clock, timed_collectives
from meshwright_worker.distributed.step_clock import (
    PASSES,
    UPDATE,
    HostClock,
    StreamClock,
    beside_steps,
    phase,
    running_clock,
    wait_for,
)
from meshwright_worker.trainer.step_times import step_times


class Hours:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(step_clock.time, "perf_counter", lambda: self.now)

    def passes(self, seconds: float) -> None:
        self.now += seconds


def test_each_second_counts_for_the_innermost_phase_or_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = Hours(monkeypatch)
    clock = HostClock()

    def wait(dimension: str, seconds: float) -> None:
        began = clock.mark()
        hours.passes(seconds)
        clock.record((dimension, began, clock.mark()))

    clock.open(PASSES)
    hours.passes(5)
    wait("tensor", 2)
    clock.open(UPDATE)
    hours.passes(1)
    wait("tensor", 0.5)
    clock.close()
    wait("data", 1)
    hours.passes(3)
    assert clock.take() == {(UPDATE, ""): 1, (UPDATE, "tensor"): 0.5, (PASSES, "tensor"): 2, (PASSES, "data"): 1}
    clock.close()
    wait("job", 4)
    assert clock.take() == {(PASSES, ""): 8, ("", "job"): 4}
    assert clock.take() == {}


def test_times_of_a_step_leave_out_evaluations_and_checkpoints() -> None:
    parts = {
        (PASSES, ""): 6.0,
        (PASSES, "pipeline"): 1.0,
        (PASSES, "tensor"): 2.0,
        ("", "data"): 0.5,
        ("", "job"): 1.0,
        (UPDATE, ""): 0.25,
        (UPDATE, "data"): 0.125,
        ("evaluation", "job"): 9.0,
        ("checkpoint", "data"): 9.0,
        ("checkpoint", ""): 9.0,
    }
    times = step_times(parts, checkpoint=3.0, stages=2)
    assert (times.compute, times.update, times.checkpoint) == (6.0, 0.25, 3.0)
    assert times.waits == {"pipeline": 1.0, "tensor": 2.0, "data": 0.625, "job": 1.0}
    assert times.bubble == pytest.approx((1 + 1) / (6 + 1 + 2 + 1))
    assert step_times(parts, checkpoint=0, stages=1).bubble is None
    assert step_times({}, checkpoint=0, stages=2).bubble is None


def test_a_phase_is_counted_only_while_a_clock_runs() -> None:
    with phase(PASSES):
        assert step_clock.current_clock() is None
    with running_clock(torch.device("cpu"), lambda group: None) as clock:
        with phase(PASSES):
            pass
        assert set(clock.take()) == {(PASSES, "")}
    assert step_clock.current_clock() is None


def test_the_agent_declares_the_dimensions_of_the_ranks() -> None:
    assert metrics.DIMENSIONS == timed_collectives.DIMENSIONS


def communicate_beside_steps(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    with beside_steps():
        dist.all_reduce(x, group=group)
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        work.wait()
        wait_for(dist.group.WORLD.allreduce([x]), group)  # type: ignore[union-attr]


@pytest.mark.parametrize("compiles", [False, True])
def test_torchs_functions_are_timed_by_group_and_restored(compiles: bool) -> None:
    original = dist.all_reduce
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        other = dist.new_group([0])
        names = {dist.group.WORLD: "job", None: "job", other: "tensor"}
        dimensions = type("G", (), {"of": names.get, "known": {}})()
        mesh = type("M", (), {"device": torch.device("cpu")})()
        with timed_collectives.timed_collectives(mesh, dimensions, compiles=compiles) as clock:
            x = torch.ones(2)
            dist.all_reduce(x)
            dist.all_reduce(x, group=dist.new_group([0]))
            assert set(clock.take()) == {("", "job")}, "a group that is not a step's is not timed"
            work = dist.all_reduce(x, group=other, async_op=True)
            assert isinstance(work, dist.Work)
            assert clock.take() == {}, "an asynchronous collective waits only where it is awaited"
            thread = threading.Thread(target=work.wait)
            thread.start()
            thread.join()
            assert set(clock.take()) == {("", "tensor")}
            with pytest.raises(TypeError, match="tensor"):
                dist.all_reduce("no tensor", group=other)  # type: ignore[arg-type]
            with phase(UPDATE):
                dist.broadcast(x, 0, group=other)
            assert set(clock.take()) == {(UPDATE, ""), (UPDATE, "tensor")}
            thread = threading.Thread(target=communicate_beside_steps, args=(x, other))
            thread.start()
            thread.join()
            assert clock.take() == {}, "steps do not wait for another thread"
            dist.all_reduce(x)
            assert set(clock.take()) == {("", "job")}, "in this thread everything counts"
        assert dist.all_reduce is original
    finally:
        dist.destroy_process_group()


class Event:
    """A point in a stream that has passed or not."""

    def __init__(self, at: float) -> None:
        self.at, self.passed = at, False

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1000


def test_a_stream_is_timed_by_its_events_once_it_has_passed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []

    def record(clock: StreamClock) -> Event:
        events.append(Event(float(len(events))))
        return events[-1]

    monkeypatch.setattr(StreamClock, "_event", record)
    stream = object()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    clock = StreamClock(stream=stream)  # type: ignore[arg-type]
    clock.open(PASSES)
    for dimension in ("tensor", "data"):
        clock.record((dimension, clock.mark(), clock.mark()))
    clock.close()
    clock.record(("job", None, None))
    assert clock.take() == {}, "the host does not wait for the stream"
    for event in events[:4]:
        event.passed = True
    assert clock.take() == {(PASSES, "tensor"): 1}
    for event in events:
        event.passed = True
    assert clock.take() == {(PASSES, "data"): 1, (PASSES, ""): 5 - 1 - 1}
    assert clock.take() == {}
    stream = object()
    assert clock.mark() is None, "a stream beside the computation"
