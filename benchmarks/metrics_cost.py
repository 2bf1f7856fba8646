"""What the metrics of ranks cost: CPU time of the instrumentation against that of a step, with 8 ranks.

The job is that of `make demo`: TP 2 x PP 2 x DP 2, one process for each rank. Baseline in the same run: the same steps
without the clock, in turns with it. The difference of two noisy steps says little, so the cost is counted: the blocks
that the clock opens in a step, times the thread CPU time of one, and that of a step's report. The agent's part is what
it takes to read the report and to update all metrics of the rank. The run fails if both together take more than 1 % of
a rank's step.

    python -m benchmarks.metrics_cost [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

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
from meshwright_worker.agent.metrics import WorkerMetrics
from meshwright_worker.data.batch import Batch
from meshwright_worker.distributed.mesh import DATA, Mesh, join_mesh
from meshwright_worker.distributed.step_clock import HostClock, StepClock, waiting_in
from meshwright_worker.distributed.timed_collectives import GroupDimensions, timed_collectives
from meshwright_worker.memory.peaks import memory_peaks
from meshwright_worker.rank.messages import StepDone, decode, encode
from meshwright_worker.rank.task import RankTask, StepReport
from meshwright_worker.trainer.step_times import step_times
from meshwright_worker.trainer.train import build_trainer

LIMIT = 0.01
"""Part of a step's thread CPU time that metrics may take."""
MANIFEST = Path(__file__).parents[1] / "cli" / "meshwright_cli" / "demo" / "stdlib-lm.yaml"
BARE = StepReport(3, 2.5, 1.0, 1e-3, 4096, 96, 0.5, 0.01, 1e10, 1e10, None)
"""A report without what this benchmark measures."""


@dataclass(frozen=True)
class RankCost:
    """One rank's thread CPU seconds."""

    step: float
    """Of a step without the clock."""
    timed_step: float
    """Of a step with it."""
    blocks: int
    """Blocks that the clock opens in a step."""
    block: float
    """Of one block."""
    report: float
    """Of a step's report."""
    agent: float
    """Of the agent for that report."""

    @property
    def rank_share(self) -> float:
        """The rank's instrumentation, as a part of its step."""
        return (self.blocks * self.block + self.report) / self.step

    @property
    def agent_share(self) -> float:
        """The agent's, as a part of the rank's step."""
        return self.agent / self.step


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
        with timed_collectives(mesh):
            blocks = _blocks_of(lambda: trainer.step(2, batch))
        spent: dict[bool, list[float]] = {False: [], True: []}
        dimensions = GroupDimensions(mesh)
        for number in range(3, 2 * steps + 5):
            timed = bool(number % 2)
            with timed_collectives(mesh, dimensions) if timed else nullcontext():
                dist.barrier()
                began = time.thread_time()
                trainer.step(number, batch)
                # The first step of each kind finds out which group is of which dimension, as a run does once.
                spent[timed] += [time.thread_time() - began] if number > 4 else []
        with timed_collectives(mesh) as clock:
            trainer.step(2 * steps + 5, batch)
            times = step_times(clock.take(), checkpoint=0.0, stages=mesh.layout.pipeline)
            full = replace(BARE, times=times, memory=memory_peaks(mesh.device), simulated_bubble=0.2)
            return RankCost(
                step=median(spent[False]),
                timed_step=median(spent[True]),
                blocks=blocks,
                block=_cost_of_a_block(mesh, repeats),
                report=_report_cost(clock, mesh, full, repeats),
                agent=_agent_cost(full, repeats),
            )


def _blocks_of(step: Callable[[], object]) -> int:
    """The number of blocks that the current clock opens in a step."""
    opened = HostClock.open
    count = 0

    def counted(clock: HostClock, phase: str | None, dimension: str = "") -> None:
        nonlocal count
        count += 1
        opened(clock, phase, dimension)

    HostClock.open = counted  # type: ignore[method-assign]
    try:
        step()
    finally:
        HostClock.open = opened  # type: ignore[method-assign]
    return count


