"""Times of a rank's step against independent counts: the simulator's bubble, and a profiler's trace of the waits."""

from __future__ import annotations

import json
import re
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from meshwright.api.parallelism import ContextMethod, PipelineSchedule
from meshwright.protocol.messages import MemoryCopies
from meshwright.protocol.run_config import NativeRun
from meshwright.schedules.actions import Schedule
from meshwright.schedules.measured import RankTimeline, measured_step
from meshwright.schedules.registry import NAMES
from meshwright.schedules.simulator import simulate
from meshwright_worker.agent.metrics import WorkerMetrics
from meshwright_worker.checkpoint.manifest import TrainingState
from meshwright_worker.data.batch import Batch
from meshwright_worker.distributed import step_clock
from meshwright_worker.distributed.collectives import all_reduce_sum
from meshwright_worker.distributed.mesh import STEP_TIMEOUT, join_mesh, new_host_group
from meshwright_worker.distributed.step_clock import PASSES, phase
from meshwright_worker.distributed.timed_collectives import timed_collectives
from meshwright_worker.in_memory.copies import Copier, HostCopies
from meshwright_worker.parallel.pipeline.p2p import P2PChannels, PendingReceive
from meshwright_worker.parallel.pipeline.rank_program import p2p_pairs
from meshwright_worker.parallel.pipeline.schedule_executor import ScheduleExecutor
from meshwright_worker.parallel.pipeline.slot_times import FIRST, SlotRecorder
from meshwright_worker.rank.task import RankTask, StepReport, StepTimes
from meshwright_worker.trainer.step_times import simulated_bubble, step_times
from meshwright_worker.trainer.train import train
from tests.distributed.cases import Recorder, Training
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_pipeline_clock import COSTS, MICRO_BATCHES, RANKS, Clock, ClockedChunk, made
from tests.tiers import mostly_long

OFTEN = ("1f1b", "zb-v", "dualpipe", "automatic")
"""Schedules that are tried always. That all run in their order is for `test_pipeline_clock`."""
WITHIN_POINTS = 0.03
"""How far the measured bubble may be from the simulated one."""
WITHIN = 0.05
"""How far exposed communication may be from the trace's."""
LAG = 0.1
"""Seconds by which one rank is late in each pass: the others wait for it, however busy the machine is."""
COLLECTIVES = (": all_reduce", ": all_gather_single", ": reduce_scatter_single", ": all_to_all_single", ": broadcast")


class _Arrival:
    """A receive that ends on the rank's virtual clock when the tensor was sent."""

    def __init__(self, work: Any, buffer: torch.Tensor, clock: Clock) -> None:
        self._work, self._buffer, self._clock = work, buffer, clock

    def wait(self) -> None:
        self._work.wait()
        self._clock.now = max(self._clock.now, float(self._buffer.max()))


class _LastRank:
    """The end of the last rank's part of a step."""

    def __init__(self, ends: torch.Tensor, group: Any, clock: Clock) -> None:
        self._ends, self._group, self._clock = ends, group, clock

    def wait(self) -> None:
        all_reduce_sum(self._ends, self._group)
        self._clock.now = float(self._ends.max())


class ClockedChannels(P2PChannels):
    """Channels whose receives advance a virtual clock."""

    def __init__(self, mesh: Any, pairs: Any, clock: Clock) -> None:
        super().__init__(mesh, pairs)
        self._clock = clock

    def post_receive(self, source: int, shape: Any, dtype: torch.dtype) -> PendingReceive:
        pending = super().post_receive(source, shape, dtype)
        pending._work = _Arrival(pending._work, pending._buffer, self._clock)
        return pending


