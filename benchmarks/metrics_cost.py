"""What the metrics of ranks cost: CPU time of the instrumentation against that of a step, with 8 ranks.

The job is that of `make demo`: TP 2 x PP 2 x DP 2, one process for each rank. Baseline in the same run: the same steps
without the clock, in turns with it, and twice, so that the difference of the two baselines shows the noise. That is as
large as the cost, so the cost is also counted: the waits that the clock times in a step, times the thread CPU time of
one, and what times and peaks add to a step's report, and in every 50th step the timeline of its slots. A rank that has
waited continues with cold caches. So each time is taken after other memory was read, which makes it an upper bound. The
agent's time, in another process, is what it takes to read a report and to update its metrics, which it does for
several steps at once. The run fails if the counted cost of a rank and of its agent is more than 1% of the rank's step.

    python -m benchmarks.metrics_cost [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist
import yaml

from benchmarks._circumstances import circumstances
from benchmarks._ranks import on_ranks
from benchmarks._report import table, write_json
from meshwright.api.parsing import parse_spec
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.plan import make_plan
from meshwright.protocol.run_config import NativeRun
from meshwright.schedules.actions import Action, ActionKind
from meshwright_worker.agent.metrics import MAX_PENDING, WorkerMetrics
from meshwright_worker.data.batch import Batch
from meshwright_worker.distributed.mesh import DATA, Mesh, join_mesh
from meshwright_worker.distributed.step_clock import HostClock, StepClock
from meshwright_worker.distributed.timed_collectives import DIMENSIONS, GroupDimensions, timed_collectives
from meshwright_worker.memory.peaks import memory_peaks
from meshwright_worker.parallel.pipeline.slot_times import EVERY
from meshwright_worker.rank.messages import StepDone, decode, encode
from meshwright_worker.rank.task import RankTask, StepReport
from meshwright_worker.trainer.async_pipeline_trainer import AsyncPipelineTrainer
from meshwright_worker.trainer.step_times import step_times
from meshwright_worker.trainer.train import build_trainer
from meshwright_worker.trainer.trainer import Trainer

LIMIT = 0.01
"""Part of a step's thread CPU time that metrics may take."""
MANIFEST = Path(__file__).parents[1] / "cli" / "meshwright_cli" / "demo" / "stdlib-lm.yaml"
SLOTS = 4
"""Slots of a step of the demo's job: 2 micro-batches, forward and backward."""
OTHER_BYTES = 64 << 20
"""Memory that is read before each call that is timed: more than the caches hold."""
BARE = StepReport(3, 2.5, 1.0, 1e-3, 4096, 96, 0.5, 0.01, 1e10, 1e10, None)
"""A report without what this benchmark measures."""


@dataclass(frozen=True)
class RankCost:
    """One rank's thread CPU seconds."""

    step: float
    """Of a step without the clock."""
    timed_step: float
    """Of a step with it."""
    waits: int
    """Waits that the clock times in a step."""
    wait: float
    """Of the clock for one wait."""
    noise: float
    """Of every second step without the clock, minus that of the others."""
    report: float
    """Of a step's report, beyond one without times and peaks."""
    timeline: float
    """Of the timeline of slots in a step that has one, divided by the steps from one to the next."""
    agent: float
    """Of the agent for that report."""

    @property
    def rank_share(self) -> float:
        """The rank's instrumentation, as a part of its step."""
        return (self.waits * self.wait + self.report + self.timeline) / self.step

    @property
    def agent_share(self) -> float:
        """The agent's, as a part of the rank's step."""
        return self.agent / self.step

    @property
    def share(self) -> float:
        """Both together."""
        return self.rank_share + self.agent_share


def demo_run() -> NativeRun:
    """The run of the demo's job."""
    job = next(one for one in yaml.safe_load_all(MANIFEST.read_text()) if one["kind"] == "ParallelTrainingJob")
    spec = parse_spec(job)
    run = make_plan(spec, Inventory()).run_config(spec)
    assert isinstance(run, NativeRun)
    return run


