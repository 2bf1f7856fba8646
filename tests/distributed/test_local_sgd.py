"""Islands that train apart, as processes that communicate, against the same written out in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.data import DataFormat, DataSpec, Packing
from meshwright.api.precision import Precision
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.full_tensors import find_checkpoint
from meshwright_worker.data.batch import IGNORED, make_batch
from meshwright_worker.data.mixture import open_stream
from meshwright_worker.inference.model import load_full_model
from meshwright_worker.rank.task import Outcome, RankTask
from meshwright_worker.trainer import train as training_loop
from tests.distributed.cases import Recorder, train_fully
from tests.distributed.configs import small_run
from tests.distributed.local_sgd_cases import (
    Island,
    Parameters,
    replay,
    simulate_rounds,
    train_a_round_more,
    train_islands,
    train_with_a_late_rank,
)
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_recovery import losses, tensors_of
from tests.tiers import mostly_long

STEPS, EVERY, BATCH = 5, 2, 8
EXACT: dict[str, Any] = {"precision": Precision.FP64, "steps": STEPS, "every": 2, "micro_batches": 2}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "two": (2, {"data": 2}),
    "four": (4, {"data": 4, "micro_batches": 1}),
    "tensor": (2, {"data": 2, "tensor": 2}),
    "pipeline": (2, {"data": 2, "pipeline": 2}),
    "replicas in an island": (2, {"data": 4}),
    "ZeRO-1 in an island": (2, {"data": 4, "zero": 1}),
    "ZeRO-3 in an island": (2, {"data": 4, "zero": 3}),
}


def check_same(ranks: list[Island], want: Parameters) -> None:
    assert set().union(*(rank.parameters for rank in ranks)) == set(want)
    for rank in ranks:
        for name, value in rank.parameters.items():
            torch.testing.assert_close(value, want[name], rtol=0, atol=1e-10)


def alone(islands: int, layout: dict[str, Any]) -> Any:
    micro_batches = layout.get("micro_batches", 2)
    return small_run(**{**EXACT, "micro_batches": micro_batches}, batch=BATCH // islands)


@pytest.mark.long  # the parity matrix has DiLoCo always
@pytest.mark.parametrize("name", LAYOUTS)
def test_diloco_takes_a_nesterov_step_on_the_mean_change(pool: RankPool, name: str) -> None:
    islands, layout = LAYOUTS[name]
    outer = {"method": "DiLoCo", "islands": islands, "every_steps": EVERY, "learning_rate": 0.6, "momentum": 0.8}
    ranks = pool.run(train_islands, small_run(**{**EXACT, **layout}, outer=outer), timeout=240)
    arguments = (islands, EVERY, (0.6, 0.8), [1 / islands] * islands)
    (want,) = pool.run(simulate_rounds, alone(islands, layout), *arguments, timeout=240)
    check_same(ranks, want)


@pytest.mark.parametrize(
    "name", mostly_long(["two", "tensor", "ZeRO-1 in an island"], lambda name: name not in ("two", "tensor"))
)
def test_local_sgd_averages_parameters(pool: RankPool, name: str) -> None:
    islands, layout = LAYOUTS[name]
    outer = {"method": "LocalSGD", "islands": islands, "every_steps": EVERY}
    ranks = pool.run(train_islands, small_run(**{**EXACT, **layout}, outer=outer), timeout=240)
    arguments = (islands, EVERY, None, [1 / islands] * islands)
    (want,) = pool.run(simulate_rounds, alone(islands, layout), *arguments, timeout=240)
    check_same(ranks, want)
    assert ranks[0].losses != ranks[-1].losses


@pytest.mark.long  # as the parity matrix does
def test_federated_averaging_weighs_islands_by_their_samples(pool: RankPool) -> None:
    sizes = [30, 10]
    outer = {"method": "FedAvg", "every_steps": EVERY}
    ranks = pool.run(train_islands, small_run(**EXACT, data=2, outer=outer), sizes, timeout=240)
    (want,) = pool.run(simulate_rounds, alone(2, {}), 2, EVERY, None, [0.75, 0.25], timeout=240)
    check_same(ranks, want)


@pytest.mark.parametrize(
    ("islands", "bound", "layout"),
    mostly_long(
        [(2, 1, {"data": 2}), (2, 0, {"data": 2}), (4, 2, {"data": 4}), (2, 1, {"data": 2, "tensor": 2})],
        lambda case: "tensor" in case[2],
    ),
    ids=str,
)
def test_asynchronous_updates_are_those_of_the_recorded_order(
    pool: RankPool, islands: int, bound: int, layout: dict[str, Any]
) -> None:
    outer = {"method": "AsyncSGD", "every_steps": EVERY, "staleness": bound}
    options = {**EXACT, "micro_batches": 1}
    ranks = pool.run(train_islands, small_run(**{**options, **layout}, outer=outer), timeout=240)
    events = ranks[0].events
    writes = [event for event in events if event.kind == "write"]
    assert len(writes) == islands * STEPS
    assert max(event.staleness for event in writes) <= bound
    # Every part of the parameters saw the same order.
    for rank in ranks:
        if rank.island == 0:
            assert [(e.kind, e.island) for e in rank.events] == [(e.kind, e.island) for e in events]
    run = small_run(**options, batch=BATCH // islands)
    (want,) = pool.run(replay, run, islands, events, timeout=240)
    check_same(ranks, want)


@pytest.mark.parametrize("method", mostly_long(["LocalSGD", "DiLoCo", "AsyncSGD"], lambda method: method != "LocalSGD"))
def test_a_run_of_islands_resumes_from_its_checkpoint(pool: RankPool, tmp_path: Path, text: Path, method: str) -> None:
    # A bound of 0 makes the order of an asynchronous run depend on who reads first alone; its sums still differ.
    outer = {"method": method, "every_steps": 2, "staleness": 0}
    run = small_run(data=2, steps=6, every=2, keep=9, outer=outer)
    for root, stop_rank in ((tmp_path / "straight", -1), (tmp_path / "broken", 1)):
        pool.run(train_fully, run, stop_rank, 4, checkpoint_dir=root, data_dir=text, timeout=240)
    answers = pool.run(train_fully, run, checkpoint_dir=tmp_path / "broken", data_dir=text, timeout=240)
    outcome, resumed = answers[0]
    assert (outcome, resumed.began_at) == (Outcome.COMPLETE, 4)
    straight, again = tensors_of(tmp_path / "straight", 6), tensors_of(tmp_path / "broken", 6)
    assert set(straight) == set(again)
    if method != "AsyncSGD":
        assert all(torch.equal(value, again[name]) for name, value in straight.items())
    assert any(name.startswith("outer.") for name in straight) == (method == "DiLoCo")
    assert any(name.startswith("island-1.optimizer.") for name in straight) == (method != "AsyncSGD")


def test_islands_resume_with_the_biases_of_their_routers(pool: RankPool, tmp_path: Path, text: Path) -> None:
    outer = {"method": "LocalSGD", "every_steps": 2}
    run = small_run(data=2, steps=4, every=2, keep=9, mixture="DeepSeek-V3", outer=outer)
    for stop_after in (2, None):
        pool.run(train_fully, run, 1, stop_after, checkpoint_dir=tmp_path / "broken", data_dir=text, timeout=240)
    pool.run(train_fully, run, checkpoint_dir=tmp_path / "straight", data_dir=text, timeout=240)
    straight, again = tensors_of(tmp_path / "straight", 4), tensors_of(tmp_path / "broken", 4)
    assert straight["model.layers.1.feed_forward.router.bias"].any()
    assert set(straight) == set(again)
    assert all(torch.equal(value, again[name]) for name, value in straight.items())
    # Without the biases neither text could be generated from it nor could plain replicas continue.
    checkpoint, manifest = find_checkpoint(tmp_path / "broken")
    load_full_model(checkpoint, manifest, Precision.FP32, capacity=4)


@pytest.mark.parametrize("method", ["DiLoCo", "AsyncSGD"])
def test_copies_of_tied_embeddings_stay_equal_after_a_resume(pool: RankPool, tmp_path: Path, method: str) -> None:
    outer = {"method": method, "every_steps": 2, "staleness": 0}
    ends = {"layers": 4, "pipeline": 2, "tie_embeddings": True, "parallelism": {"schedule": "ZBV"}}
    run = small_run(data=2, steps=6, every=2, outer=outer, **ends)
    for _ in range(2):
        ranks = pool.run(train_a_round_more, run, checkpoint_dir=tmp_path, timeout=240)
        assert [len(copies) for copies in ranks] == [2, 0, 2, 0], "of both ends of the model"
        assert all(torch.equal(*copies) for copies in ranks if copies)


def test_islands_begin_with_the_parameters_of_a_server_that_is_late(pool: RankPool, tmp_path: Path, text: Path) -> None:
    run = small_run(data=2, steps=2, every=2, outer={"method": "AsyncSGD", "every_steps": 2})
    for steps in (2, 4):  # from drawn parameters, then from a checkpoint
        longer = run.model_copy(update={"training": run.training.model_copy(update={"steps": steps})})
        answers = pool.run(train_with_a_late_rank, longer, 0, checkpoint_dir=tmp_path, data_dir=text, timeout=60)
        assert [(outcome, recorder.began_at) for outcome, recorder in answers] == [(Outcome.COMPLETE, steps - 2)] * 2


def test_islands_become_plain_replicas_and_the_other_way_round(pool: RankPool, tmp_path: Path, text: Path) -> None:
    outer = {"method": "DiLoCo", "every_steps": 2}
    for number, (steps, options) in enumerate([(2, {}), (4, {"outer": outer}), (6, {"zero": 1})]):
        run = small_run(data=2, steps=steps, every=2, **options)
        ((outcome, recorder), *_) = pool.run(train_fully, run, checkpoint_dir=tmp_path, data_dir=text, timeout=240)
        assert (outcome, recorder.began_at) == (Outcome.COMPLETE, 2 * number)


def test_federated_islands_read_only_their_own_files(pool: RankPool, tmp_path: Path, text: Path) -> None:
    for island, files in enumerate((["part0.py", "part1.py", "part2.py"], ["part3.py"])):
        directory = tmp_path / "data" / f"island-{island}"
        directory.mkdir(parents=True)
        for name in files:
            (directory / name).write_bytes((text / name).read_bytes())
    run = small_run(data=2, steps=4, every=2, outer={"method": "FedAvg", "every_steps": 2})
    answers = pool.run(train_fully, run, checkpoint_dir=tmp_path / "saved", data_dir=tmp_path / "data", timeout=240)
    assert [outcome for outcome, _ in answers] == [Outcome.COMPLETE] * 2
    assert losses(answers[0][1])[1] != losses(answers[1][1])[1]


def held_out_targets(directory: Path, run: NativeRun, samples: int) -> int:
    stream = open_stream(run.data, str(directory), run.training.sequence_length, run.training.seed, held_out=True)
    batch = make_batch(stream.batch(0, samples), run.data, stream.separator)
    return int((batch.targets != IGNORED).sum())


def test_federated_islands_evaluate_on_their_own_held_out_documents(pool: RankPool, tmp_path: Path, text: Path) -> None:
    for island in range(2):
        directory = tmp_path / f"island-{island}"
        directory.mkdir()
        for number in range(3):
            # Documents of other lengths: the islands predict different numbers of tokens.
            source = (text / f"part{3 * island + number}.py").read_text().splitlines(keepends=True)
            for part, first in enumerate(range(0, len(source), 4 - 3 * island)):
                lines = source[first : first + 4 - 3 * island]
                (directory / f"{number}-{part:02}.py").write_text("".join(lines))
    (tmp_path / "nobodys.py").write_text("nobody reads this " * 100)

    def run_of(samples: int, **options: Any) -> NativeRun:
        # Parameters stay as they are: each evaluation is of the same model.
        training = {"evaluation": {"every_steps": 2, "samples": samples}}
        still = {"learning_rate": 1e-12, "min_learning_rate": 0.0}
        packed = {"packing": Packing.DOCUMENTS, "balance": True}
        run = small_run(steps=2, every=2, batch=samples, training=training, optimizer=still, **packed, **options)
        return run.model_copy(update={"data": run.data.model_copy(update={"held_out": 0.3})})

    own = []
    for island in range(2):
        run, directory = run_of(4), tmp_path / f"island-{island}"
        ((_, recorder),) = pool.run(train_fully, run, data_dir=directory, timeout=240)
        own.append((recorder.reports[-1].evaluation_loss, held_out_targets(directory, run, 4)))
    assert own[0][1] != own[1][1]
    together = pool.run(
        train_fully, run_of(8, data=2, outer={"method": "FedAvg", "every_steps": 2}), data_dir=tmp_path, timeout=240
    )
    want = sum(loss * targets for loss, targets in own) / sum(targets for _, targets in own)
    for _, recorder in together:
        assert recorder.reports[-1].evaluation_loss == pytest.approx(want, rel=1e-6)


def weight_of_records(task: RankTask) -> tuple[float, int]:
    """What an island counts for in a run on prompts with completions, and the samples of its epoch."""
    made: list[Any] = []
    real = training_loop.build_trainer

    def caught(*arguments: Any, **options: Any) -> Any:
        made.append((real(*arguments, **options), arguments[2]))
        return made[0][0]

    training_loop.build_trainer = caught
    try:
        training_loop.train(task, Recorder())
    finally:
        training_loop.build_trainer = real
    trainer, samples = made[0]
    return trainer.outer.weight, samples


def test_federated_islands_of_records_count_by_their_records(pool: RankPool, tmp_path: Path) -> None:
    for island, records in enumerate((30, 10)):
        directory = tmp_path / f"island-{island}"
        directory.mkdir()
        lines = (json.dumps({"prompt": f"{n}?", "completion": f"{n + island}!"}) for n in range(records))
        (directory / "a.jsonl").write_text("\n".join(lines))
    run = small_run(data=2, steps=2, every=2, outer={"method": "FedAvg", "every_steps": 2})
    data = DataSpec(claim_name="v", pattern="*.jsonl", format=DataFormat.PROMPT_COMPLETION)
    answers = pool.run(weight_of_records, run.model_copy(update={"data": data}), data_dir=tmp_path, timeout=240)
    assert answers == [(0.75, 30), (0.25, 10)]


def test_one_pod_that_must_go_stops_all_islands_after_the_round(pool: RankPool, tmp_path: Path, text: Path) -> None:
    run = small_run(data=2, steps=8, every=2, outer={"method": "LocalSGD", "every_steps": 2})
    answers = pool.run(train_fully, run, 1, 3, checkpoint_dir=tmp_path, data_dir=text, timeout=240)
    assert [(outcome, recorder.reports[-1].step) for outcome, recorder in answers] == [(Outcome.STOPPED, 4)] * 2