def times_on_the_clock(
    task: RankTask, schedule: Schedule, late: float = 0.0, after: float = 0.0
) -> tuple[StepTimes, RankTimeline | None, tuple[float, float]]:
    """This rank's times of one step, and those of its slots, as its clock measures them where time is virtual.

    Rank r begins `late` * r after the first one, and works for `after` * r after its passes, for its gradients' norm.
    Last are when its passes end, and when the step ends.
    """
    with join_mesh(task) as mesh:
        virtual, real = Clock(late * mesh.rank), step_clock.time.perf_counter
        rank = mesh.coordinates.pipeline
        held = sorted({action.stage for action in schedule.actions(rank)})
        chunks: list[Any] = [ClockedChunk(index, schedule.stages, virtual) for index in held]
        channels = ClockedChannels(mesh, p2p_pairs(schedule), virtual)
        recorder = SlotRecorder(rank, RANKS)
        executor = ScheduleExecutor(chunks, schedule, rank, channels, width=1, slices=1, recorder=recorder)
        step_clock.time.perf_counter = lambda: virtual.now
        try:
            with timed_collectives(mesh) as clock:
                recorder.begin(7)
                with phase(PASSES):
                    executor.run(Batch.of(torch.zeros(MICRO_BATCHES, 3, dtype=torch.int64)).chunk(MICRO_BATCHES))
                passed = virtual.now
                virtual.now += after * rank
                ends = torch.zeros(RANKS, dtype=torch.float64)
                ends[rank] = virtual.now
                # The result of a step is there once the last rank has computed its part.
                step_clock.wait_for(_LastRank(ends, mesh.island_group, virtual), mesh.island_group)
                recorder.end()
                ended = virtual.now
                virtual.now += rank  # the update, which each rank does by itself
                return step_times(clock.take(), checkpoint=0.0, stages=RANKS), recorder.take(), (passed, ended)
        finally:
            step_clock.time.perf_counter = real


@pytest.mark.parametrize("name", mostly_long([*NAMES, "automatic"], OFTEN.__contains__))
def test_the_measured_bubble_of_every_schedule_is_the_simulators(pool: RankPool, name: str) -> None:
    schedule = made(name)
    run = small_run(pipeline=RANKS, micro_batches=MICRO_BATCHES, layers=8)
    answers = pool.run(times_on_the_clock, run, schedule)
    measured = [times.bubble for times, _, _ in answers]
    simulated = simulate(schedule.serialized(), COSTS).bubble
    assert simulated > 0.02
    assert sum(measured) / RANKS == pytest.approx(simulated, abs=WITHIN_POINTS)
    # A receive that has already arrived adds nothing, so that the agreement is in fact exact.
    assert sum(measured) / RANKS == pytest.approx(simulated, rel=1e-6)
    drawn = measured_step(timeline for _, timeline, _ in answers if timeline is not None)
    assert drawn is not None
    assert drawn.step == 7
    assert drawn.schedule.ranks == schedule.ranks
    assert drawn.timeline.bubble == pytest.approx(sum(measured) / RANKS, abs=WITHIN_POINTS)
    assert drawn.timeline.bubble == pytest.approx(simulated, abs=1e-4)


@pytest.mark.parametrize(("late", "after"), [(0.5, 0.0), (0.0, 0.5), (0.3, 0.2)])
def test_how_the_drawn_bubble_and_the_ranks_own_differ(pool: RankPool, late: float, after: float) -> None:
    """Both divide the same work. The picture divides it by the time from the first pass of any rank to the last one.

    A rank divides it by its own time: from where it begins the step to the step's result, without its own work between.
    """
    schedule = made("1f1b")
    run = small_run(pipeline=RANKS, micro_batches=MICRO_BATCHES, layers=8)
    answers = pool.run(times_on_the_clock, run, schedule, late, after)
    drawn = measured_step(timeline for _, timeline, _ in answers if timeline is not None)
    assert drawn is not None
    passed, ended = max(end for _, _, (end, _) in answers), answers[0][2][1]
    work = [times.compute for times, _, _ in answers]
    assert drawn.timeline.makespan == pytest.approx(passed, abs=1e-5), "rank 0 begins at 0"
    assert drawn.timeline.bubble == pytest.approx(1 - sum(work) / (RANKS * passed), abs=1e-5)
    for rank, (times, timeline, _) in enumerate(answers):
        assert timeline is not None
        assert drawn.timeline.busy(rank) == pytest.approx(times.compute, abs=1e-4)
        own = ended - late * rank - after * rank
        assert times.bubble == pytest.approx(1 - times.compute / own, abs=1e-9)


def slots_and_times(task: RankTask, slept: float) -> tuple[RankTimeline | None, StepTimes]:
    """The slots of a real step whose passes take time, and where this rank's time of the same step went."""
    with join_mesh(task) as mesh:
        training = Training(task.run, mesh)
        for stage in training.trainer.stages:
            stage.module.register_forward_pre_hook(lambda *_: time.sleep(slept))
            stage.module.register_full_backward_pre_hook(lambda *_: time.sleep(slept))
        training.step(1)
        recorder = training.trainer.slot_recorder
        update = training.trainer._update

        def checked(*args: Any, **more: Any) -> bool:
            assert recorder is None or not recorder.running, "ranks are together before the update, and not after it"
            return update(*args, **more)

        training.trainer._update = checked
        with timed_collectives(mesh) as clock:
            if recorder is not None:
                recorder.begin(2)
            training.step(2)
            times = step_times(clock.take(), checkpoint=0.0, stages=mesh.layout.pipeline)
        return (recorder.take() if recorder is not None else None), times


