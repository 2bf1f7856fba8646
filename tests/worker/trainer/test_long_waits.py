"""Evaluations and saves that take long: they are no hang, and the first evaluation may compile."""

from __future__ import annotations

import threading
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.api.training import EvaluationSpec
from meshwright_worker.checkpoint.manager import CheckpointManager
from meshwright_worker.distributed.mesh import STEP_TIMEOUT
from meshwright_worker.in_memory.gate import MemoryGate
from meshwright_worker.in_memory.generation import EventsOfGeneration
from meshwright_worker.trainer import training_loop
from meshwright_worker.trainer.evaluation import Evaluation
from meshwright_worker.trainer.long_waits import telling_at_work
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
    monkeypatch.setattr(training_loop, "telling_at_work", partial(telling_at_work, seconds=0.01))
    loop: Any = SimpleNamespace(_trainer=None, _mesh=None, _has_evaluated=False, _tell_at_work=None, _events=events)

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
    events = EventsOfGeneration(SimpleNamespace(at_work=lambda: told.append(1)), gate)  # type: ignore[arg-type]
    events.at_work()
    gate.leave()
    events.at_work()
    assert told == [1]


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
