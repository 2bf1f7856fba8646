"""Which tiers all ranks save after a step, from what rank 0 has said and what an evaluation has found."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from meshwright.api.checkpoint import Interval, Retention
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.schedule import BUSY
from meshwright_worker.checkpoint.store import Tier
from meshwright_worker.trainer.checkpoint_requests import CheckpointRequests
from meshwright_worker.trainer.trainer import StepResult
from tests.distributed.cases import Recorder
from tests.distributed.configs import small_run


def requests_of(root: Path, **layout: Any) -> CheckpointRequests:
    """Of a job whose volume is due every 10 steps, and its store every 20."""
    tiers = [
        Tier(CheckpointDirectory(root / str(steps)), Retention(1, best=1), Interval(steps=steps)) for steps in (10, 20)
    ]
    mesh = cast(Any, SimpleNamespace(rank=0, device=torch.device("cpu")))
    return CheckpointRequests(small_run(**layout), mesh, Recorder(), tiers)


def end(requests: CheckpointRequests, step: int, save: int = 0) -> None:
    requests.record([StepResult(step, 1.0, 1.0, 0.1, stop=False, save=save)])
    requests.end_step(step)


def test_the_best_is_saved_now_or_never(tmp_path: Path) -> None:
    requests = requests_of(tmp_path)
    end(requests, 3)
    requests.record_best([1])
    assert requests.due(3) == [1]
    assert requests.due(3) == [1], "again after a drain"
    end(requests, 4)
    assert requests.due(4) == [], "the parameters have changed"
    end(requests, 5)
    requests.record_best([0, 1])
    requests.answer(5)
    assert requests.due(5) == []


def test_a_save_in_progress_at_the_beginning_of_the_step_postpones_others_and_not_the_best(tmp_path: Path) -> None:
    """Rank 0 has waited for that save before it names the tiers of the best."""
    requests = requests_of(tmp_path)
    end(requests, 10, save=BUSY)
    assert requests.due(10) == []
    end(requests, 11, save=BUSY)
    requests.record_best([1])
    assert requests.due(11) == [0, 1], "what was postponed is saved with it"


def test_a_save_that_was_interrupted_is_made_up_after_the_next_step(tmp_path: Path) -> None:
    requests = requests_of(tmp_path)
    requests.postpone([1])
    end(requests, 23)
    assert requests.due(23) == [1]
    requests.answer(23)
    end(requests, 24)
    assert requests.due(24) == []


def test_islands_save_the_best_only_when_their_round_has_ended(tmp_path: Path) -> None:
    requests = requests_of(tmp_path, data=2, outer={"method": "DiLoCo", "every_steps": 4})
    end(requests, 3)
    requests.record_best([0])
    assert requests.due(3) == []