def test_the_slots_of_a_real_step_take_what_its_passes_take(pool: RankPool) -> None:
    run = small_run(pipeline=2, data=2, micro_batches=4)
    answers = pool.run(slots_and_times, run, 0.02)
    recorded = [(timeline, times) for timeline, times in answers if timeline is not None]
    assert [timeline.stage for timeline, _ in recorded] == [0, 1], "one pipeline of the job records"
    drawn = measured_step(timeline for timeline, _ in recorded)
    assert drawn is not None
    for rank, (_, times) in enumerate(recorded):
        # How closely slots and clock agree is for the tests on a virtual clock: a busy machine takes time between both.
        assert 0.16 <= drawn.timeline.busy(rank) <= times.compute + sum(times.waits.values())
        assert times.compute >= 0.16, "four forward and four backward passes of 0.02 s"


def test_the_simulated_bubble_is_that_of_the_runs_schedule() -> None:
    run = small_run(pipeline=2, micro_batches=4)
    assert simulated_bubble(run) == pytest.approx(1 / 5)
    assert simulated_bubble(small_run()) is None


def traced_steps(task: RankTask, late_rank: int, steps: int) -> tuple[dict[str, float], float]:
    """Seconds of waits by dimension as the clock has them, and all of them as a profiler's trace has them."""
    with join_mesh(task) as mesh:
        training = Training(task.run, mesh)
        if mesh.rank == late_rank:
            for stage in training.trainer.stages:
                stage.module.register_forward_pre_hook(lambda *_: time.sleep(LAG))
        training.step(1)
        waits: Counter[str] = Counter()
        with timed_collectives(mesh) as clock, profile(activities=[ProfilerActivity.CPU], with_stack=True) as trace:
            for number in range(2, steps + 2):
                training.step(number)
                waits.update(step_times(clock.take(), checkpoint=0.0, stages=1).waits)
        return dict(waits), _waits_in(trace)


def _waits_in(trace: profile) -> float:
    """Seconds in which this thread could not go on for a collective, from the calls that the profiler recorded.

    These are calls of a Work's `wait`, and the calls of torch's collectives that have one inside.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    calls = [
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") == "python_function"
    ]
    waits = sorted((began, ended) for began, ended, name in calls if name.startswith("<built-in method wait of"))
    collectives = [
        (began, ended) for began, ended, name in calls if "distributed_c10d.py" in name and name.endswith(COLLECTIVES)
    ]
    starts = [began for began, _ in waits]
    blocking = [
        (began, ended)
        for began, ended in collectives
        if (first := bisect_left(starts, began)) < len(waits) and waits[first][1] <= ended
    ]
    total, until = 0.0, 0.0
    for began, ended in sorted([*waits, *blocking]):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total / 1e6


LAYOUTS: dict[str, NativeRun] = {
    "tensor": small_run(tensor=2, micro_batches=2),
    "pipeline": small_run(pipeline=2, micro_batches=2),
    "ring": small_run(context=2, layers=1, micro_batches=2, method=ContextMethod.RING_ZIG_ZAG),
    "ulysses": small_run(context=2, layers=1, micro_batches=2, method=ContextMethod.ULYSSES),
    "data": small_run(data=2, micro_batches=2),
    "fsdp": small_run(data=2, layers=1, micro_batches=2, zero=3),
    "expert": small_run(data=2, expert=2, layers=1, micro_batches=2, mixture="Mixtral"),
}
DIMENSION = {"ring": "context", "ulysses": "context", "fsdp": "data"}


@pytest.mark.parametrize("name", mostly_long(LAYOUTS, lambda name: name not in ("ring", "data")))
def test_exposed_communication_is_that_of_a_trace(pool: RankPool, name: str) -> None:
    answers = pool.run(traced_steps, LAYOUTS[name], 1, 3)
    most = max(traced for _, traced in answers)
    for waits, traced in answers:
        assert sum(waits.values()) == pytest.approx(traced, abs=WITHIN * most)
    waits, _ = answers[0]
    own = DIMENSION.get(name, name)
    assert waits[own] == max(waits.values()), f"rank 0 waits for the late rank in its {own} group: {waits}"
    assert waits[own] > LAG


def waits_of_other_threads(task: RankTask) -> dict[str, float]:
    """The waits that a rank's clock has while its only communication is that of the thread that exchanges copies."""
    with join_mesh(task) as mesh:
        copier = Copier(HostCopies(), MemoryCopies(every_steps=1, shift=1), new_host_group(STEP_TIMEOUT, lazy=False))
        copier.take([torch.zeros(4)], TrainingState(step=1))
        with timed_collectives(mesh) as clock:
            copier.take([torch.zeros(4)], TrainingState(step=2))
            assert copier.thread is not None
            copier.thread.join()
            return step_times(clock.take(), checkpoint=0.0, stages=1).waits


