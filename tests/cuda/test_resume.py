"""A run on a GPU that stops and resumes from a checkpoint repeats an uninterrupted one bit by bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.checkpoint import CheckpointSpec, Staging
from meshwright.api.precision import Precision
from meshwright_worker.rank.task import Outcome
from tests.distributed.cases import train_fully_staged
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_recovery import tensors_of

DEVICE = os.environ.get("MESHWRIGHT_TEST_DEVICE", "cuda")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, compiled": {"training": {"compile": True, "loss_chunk_tokens": 24}},
    "bf16 alone": {"training": {"master_weights": False}},
    "mixture": {"mixture": "DeepSeek-V3"},
    "ZeRO-3": {"data": 2, "zero": 3},
    "tensor, 1F1B": {"tensor": 2, "pipeline": 2},
}


@pytest.mark.parametrize("staging", Staging)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_repeats_the_uninterrupted_one(
    pool: RankPool, tmp_path: Path, text: Path, layout: str, staging: Staging
) -> None:
    run = small_run(precision=Precision.BF16, steps=6, every=2, keep=9, **LAYOUTS[layout])
    spec = CheckpointSpec.model_validate({**run.checkpoint.wire(), "staging": staging})  # type: ignore[union-attr]
    run = run.model_copy(update={"checkpoint": spec})

    def train(directory: str, stop_after: int | None = None) -> tuple[Outcome | None, int, list[float]]:
        root = tmp_path / directory
        (answer, *_) = pool.run(
            train_fully_staged, run, DEVICE, stop_after, checkpoint_dir=root, data_dir=text, timeout=300
        )
        told: tuple[Outcome | None, int, list[float]] = answer.value
        return told

    outcome, _, losses = train("whole")
    assert (outcome, len(losses)) == (Outcome.COMPLETE, 6)
    assert train("broken", 3)[0] is Outcome.STOPPED
    outcome, began, resumed = train("broken")
    assert (outcome, began) == (Outcome.COMPLETE, 3)
    assert [loss.hex() for loss in resumed] == [loss.hex() for loss in losses[3:]]
    want = tensors_of(tmp_path / "whole", 6)
    assert all(torch.equal(tensor, want[name]) for name, tensor in tensors_of(tmp_path / "broken", 6).items())