def _thread_seconds(work: Callable[[], object], repeats: int) -> float:
    """Thread CPU time of one call: the smallest mean of several rounds."""
    found = []
    for _ in range(5):
        began = time.thread_time()
        for _ in range(repeats):
            work()
        found.append((time.thread_time() - began) / repeats)
    return min(found)


def _cost_of_a_block(mesh: Mesh, repeats: int) -> float:
    """The clock's part of a collective, measured with one that does nothing."""
    group = mesh.group(DATA)
    original, dist.all_reduce = dist.all_reduce, _Nothing()
    try:
        plain = _thread_seconds(lambda: dist.all_reduce(None, group=group), repeats)
        with timed_collectives(mesh):
            timed = _thread_seconds(lambda: dist.all_reduce(None, group=group), repeats)
            awaited = _thread_seconds(lambda: _wait(group), repeats)
    finally:
        dist.all_reduce = original
    return max(timed - plain, awaited)


def _wait(group: dist.ProcessGroup) -> None:
    with waiting_in(group):
        pass


class _Nothing:
    """Stands for a collective: only the call itself takes time."""

    __name__ = "all_reduce"

    def __call__(self, tensor: object, group: object = None) -> None:
        """Do nothing."""


def _report_cost(clock: StepClock, mesh: Mesh, full: StepReport, repeats: int) -> float:
    """What a rank does for metrics at the end of a step."""

    def with_times() -> bytes:
        taken = step_times(clock.take(), checkpoint=0.0, stages=mesh.layout.pipeline)
        return encode(StepDone(replace(full, times=full.times or taken, memory=memory_peaks(mesh.device))))

    return _thread_seconds(with_times, repeats)


def _agent_cost(report: StepReport, repeats: int) -> float:
    """What the agent does with a rank's report."""
    metrics, line = WorkerMetrics("default", "job"), encode(StepDone(report))
    metrics.generation(1, [0, 1], restart=False)

    def handle() -> None:
        message = decode(line)
        assert isinstance(message, StepDone)
        metrics.step(0, message.report)

    return _thread_seconds(handle, repeats)


def main() -> None:
    """Runs it; exit status 1 if the metrics of any rank take more than `LIMIT` of its step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the same numbers")
    parser.add_argument("--quick", action="store_true", help="3 steps of each kind instead of 30")
    args = parser.parse_args()
    steps, repeats = (3, 500) if args.quick else (30, 5000)
    costs: list[RankCost] = on_ranks(cost_on_rank, demo_run(), steps, repeats)
    columns = ["rank", "step ms", "with clock ms", "blocks", "µs each", "report µs", "rank", "agent µs", "agent"]
    shown = [
        [
            str(rank),
            f"{1e3 * cost.step:.1f}",
            f"{1e3 * cost.timed_step:.1f}",
            cost.blocks,
            f"{1e6 * cost.block:.2f}",
            f"{1e6 * cost.report:.0f}",
            f"{cost.rank_share:.2%}",
            f"{1e6 * cost.agent:.0f}",
            f"{cost.agent_share:.2%}",
        ]
        for rank, cost in enumerate(costs)
    ]
    table("Thread CPU time of a step and of its metrics, TP 2 x PP 2 x DP 2", columns, shown)
    worst = max(cost.rank_share + cost.agent_share for cost in costs)
    difference = median(cost.timed_step for cost in costs) / median(cost.step for cost in costs) - 1
    print(f"metrics take at most {worst:.2%} of a rank's step; steps with the clock differ by {difference:+.1%}")
    results = {
        str(rank): {**vars(cost), "rank share": cost.rank_share, "agent share": cost.agent_share}
        for rank, cost in enumerate(costs)
    }
    write_json(args.json, {"circumstances": circumstances("cpu"), "worst": worst, "results": results})
    if worst > LIMIT:
        print(f"more than {LIMIT:.0%}")
        sys.exit(1)


if __name__ == "__main__":
    main()
