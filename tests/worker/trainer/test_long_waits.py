"""Loads, compilations, evaluations and saves that take long: they are no hang."""

from __future__ import annotations

import threading
import zlib
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.api.training import EvaluationSpec
from meshwright_worker.checkpoint import safetensors_format
from meshwright_worker.checkpoint.files import LocalFiles
from meshwright_worker.checkpoint.manager import CheckpointManager
from meshwright_worker.checkpoint.manifest import FileRecord, check_file
from meshwright_worker.checkpoint.store import object_files
from meshwright_worker.distributed.mesh import STEP_TIMEOUT
from meshwright_worker.in_memory.gate import MemoryGate
from meshwright_worker.in_memory.generation import EventsOfGeneration
from meshwright_worker.rank import task
from meshwright_worker.rank.task import WorkProgress, progress_of
from meshwright_worker.trainer import training_loop
from meshwright_worker.trainer.evaluation import Evaluation
from meshwright_worker.trainer.initial_state import load_state
from meshwright_worker.trainer.long_waits import reporting_compilation, reporting_work
from meshwright_worker.trainer.train import build_trainer
from meshwright_worker.trainer.training_loop import TrainingLoop
from tests.distributed.configs import small_run
from tests.patience import LEAST_SECONDS
from tests.worker.simulated import simulated_mesh


def test_the_first_evaluation_has_the_limit_of_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stages compile one after the other."""
    order: list[Any] = []
    monkeypatch.setattr(training_loop, "set_collective_timeout", order.append)
    told = threading.Event()
    events = SimpleNamespace(at_work=told.set)
    monkeypatch.setattr(training_loop, "reporting_work", partial(reporting_work, seconds=0.01))
    unused = {"_trainer": None, "_mesh": None, "_tell_at_work": None, "_checkpoint_manager": None}
    loop: Any = SimpleNamespace(_has_evaluated=False, _events=events, **unused)

    def loss(trainer: Any, mesh: Any, tell: Any = "first") -> float:
        order.append("evaluation")
        assert tell is None or told.wait(LEAST_SECONDS), "it says that it is at work while its first batch compiles"
        return 2.5

    evaluation: Any = SimpleNamespace(loss=loss)
    assert [TrainingLoop._evaluate(loop, evaluation) for _ in range(2)] == [2.5, 2.5]
    assert order == [timedelta(minutes=30), "evaluation", STEP_TIMEOUT, "evaluation"]
    assert "at work" not in {thread.name for thread in threading.enumerate()}


def test_a_rank_that_has_left_its_generation_tells_nothing_more() -> None:
    told: list[int] = []
    gate = MemoryGate()
    events = EventsOfGeneration(SimpleNamespace(at_work=lambda work: told.append(1)), gate)  # type: ignore[arg-type]
    events.at_work()
    gate.leave()
    events.at_work()
    assert told == [1]


def test_long_work_in_parts_tells_every_twenty_seconds() -> None:
    told, now = [], [0.0]
    progress = progress_of(SimpleNamespace(at_work=lambda: told.append(now[0])), lambda: now[0])  # type: ignore[arg-type]
    for now[0] in (1.0, 19.9, 20.0, 21.0, 39.9, 100.0, 101.0):
        progress()
    assert told == [20.0, 100.0]


@pytest.mark.parametrize("compiles", [True, False])
def test_each_graph_that_is_compiled_tells_that_the_first_step_goes_on(compiles: bool) -> None:
    told: list[int] = []
    events: Any = SimpleNamespace(at_work=lambda: told.append(1))
    graphs = [torch.compile(lambda x, n=n: x * n, backend="eager", dynamic=False) for n in range(3)]
    with reporting_compilation(events, compiles=compiles):
        for graph in graphs[:2]:
            graph(torch.ones(2))
            graph(torch.ones(2))
    assert len(told) == (4 if compiles else 0), "at the begin and the end of each, and not when one is used again"
    graphs[2](torch.ones(2))
    assert len(told) == (4 if compiles else 0)


def test_each_part_of_a_load_tells_that_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that takes longer than the limit of a start was killed as a hang, after each restart again."""
    monkeypatch.setattr(task, "AT_WORK_SECONDS", 0.0)
    monkeypatch.setattr(safetensors_format, "_BLOCK", 16)
    run, told = small_run(), []
    events: Any = SimpleNamespace(at_work=lambda work=None: told.append(work))
    with simulated_mesh(run, 0) as mesh:
        trainer = build_trainer(run, mesh, draw=False)
        load_state(trainer, run, mesh, None, WorkProgress(events))
        assert len(told) == len(trainer.shards), "each parameter that is drawn"
    file = tmp_path / "file"
    file.write_bytes(b"x" * 40)
    sizes: list[int] = []
    record = FileRecord(size=40, crc32=zlib.crc32(b"x" * 40))
    for files in (LocalFiles(tmp_path), object_files(f"file://{tmp_path}")):
        check_file(files, "file", record, sizes.append)  # type: ignore[arg-type]
    assert sizes == [16, 16, 8, 40], "each block of a file, and each request to a store"


def test_an_evaluation_tells_after_each_batch_that_it_goes_on() -> None:
    """A rank that reports nothing for minutes counts as hanging."""
    run, told = small_run(), []
    evaluation = object.__new__(Evaluation)
    evaluation._spec, evaluation._training, evaluation._data = EvaluationSpec(samples=20), run.training, run.data
    rows: Any = SimpleNamespace(rows=lambda numbers: torch.zeros(len(numbers), 17, dtype=torch.int64), separator=0)
    evaluation._stream = rows
    trainer: Any = SimpleNamespace(evaluate=lambda batches: float(len(list(batches))))
    with simulated_mesh(run, 0) as mesh:
        assert evaluation.loss(trainer, mesh, lambda: told.append(1)) == 3.0
    assert len(told) == 2


def test_a_rank_that_waits_for_a_slow_save_says_that_it_is_at_work() -> None:
    """A last save of more than five minutes was taken for a hang, after each restart again."""
    order: list[str] = []
    ended = iter([False, False, True])
    saver = SimpleNamespace(
        wait=lambda seconds: order.append("waited") or next(ended),
        take_outcomes=lambda wait: order.append("outcomes") or ([], []),
    )
    manager: Any = SimpleNamespace(_saver=saver, _events=SimpleNamespace(at_work=lambda: order.append("at work")))
    assert CheckpointManager.report(manager) == []
    assert CheckpointManager.report(manager, wait=True) == []
    assert order == ["outcomes", "waited", "at work", "waited", "at work", "waited", "outcomes"]