def test_a_thread_that_exchanges_copies_does_not_count_as_a_wait_of_steps(pool: RankPool) -> None:
    assert pool.run(waits_of_other_threads, small_run(data=2)) == [{}, {}]


def waits_of_an_asynchronous_run(task: RankTask) -> dict[str, float]:
    """The waits of two steps in which an island takes its parameters from a server."""
    with join_mesh(task) as mesh:
        training = Training(task.run, mesh)
        training.trainer.on_parameters_loaded(0)
        with timed_collectives(mesh) as clock:
            for number in (1, 2):
                training.step(number)
            waits = step_times(clock.take(), checkpoint=0.0, stages=1).waits
        training.trainer.close()
        return waits


def test_threads_that_serve_parameters_do_not_count_as_waits_of_steps(pool: RankPool) -> None:
    outer = {"method": "AsyncSGD", "every_steps": 2, "staleness": 1}
    serving, asking = pool.run(waits_of_an_asynchronous_run, small_run(data=2, outer=outer))
    assert serving == {}, "the server's own rank asks nobody"
    assert asking["data"] > 0


def counted_training(task: RankTask) -> tuple[list[StepReport], int]:
    """The reports of a whole run, and the operations of this rank's matrix products as torch counts them."""
    recorder = Recorder()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        train(task, recorder)
    return recorder.reports, counter.get_total_flops()


@pytest.mark.parametrize(
    "name", mostly_long(["one", "tensor", "pipeline", "data"], lambda name: name in ("tensor", "pipeline"))
)
def test_utilization_is_that_of_torchs_count(pool: RankPool, text: Path, name: str) -> None:
    run = LAYOUTS[name] if name in LAYOUTS else small_run()
    run = run.model_copy(update={"training": run.training.model_copy(update={"steps": 3})})
    answers = pool.run(counted_training, run, data_dir=text)
    counted = sum(flops for _, flops in answers) / run.training.steps
    peak = 1e12
    report = replace(answers[0][0][-1], peak_flops=peak)
    metrics = WorkerMetrics("team-a", "job")
    metrics.step(0, report)
    exported = re.search(r"^ptj_mfu{.*} (.*)$", metrics.exposition().decode(), re.MULTILINE)
    assert exported is not None
    assert float(exported[1]) == pytest.approx(counted / (peak * report.seconds), rel=0.02)


def reports_of(task: RankTask) -> list[StepReport]:
    recorder = Recorder()
    train(task, recorder)
    return recorder.reports


@pytest.mark.parametrize("schedule", [PipelineSchedule.PIPEDREAM_2BW, PipelineSchedule.ZB_H1])
def test_reports_of_a_run_divide_its_steps_and_have_both_bubbles(
    pool: RankPool, text: Path, schedule: PipelineSchedule
) -> None:
    run = small_run(pipeline=2, micro_batches=4, clip=0.0, parallelism={"schedule": schedule})
    by_rank: list[list[StepReport]] = pool.run(reports_of, run, data_dir=text)
    for reports in by_rank:
        times = [report.times for report in reports if report.times is not None]
        assert len(times) == run.training.steps
        spent = sum(one.compute + one.update + sum(one.waits.values()) for one in times)
        assert 0 < spent <= sum(report.seconds for report in reports)
        assert all(one.bubble is None or 0 <= one.bubble < 1 for one in times)
        assert any(one.bubble for one in times)
    timelines = [report.timeline for reports in by_rank for report in reports if report.timeline is not None]
    drawn = measured_step(timelines)
    if schedule is PipelineSchedule.PIPEDREAM_2BW:
        assert drawn is None, "no step of it has slots of its own"
    else:
        assert drawn is not None
        assert drawn.step == 1 + FIRST
        assert 0 <= drawn.timeline.bubble < 1
    simulated = {report.simulated_bubble for report in by_rank[0]}
    assert simulated == {0.0 if schedule is PipelineSchedule.PIPEDREAM_2BW else simulated_bubble(run)}
    assert {report.simulated_bubble for report in by_rank[1]} == {None}, "rank 0 exports it for the job"
