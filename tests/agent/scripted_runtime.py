"""A training loop that does what `task.data_dir` says: what a real one does only by accident, on demand."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time

from meshwright.protocol.run_config import NativeRun
from meshwright_worker.rank.task import Outcome, RankEvents, RankTask, StepReport

PRELOADED_BY: list[int] = []
COLLECTED_IN_PRELOAD: list[bool] = []
PRELOADED_FOR: list[tuple[int, int]] = []
"""The process that preloaded for a run, and the run's steps."""


def preload() -> None:
    PRELOADED_BY.append(os.getpid())
    COLLECTED_IN_PRELOAD.append(gc.isenabled())


def preload_for(run: NativeRun) -> None:
    PRELOADED_FOR.append((os.getpid(), run.training.steps))


def train(task: RankTask, events: RankEvents) -> Outcome:
    what = task.data_dir
    if what == "complete":
        events.phase("load", 0.25)
        events.running(0)
        for step in range(1, 201):
            events.step(StepReport(step, 1.0, 1.0, 1e-3, 10, step, 0.01, 0.0))
        print("printed by", os.environ["RANK"], "preloaded by parent", [os.getppid()] == PRELOADED_BY)
        return Outcome.COMPLETE
    if what == "preloaded-for":
        print("preloaded for", [(process == os.getppid(), steps) for process, steps in PRELOADED_FOR])
        return Outcome.COMPLETE
    if what == "garbage":
        print(
            "collected: in preload",
            *COLLECTED_IN_PRELOAD,
            "in rank",
            gc.isenabled(),
            "frozen",
            gc.get_freeze_count() > 0,
        )
        return Outcome.COMPLETE
    if what == "raise":
        raise LookupError("no such weight")
    if what == "base-exception":
        raise KeyboardInterrupt
    if what == "exit":
        os._exit(0)
    if what == "leave-a-child":
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid, flush=True)
        return Outcome.COMPLETE
    events.running(0)
    while not events.stop_requested():
        time.sleep(0.01)
    return Outcome.STOPPED
