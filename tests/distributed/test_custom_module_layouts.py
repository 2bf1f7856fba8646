"""A tangled module of one's own against one process in fp64, and what is refused because it would not be equal."""

from __future__ import annotations

import json
import math
import os
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.labels import ENV_REPORT_FILE
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.full_tensors import FullTensorReader
from meshwright_worker.checkpoint.manifest import ModuleManifest, read_manifest_as
from meshwright_worker.command.report_file import ReportFile
from meshwright_worker.command.report_line import parse_line
from meshwright_worker.optimizers.learning_rate import learning_rate
from meshwright_worker.rank import task as rank_task
from meshwright_worker.rank.task import RankTask, Work
from tests.distributed.configs import small_run
from tests.distributed.custom_module_cases import (
    PLAN,
    SPEC,
    STEPS,
    Ran,
    Tangle,
    call_a_part,
    compare_plans,
    diverge_and_go_on,
    recompute_dropout,
    rows_of,
    tangle_loss,
    train_tangle,
    try_what_is_wrong,
)
from tests.distributed.rank_pool import RankFailedError, RankPool
from tests.tiers import mostly_long

DROPS = {"dropout": 0.1}


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> Ran:
    (ran,) = pool.run(train_tangle, small_run(), 0, STEPS, DROPS)
    return ran


def check(ran: Ran, expected: Ran, *, gradients: bool = True) -> None:
    assert ran.losses == pytest.approx(expected.losses[-len(ran.losses) :], rel=1e-12)
    assert ran.evaluated == pytest.approx(expected.evaluated, rel=1e-12)
    pairs = [(ran.parameters, expected.parameters, 1e-10), (ran.buffers, expected.buffers, 1e-12)]
    for got, wanted, limit in [*pairs, (ran.gradients, expected.gradients, 1e-12)][: 3 if gradients else 2]:
        assert set(got) == set(wanted)
        for name, tensor in wanted.items():
            assert got[name].dtype == tensor.dtype
            largest = max(1e-12, float(tensor.abs().max()))
            assert float((got[name] - tensor).abs().max()) / largest <= limit, name


def test_one_process_trains_as_plain_torch(pool: RankPool) -> None:
    (ran,) = pool.run(train_tangle, small_run(), 0, STEPS, {})
    torch.manual_seed(0)
    module = Tangle().double()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    decayed, others = ([p for p in trained if (p.ndim > 1) is matrix] for matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": SPEC.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(SPEC.beta1, SPEC.beta2))
    for step, loss in zip(STEPS, ran.losses, strict=True):
        parts = [tangle_loss(module, tokens) for tokens in rows_of(step).chunk(4)]
        mean = sum(part for part, _ in parts) / sum(count for _, count in parts)
        optimizer.zero_grad()
        mean.backward()
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        # torch's own clipping adds a millionth to the norm.
        norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]))
        torch._foreach_mul_(gradients, float(min(1.0, SPEC.gradient_clip / norm)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, 8, SPEC)
        optimizer.step()
        assert loss == pytest.approx(mean.item(), rel=1e-12)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(ran.parameters[name], parameter.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("layout", "zero"),
    mostly_long(
        [
            ({"tensor": 2}, 0),
            ({"data": 2}, 1),
            ({"tensor": 2, "data": 2}, 0),
            ({"tensor": 2, "data": 2}, 1),
            ({"tensor": 2, "data": 2}, 3),
            ({"data": 4, "replicas": {"shard_size": 2}}, 3),
        ],
        lambda case: case[0] == {"tensor": 2, "data": 2} and case[1] == 3,
    ),
    ids=str,
)
def test_every_layout_trains_as_one_process(pool: RankPool, alone: Ran, layout: dict[str, Any], zero: int) -> None:
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in alone.gradients.values()))
    # Gradients are clipped, so their norm has to count what is split and what is not once each.
    assert norm == pytest.approx(0.05)
    assert "head.weight" not in alone.parameters
    for ran in pool.run(train_tangle, small_run(**layout), zero, STEPS, DROPS):
        check(ran, alone)
        # A rank's part is no view of the whole, which would stay in memory.
        assert ran.held < (0.8 if layout.get("tensor") else 1.01) * alone.held


@pytest.mark.parametrize("zero", mostly_long([0, 1, 3], lambda zero: zero == 0))
def test_weights_that_are_stored_transposed_train_as_others(pool: RankPool, alone: Ran, zero: int) -> None:
    for ran in pool.run(train_tangle, small_run(data=2), zero, STEPS, DROPS | {"transposed": True}):
        check(ran, alone)


