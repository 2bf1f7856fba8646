"""Programs of pipelines end on devices that a receive occupies, wherever hosts wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedules.actions import Action, ActionKind, Schedule
from meshwright.schedules.automatic import automatic
from meshwright.schedules.registry import NAMES, generate
from meshwright_worker.data.batch import Batch
from meshwright_worker.parallel.pipeline.p2p import connection_order
from meshwright_worker.parallel.pipeline.pipedream import PipeDreamPipeline
from meshwright_worker.parallel.pipeline.rank_program import ScheduledSlot, forward_only, p2p_pairs, rank_programs
from meshwright_worker.parallel.pipeline.schedule_executor import ScheduleExecutor
from tests.tiers import mostly_long
from tests.worker.parallel.simulated_nccl import (
    Event,
    Kind,
    blocked_hosts,
    everywhere,
    first_uses,
    mismatches,
    only,
    stuck_ranks,
)

CHUNKED = ("interleaved", "looped-bfs")
SEARCHED = "automatic"
EVEN = ("dualpipe",)
SOME_RANKS, MICRO_BATCHES = mostly_long(range(2, 9), lambda ranks: ranks in (3, 4)), range(1, 17)
"""Pipelines of more ranks take most of the time, and repeat what the middle ranks of shorter ones do."""


def schedules(name: str, ranks: int) -> list[Schedule]:
    """A schedule for every number of micro-batches that it exists for, with up to three chunks."""
    if name == SEARCHED:
        return [automatic(ranks, count, limit) for count in MICRO_BATCHES for limit in (ranks, 2 * ranks - 1)]
    made = []
    for count in MICRO_BATCHES:
        for chunks in (1, 2, 3) if name in CHUNKED else (1,):
            with suppress(ValueError):
                made.append(generate(name, ranks, count, chunks))
    return made


def message_name(gradient: bool, stage: int, micro_batch: int) -> str:
    return f"{'gradient' if gradient else 'output'} to stage {stage}, micro-batch {micro_batch}"


def used_messages(schedule: Schedule, action: Action) -> list[str]:
    kind, stage, micro_batch = action
    if kind is ActionKind.FORWARD and stage > 0:
        return [message_name(False, stage, micro_batch)]
    if kind in (ActionKind.BACKWARD, ActionKind.INPUT) and stage < schedule.stages - 1:
        return [message_name(True, stage, micro_batch)]
    return []


def events_of(schedule: Schedule, program: Sequence[ScheduledSlot]) -> list[Event]:
    """What the host of a rank does: what `ScheduleExecutor` does with this program."""
    events, peers = [], {}
    for turn in program:
        for message in turn.receive:
            name = message_name(*message.key)
            peers[name] = message.source
            events.append(Event(Kind.RECEIVE, message.source, name))
        used = [name for action in turn.slot for name in used_messages(schedule, action) if name in peers]
        events += [Event(Kind.WAIT, peers[name], name) for name in used]
        events.append(Event(Kind.PASS, name="+".join(map(str, turn.slot))))
        events += [
            Event(Kind.SEND, message.target, message_name(*message.key))
            for message in turn.sends
            if message is not None and message.target != message.source
        ]
    return events


def programs_of(schedule: Schedule) -> list[list[Event]]:
    return [events_of(schedule, program) for program in rank_programs(schedule)]


@pytest.mark.parametrize("name", [*NAMES, SEARCHED])
@pytest.mark.parametrize("ranks", SOME_RANKS)
def test_every_program_ends_wherever_hosts_wait_for_their_devices(name: str, ranks: int) -> None:
    found = schedules(name, ranks)
    assert found or (name in EVEN and ranks % 2)
    for schedule in found:
        for part in (schedule, forward_only(schedule)):
            programs = programs_of(part)
            assert not mismatches(programs)
            assert blocked_hosts(programs) == [], (part.micro_batches, part.chunks)


@pytest.mark.parametrize("name", [*NAMES, SEARCHED])
def test_simulated_nccl_runs_every_schedule(name: str) -> None:
    for ranks, count in ((2, 8), (4, 8), (4, 16)):
        schedule = automatic(ranks, count, ranks) if name == SEARCHED else generate(name, ranks, count)
        programs = programs_of(schedule)
        for waits in (first_uses(programs), everywhere, only(())):
            assert stuck_ranks(programs, waits) == []


def with_early_receives(schedule: Schedule, slots: int) -> list[list[ScheduledSlot]]:
    """Programs whose receives are posted a number of slots before the slot that uses them: the rule of
    0.1.0.
    """
    early = []
    for program in rank_programs(schedule):
        messages = [message for turn in program for message in turn.receive]
        used_at = {name: i for i, turn in enumerate(program) for a in turn.slot for name in used_messages(schedule, a)}
        posts: list[list[Any]] = [[] for _ in program]
        for source in range(len(schedule.ranks)):
            turn = len(program)
            for message in reversed([message for message in messages if message.source == source]):
                turn = min(turn, used_at[message_name(*message.key)])
                posts[max(0, turn - slots)].insert(0, message)
        early.append([replace(turn, receive=tuple(post)) for turn, post in zip(program, posts, strict=True)])
    return early


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "naive"])
def test_receives_two_slots_early_deadlock_in_the_first_step(name: str, ranks: int, count: int) -> None:
    schedule = generate(name, ranks, count)
    programs = [events_of(schedule, program) for program in with_early_receives(schedule, 2)]
    assert not mismatches(programs)
    assert stuck_ranks(programs, only(())) == []  # without waits for the device, they end
    stuck = stuck_ranks(programs, first_uses(programs))
    # The rank before the last one posts the receive of the first gradient before its own first forward pass.
    assert any(place.startswith(f"rank {ranks - 2} ") for place in stuck)


@settings(max_examples=30)
@given(st.data(), st.sampled_from(["1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved"]))
def test_one_wait_anywhere_ends_exactly_if_the_order_allows_it(data: st.DataObject, name: str) -> None:
    schedule = generate(name, 4, 8)
    programs = programs_of(schedule)
    places = [(rank, index) for rank, events in enumerate(programs) for index in range(len(events))]
    assert stuck_ranks(programs, only(data.draw(st.sets(st.sampled_from(places), max_size=6)))) == []


@pytest.mark.parametrize("slots", [0, 1, 2, 6])
@pytest.mark.parametrize("name", NAMES)
def test_blocked_hosts_are_those_of_the_simulation_with_waits_everywhere(name: str, slots: int) -> None:
    schedule = generate(name, 4, 8)
    programs = [events_of(schedule, program) for program in with_early_receives(schedule, slots)]
    assert bool(blocked_hosts(programs)) == bool(stuck_ranks(programs, everywhere))


class Recorder:
    """Channels that note what a rank does, and receive zeros."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._counts: dict[tuple[Kind, int], int] = {}

    def post_receive(self, source: int, shape: Any, dtype: torch.dtype) -> Any:
        name = self._next(Kind.RECEIVE, source)
        return _Received(lambda: self.events.append(Event(Kind.WAIT, source, name)), torch.zeros(shape, dtype=dtype))

    def send(self, tensor: torch.Tensor, target: int) -> None:
        self._next(Kind.SEND, target)

    def flush(self, keep: int = 0) -> None:
        """Sends end at once here."""

    def _next(self, kind: Kind, peer: int) -> str:
        number = self._counts[kind, peer] = self._counts.get((kind, peer), -1) + 1
        self.events.append(Event(kind, peer, str(number)))
        return str(number)


