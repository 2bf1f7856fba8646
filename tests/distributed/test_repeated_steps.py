"""Silent corruption: gradients that are computed again on another replica, with real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.training import AnomaliesSpec, AnomalyAction
from meshwright.protocol.messages import FailureKind
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.rank.task import Outcome
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.distributed.repeat_cases import train_with_a_wrong_rank, train_with_every_detection
from tests.distributed.test_recovery import tensors_of
from tests.tiers import mostly_long

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"data": 2},
    "dp4": {"data": 4},
    "zero1": {"data": 4, "zero": 1},
    "zero2-flat": {"data": 2, "zero": 2, "replicas": {"strategy": "ZeRO"}},
    "zero3": {"data": 4, "zero": 3},
    "tp": {"data": 2, "tensor": 2, "zero": 1},
    "pp": {"data": 2, "pipeline": 2, "zero": 3},
    "pp-split": {"data": 2, "pipeline": 2, "parallelism": {"schedule": "ZBH1"}},
    "cp": {"data": 2, "context": 2},
    "dropout": {"data": 2, "training": {"dropout": 0.1}},
    "zero3-2": {"data": 2, "zero": 3},
}


def repeating(layout: str, every: int | None = 2, **changes: Any) -> NativeRun:
    fields = {**LAYOUTS[layout], **changes}
    training = {**fields.pop("training", {}), "anomalies": AnomaliesSpec(repeat_every_steps=every)}
    return small_run(**fields, steps=6, every=6, training=training)


@pytest.mark.parametrize("layout", mostly_long(LAYOUTS, lambda layout: layout in ("dp2", "zero3-2")))
def test_a_healthy_run_repeats_and_is_unchanged(pool: RankPool, tmp_path: Path, text: Path, layout: str) -> None:
    for name, every in (("repeated", 2), ("straight", None)):
        answers = pool.run(
            train_with_a_wrong_rank, repeating(layout, every), None, 0, checkpoint_dir=tmp_path / name, data_dir=text
        )
        assert [(outcome, message) for outcome, message, _ in answers] == [(Outcome.COMPLETE, "")] * len(answers)
    want, got = tensors_of(tmp_path / "straight", 6), tensors_of(tmp_path / "repeated", 6)
    assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize("layout", mostly_long(LAYOUTS, lambda layout: layout in ("dp2", "dp4")))
def test_one_wrong_bit_of_one_rank_is_found(pool: RankPool, tmp_path: Path, text: Path, layout: str) -> None:
    run = repeating(layout)
    answers = pool.run(
        train_with_a_wrong_rank, run, run.layout.world_size - 1, 2, checkpoint_dir=tmp_path, data_dir=text
    )
    replicas = run.layout.data
    for rank, (kind, message, recorder) in enumerate(answers):
        assert [report.step for report in recorder.reports][-1:] in ([3], [5])
        assert "the gradients of the same samples differ between replicas" in message
        if replicas < 3:
            assert kind is FailureKind.ERROR
        else:
            assert kind is (FailureKind.NODE_FAULT if rank == len(answers) - 1 else FailureKind.PEER_LOST)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_found_in_a_healthy_run(pool: RankPool, tmp_path: Path, text: Path, seed: int) -> None:
    """With every detection that ranks have: a check of the nodes, spikes, repeated steps."""
    layout = list(LAYOUTS)[seed % len(LAYOUTS)]
    spec = AnomaliesSpec(spike=AnomalyAction.FAIL, window=16, repeat_every_steps=5)
    fields = {**LAYOUTS[layout], "steps": 40, "every": 40, "seed": seed}
    run = small_run(**fields | {"training": {**fields.get("training", {}), "anomalies": spec}})
    answers = pool.run(train_with_every_detection, run, checkpoint_dir=tmp_path, data_dir=text)
    assert [(outcome, message) for outcome, message, _ in answers] == [(Outcome.COMPLETE, "")] * len(answers)
    assert not any(report.skipped for _, _, recorder in answers for report in recorder.reports)