def test_activation_checkpointing_repeats_the_dropout_of_each_region(pool: RankPool) -> None:
    for stored, recomputed in pool.run(recompute_dropout, small_run(tensor=2)):
        assert recomputed == stored


def test_a_loss_that_calls_a_part_of_a_sharded_module_is_explained(pool: RankPool) -> None:
    with pytest.raises(RankFailedError, match="`loss` must call the module, not its parts"):
        pool.run(call_a_part, small_run(data=2))


def test_a_checkpoint_loads_in_any_layout(pool: RankPool, alone: Ran, tmp_path: Path) -> None:
    layouts = [({"tensor": 2, "data": 2}, 2), ({"data": 2}, 1), ({"tensor": 2}, 0)]
    for step, (layout, zero) in zip(STEPS, layouts, strict=True):
        run = small_run(**layout)
        rans = pool.run(train_tangle, run, zero, range(step, step + 1), DROPS, checkpoint_dir=tmp_path)
    for ran in rans:
        check(ran, alone, gradients=False)


def load_with_reports(task: RankTask, reports: str) -> list[dict[str, Any]]:
    """What a rank writes to its report file while it loads, if each small part takes long."""
    path = Path(f"{reports}-{task.rank}")
    path.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_task, "AT_WORK_SECONDS", 0.0)
        patch.setenv(ENV_REPORT_FILE, str(path))
        train_tangle(task, 2, range(2, 3), DROPS)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_load_counts_its_files_and_then_its_tensors(pool: RankPool, tmp_path: Path) -> None:
    run, root = small_run(data=2), tmp_path / "run"
    pool.run(train_tangle, run, 2, range(1, 2), DROPS, checkpoint_dir=root)
    checkpoint = CheckpointDirectory(root).path(1)
    files, stored = read_manifest_as(checkpoint, ModuleManifest).files.values(), FullTensorReader(checkpoint)
    ranks = pool.run(load_with_reports, run, str(tmp_path / "reports"), checkpoint_dir=root)
    for reports in ranks:
        assert all(parse_line(json.dumps(report).encode()) for report in reports)
        assert [name for name, _ in groupby(report["work"] for report in reports)] == ["verify", "checkpoint"]
        assert all(report["done"] <= report["total"] for report in reports)
    last = [{report["work"]: report["done"] for report in reports} for reports in ranks]
    assert sum(rank["verify"] for rank in last) == sum(file.size for file in files)
    assert sum(rank["checkpoint"] for rank in last) >= sum(stored.read(name).nbytes for name in stored.names)


def test_a_load_outside_a_job_or_with_a_pipe_that_nobody_reads_reports_nothing(tmp_path: Path) -> None:
    work = Work("checkpoint", 1, 2, 1, 1, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ENV_REPORT_FILE, raising=False)
        ReportFile().at_work(work)
        os.mkfifo(tmp_path / "pipe")
        for path in ("pipe", "missing"):
            patch.setenv(ENV_REPORT_FILE, str(tmp_path / path))
            ReportFile().at_work(work)
    assert not (tmp_path / "missing").exists()


def test_a_checkpoint_of_another_module_is_rejected(pool: RankPool, tmp_path: Path) -> None:
    modules: list[dict[str, Any]] = [{"rare": True, "batch_norm": False}, {"batch_norm": False}]
    pool.run(train_tangle, small_run(), 0, range(1, 2), modules[0], PLAN, torch.float64, 7, checkpoint_dir=tmp_path)
    with pytest.raises(RankFailedError, match="it has `model.rare.bias`, `model.rare.weight`"):
        pool.run(train_tangle, small_run(), 0, range(2, 3), modules[1], checkpoint_dir=tmp_path)


def test_a_checkpoint_that_lacks_tensors_or_has_other_shapes_is_rejected(pool: RankPool, tmp_path: Path) -> None:
    fewer, other = {"batch_norm": False}, {"between": 5}
    pool.run(train_tangle, small_run(data=2), 2, range(1, 2), fewer, checkpoint_dir=tmp_path / "fewer")
    with pytest.raises(RankFailedError, match="it lacks `model.batch_norm.bias`, .*, which this module has: load it"):
        pool.run(train_tangle, small_run(), 0, range(2, 3), {}, checkpoint_dir=tmp_path / "fewer")
    pool.run(train_tangle, small_run(), 0, range(1, 2), {}, checkpoint_dir=tmp_path / "narrow")
    with pytest.raises(RankFailedError, match=r"`model.remember.weight` is \[6, 6\] in it, and \[6, 5\] in"):
        pool.run(train_tangle, small_run(data=2), 2, range(2, 3), other, checkpoint_dir=tmp_path / "narrow")