class _Received:
    def __init__(self, waited: Callable[[], None], tensor: torch.Tensor) -> None:
        self._waited, self._tensor = waited, tensor

    def wait(self) -> torch.Tensor:
        self._waited()
        return self._tensor


class NotedStage(torch.nn.Module):
    """A stage of one number, which notes its passes as the events of a host."""

    def __init__(self, index: int, count: int, recorder: Recorder) -> None:
        super().__init__()
        self.index, self.is_first, self.is_last = index, index == 0, index == count - 1
        self.compute = torch.float32
        self.weight = torch.nn.Parameter(torch.ones(()))
        self._recorder = recorder

    def forward(self, x: torch.Tensor, *, targets: Any = None, token_metadata: Any = None) -> torch.Tensor:
        self._recorder.events.append(Event(Kind.PASS, name="F"))
        hidden = x.float()[..., None] * self.weight if self.is_first else x * self.weight
        hidden.register_hook(lambda gradient: self._recorder.events.append(Event(Kind.PASS, name="B")))
        return hidden.sum() if self.is_last else hidden


def batches(count: int) -> list[Batch]:
    return Batch.of(torch.zeros(count, 3, dtype=torch.int64)).chunk(count)


class NotedChunk:
    """What a `PipelineStage` offers to the executor."""

    def __init__(self, index: int, stages: int, recorder: Recorder) -> None:
        module = SimpleNamespace(is_last=index == stages - 1, compute=torch.float32, modules=tuple)
        self.stage = SimpleNamespace(index=index, module=module)
        self._recorder = recorder

    def forward(self, micro_batch: int, part: Batch, received: torch.Tensor | None, *, split: bool) -> torch.Tensor:
        return self._pass()

    def backward(self, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor:
        return self._pass()

    def weight(self, micro_batch: int, *, reduce: bool = False, last: bool = False) -> None:
        self._pass()

    def _pass(self) -> torch.Tensor:
        self._recorder.events.append(Event(Kind.PASS))
        return torch.zeros(1, 2, 1) if not self.stage.module.is_last else torch.zeros(())


@pytest.mark.parametrize("name", NAMES)
def test_ranks_connect_in_a_few_rounds_however_long_the_pipeline_is(name: str) -> None:
    """Each rank connects its pairs in the common order, and waits for the other end of each."""
    for schedule in schedules(name, 8):
        pairs = p2p_pairs(schedule)
        order = connection_order(pairs)
        assert set(order) == pairs
        assert len(order) == len(pairs)
        rounds = dict.fromkeys(range(8), 0)
        for one, other in order:
            rounds[one] = rounds[other] = 1 + max(rounds[one], rounds[other])
        assert max(rounds.values()) <= 6, "4 between neighbors, and 2 from the last one to the first"


@pytest.mark.parametrize("name", NAMES)
def test_the_executor_does_what_the_program_says(name: str) -> None:
    schedule = generate(name, 4, 8).serialized()
    for rank, program in enumerate(rank_programs(schedule)):
        recorder: Any = Recorder()
        held = sorted({action.stage for action in schedule.actions(rank)})
        chunks: list[Any] = [NotedChunk(index, schedule.stages, recorder) for index in held]
        ScheduleExecutor(chunks, schedule, rank, recorder, width=1, slices=1).run(batches(8))
        expected = events_of(schedule, program)
        assert [(event.kind, event.peer) for event in recorder.events] == [(e.kind, e.peer) for e in expected]


@pytest.mark.parametrize("ranks", SOME_RANKS)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("double_buffered", [False, True])
def test_pipelines_without_flushes_end_too(ranks: int, micro_batches: int, double_buffered: bool) -> None:
    if double_buffered:
        micro_batches *= ranks  # stages use the weights of two steps before
    programs = []
    for index in range(ranks):
        recorder = Recorder()
        stage: Any = NotedStage(index, ranks, recorder)
        channels: Any = recorder
        pipeline = PipeDreamPipeline(
            stage, index, ranks, double_buffered=double_buffered, tokens=1, channels=channels, width=1, slices=1,
            update=lambda step, loss: None,
        )  # fmt: skip
        for step in range(1, 4 + ranks):
            pipeline.feed(step, batches(micro_batches))
        pipeline.drain()
        pipeline.feed(4 + ranks, batches(micro_batches))
        pipeline.drain()
        programs.append(recorder.events)
    assert any(event.kind is Kind.SEND for events in programs for event in events)
    assert not mismatches(programs)
    assert blocked_hosts(programs) == []
    assert stuck_ranks(programs, first_uses(programs)) == []