def cost_on_rank(task: RankTask[NativeRun], steps: int, repeats: int) -> RankCost:
    """Train in turns with and without the clock, and count."""
    torch.set_num_threads(1)
    run = task.run
    with join_mesh(task) as mesh:
        trainer = build_trainer(run, mesh)
        rows = run.training.global_batch_size // mesh.layout.data
        generator = torch.Generator().manual_seed(mesh.coordinates.data)
        shape = rows, run.training.sequence_length + 1
        batch = Batch.of(torch.randint(0, run.architecture.vocab_size, shape, generator=generator))
        trainer.step(1, batch)
        waits = _waits_of(lambda: trainer.step(2, batch), mesh)
        spent: dict[bool, list[float]] = {False: [], True: []}
        dimensions = GroupDimensions(mesh)
        for number in range(3, 3 * steps + 6):
            timed = number % 3 == 0
            with timed_collectives(mesh, dimensions) if timed else nullcontext():
                dist.barrier()
                began = time.thread_time()
                trainer.step(number, batch)
                # The first step of each kind finds out which group is of which dimension, as a run does once.
                spent[timed] += [time.thread_time() - began] if number > 5 else []
        with timed_collectives(mesh) as clock:
            trainer.step(3 * steps + 6, batch)
            times = step_times(clock.take(), checkpoint=0.0, stages=mesh.layout.pipeline)
            full = replace(BARE, times=times, memory=memory_peaks(mesh.device), simulated_bubble=0.2)
            return RankCost(
                step=median(spent[False]),
                timed_step=median(spent[True]),
                noise=median(spent[False][1::2]) - median(spent[False][::2]),
                waits=waits,
                wait=_cost_of_a_wait(mesh, repeats),
                report=_report_cost(clock, mesh, full, repeats),
                timeline=_timeline_cost(trainer, full, repeats),
                agent=_agent_cost(full, repeats),
            )


def _waits_of(step: Callable[[], object], mesh: Mesh) -> int:
    """The number of waits that a clock times in a step: every entry of its log that is not a phase."""
    with timed_collectives(mesh) as clock:
        step()
        assert isinstance(clock, HostClock)
        return sum(dimension in DIMENSIONS for dimension, _, _ in clock._log)