@pytest.mark.parametrize(
    ("dtype", "zero"),
    mostly_long([(torch.bfloat16, 0), (torch.bfloat16, 3), (torch.float32, 2)], lambda case: case[1] == 3),
    ids=str,
)
def test_a_module_keeps_its_format(pool: RankPool, alone: Ran, dtype: torch.dtype, zero: int) -> None:
    for ran in pool.run(train_tangle, small_run(data=2), zero, STEPS, DROPS, PLAN, dtype):
        assert {tensor.dtype for tensor in (ran.parameters | ran.gradients).values()} == {dtype}
        assert ran.losses == pytest.approx(alone.losses, rel=2e-2 if dtype is torch.bfloat16 else 1e-5)


def test_heads_of_different_ranks_drop_different_numbers(pool: RankPool) -> None:
    first, second = pool.run(train_tangle, small_run(tensor=2), 0, range(1, 2), {"inner": 0.5})
    assert first.dropped.shape == second.dropped.shape
    assert 0.2 < float((first.dropped != second.dropped).double().mean()) < 0.8
    assert first.losses == second.losses


@pytest.mark.parametrize(
    ("layout", "zero"),
    mostly_long(
        [
            ({"data": 2}, 0),
            ({"data": 2}, 1),
            ({"data": 2}, 2),
            ({"data": 2}, 3),
            ({"data": 2, "tensor": 2}, 3),
            ({"data": 4, "replicas": {"shard_size": 2}}, 3),
        ],
        lambda case: "tensor" not in case[0] and "replicas" not in case[0],
    ),
    ids=str,
)
def test_a_part_that_only_one_replica_uses(pool: RankPool, layout: dict[str, Any], zero: int) -> None:
    module = {"rare": True, "batch_norm": False}
    (alone,) = pool.run(train_tangle, small_run(), 0, STEPS, module, PLAN, torch.float64, 7)
    for ran in pool.run(train_tangle, small_run(**layout), zero, STEPS, module, PLAN, torch.float64, 7):
        check(ran, alone)


@pytest.mark.parametrize("zero", [0, 2])
def test_a_part_that_no_replica_uses_is_rejected(pool: RankPool, zero: int) -> None:
    module = {"rare": True, "batch_norm": False}
    with pytest.raises(RankFailedError, match="no gradient was computed for rare.weight, rare.bias"):
        pool.run(train_tangle, small_run(data=2), zero, STEPS, module)


def test_what_would_be_wrong_is_rejected_on_every_rank(pool: RankPool) -> None:
    first, second = pool.run(try_what_is_wrong, small_run(tensor=2))
    assert first == second
    assert "not the same on every rank: call `torch.manual_seed`" in first["weights"]
    assert "computed different losses of one batch" in first["batch"]
    assert "the same number of micro-batches" in first["count"]
    assert "at least one micro-batch" in first["none"]
    assert "out of range" in first["token"]
    assert "the buffer `mine` is no longer the same" in first["buffer"]
    assert "no gradient was computed for rare.weight, rare.bias" in first["unused"]
    assert "fixed.weight, fixed.bias was frozen when the trainer was created" in first["thawed"]
    assert "it returned one tensor of shape []" in first["mean"]
    assert "it returned (one tensor of shape [8, 5, 12], an int)" in first["unsummed"]
    assert first["many"] == "1.0"
    assert "`optimizer.name` is Muon: a custom module is trained with AdamW" in first["optimizer"]
    assert "`optimizer.offload` is CPU" in first["offload"]
    assert "`weight` is split already" in first["split"]
    assert "`0` has `get_extra_state`" in first["extra"]
    assert first["changed"] == ""


@pytest.mark.parametrize("zero", mostly_long([0, 3], lambda zero: zero == 3))
def test_a_step_that_diverged_leaves_nothing_behind(pool: RankPool, zero: int) -> None:
    for straight, around in pool.run(diverge_and_go_on, small_run(tensor=2, data=2), zero):
        assert straight == around


def test_a_plan_is_compared_with_its_module(pool: RankPool) -> None:
    for right, careless in pool.run(compare_plans, small_run(tensor=2)):
        assert {"loss", "tokens.weight", "layers.0.mixer.scale"} < set(right)
        assert max(right.values()) < 1e-12
        assert careless["loss"] > 1e-3


def test_the_plan_names_something_of_every_kind() -> None:
    assert all(getattr(PLAN, name) for name in PLAN.__dataclass_fields__)