def _thread_seconds(work: Callable[[], object], repeats: int) -> float:
    """Median thread CPU time of one call with cold caches."""
    other = torch.zeros(OTHER_BYTES // 4)
    found = []
    for _ in range(repeats):
        other.add_(1.0)
        began = time.thread_time_ns()
        work()
        found.append(time.thread_time_ns() - began)
    return median(found) / 1e9


def _cost_of_a_wait(mesh: Mesh, repeats: int) -> float:
    """The clock's part of a collective, measured with one that does nothing."""
    group = mesh.group(DATA)
    original, dist.all_reduce = dist.all_reduce, _Nothing()
    try:
        plain = _thread_seconds(lambda: dist.all_reduce(None, group=group), repeats)
        with timed_collectives(mesh):
            timed = _thread_seconds(lambda: dist.all_reduce(None, group=group), repeats)
    finally:
        dist.all_reduce = original
    return max(0.0, timed - plain)


class _Nothing:
    """Stands for a collective: only the call itself takes time."""

    __name__ = "all_reduce"

    def __call__(self, tensor: object, group: object = None) -> None:
        """Do nothing."""


def _report_cost(clock: StepClock, mesh: Mesh, full: StepReport, repeats: int) -> float:
    """What a rank does at the end of a step for what the clock has measured."""

    def with_times() -> bytes:
        taken = step_times(clock.take(), checkpoint=0.0, stages=mesh.layout.pipeline)
        return encode(StepDone(replace(full, times=full.times or taken, memory=memory_peaks(mesh.device))))

    return max(0.0, _thread_seconds(with_times, repeats) - _thread_seconds(lambda: encode(StepDone(BARE)), repeats))


def _agent_cost(report: StepReport, repeats: int) -> float:
    """What the agent does with a rank's report."""
    metrics, line = WorkerMetrics("default", "job"), encode(StepDone(report))
    metrics.generation(1, [0, 1], restart=False)

    def handle() -> None:
        message = decode(line)
        assert isinstance(message, StepDone)
        metrics.step(0, message.report)

    def handle_several() -> None:
        for _ in range(MAX_PENDING):
            handle()

    # The median call only remembers its report; that of several updates the series once.
    return _thread_seconds(handle, repeats) + _thread_seconds(handle_several, repeats // 10) / MAX_PENDING


def _timeline_cost(trainer: Trainer | AsyncPipelineTrainer, full: StepReport, repeats: int) -> float:
    """What a rank does for its timeline in a step that has one, over the steps from one to the next."""
    recorder, slots = trainer.slot_recorder, (Action(ActionKind.FORWARD, 0, 0),)
    if recorder is None:
        return 0.0

    def recorded() -> bytes:
        recorder.begin(3)
        for _ in range(SLOTS):
            recorder.begin_slot(slots)
            recorder.wait(_nothing)
            recorder.end_slot()
        recorder.end()
        return encode(StepDone(replace(full, timeline=recorder.take())))

    plain = _thread_seconds(lambda: encode(StepDone(full)), repeats)
    return max(0.0, _thread_seconds(recorded, repeats) - plain) / EVERY


def _nothing() -> None:
    """Stands for a receive."""


def main() -> None:
    """Runs it; exit status 1 if the metrics of any rank take more than `LIMIT` of its step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the same numbers")
    parser.add_argument("--quick", action="store_true", help="3 steps of each kind instead of 30")
    args = parser.parse_args()
    steps, repeats = (3, 100) if args.quick else (30, 500)
    costs: list[RankCost] = on_ranks(cost_on_rank, demo_run(), steps, repeats)
    _print_table(costs)
    worst = max(cost.share for cost in costs)
    difference = fmean(cost.timed_step / cost.step - 1 for cost in costs)
    noise = fmean(cost.noise / cost.step for cost in costs)
    agents = max(cost.agent_share for cost in costs)
    print(f"counted: at most {worst:.2%} of a rank's step, at most {agents:.2%} of it in the agent")
    print(f"steps with the clock differ by {difference:+.1%}; those without it by {noise:+.1%} from each other")
    results = {
        str(rank): {**vars(cost), "rank share": cost.rank_share, "agent share": cost.agent_share, "share": cost.share}
        for rank, cost in enumerate(costs)
    }
    write_json(
        args.json,
        {
            "circumstances": circumstances("cpu"),
            "worst": worst,
            "difference": difference,
            "noise": noise,
            "results": results,
        },
    )
    if worst > LIMIT:
        print(f"more than {LIMIT:.0%}")
        sys.exit(1)


def _print_table(costs: Sequence[RankCost]) -> None:
    columns = ["rank", "step ms", "with clock ms", "waits", "µs each", "report µs", "rank", "agent µs", "agent", "both"]
    shown = [
        [
            str(rank),
            f"{1e3 * cost.step:.1f}",
            f"{1e3 * cost.timed_step:.1f}",
            cost.waits,
            f"{1e6 * cost.wait:.2f}",
            f"{1e6 * cost.report:.0f}",
            f"{cost.rank_share:.2%}",
            f"{1e6 * cost.agent:.0f}",
            f"{cost.agent_share:.2%}",
            f"{cost.share:.2%}",
        ]
        for rank, cost in enumerate(costs)
    ]
    table("Thread CPU time of a step and of its metrics, TP 2 x PP 2 x DP 2", columns, shown)


if __name__ == "__main__":
    main()
