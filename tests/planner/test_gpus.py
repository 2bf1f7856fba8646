"""`gpus`: a budget for which every degree is chosen, replicas too."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cost.memory import worst_stage
from meshwright.planner.errors import PlanError
from meshwright.planner.plan import Plan, make_plan
from meshwright.planner.workload import TrainingJob
from meshwright.protocol.run_config import NativeRun
from tests.planner.builders import choose_plan, inventory, node, racks, spec_of

PRODUCT = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
H100 = inventory(*racks(1, 8, 8, labels=PRODUCT))
LLAMA: dict[str, Any] = {
    "model": {"preset": "llama-3-8b"},
    "replicas": 1,
    "training": {"steps": 10, "globalBatchSize": 64, "sequenceLength": 4096, "precision": "bf16"},
    "workers": {"image": "worker", "gpusPerWorker": 8},
}
COMMAND = {"model": None, "data": None, "training": None, "runtime": {"command": ["python", "train.py"]}}


def llama(**changes: Any) -> ParallelTrainingJobSpec:
    return spec_of(**{**LLAMA, **changes})


def starting(plan: Plan, name: str) -> list[str]:
    return [reason for reason in plan.reasons if reason.startswith(name)]


@pytest.mark.parametrize("batch", [32, 256, 1024])
@pytest.mark.parametrize("length", [2048, 8192])
def test_llama_8b_on_one_node_shards_over_its_replicas(batch: int, length: int) -> None:
    # The activations of 8,192 tokens leave no room: two ranks share a row, by its positions or by the layers' widths.
    # So they do where the sums of gradients would leave none.
    training = {**LLAMA["training"], "globalBatchSize": batch, "sequenceLength": length}
    spec = llama(gpus=8, training=training)
    plan = make_plan(spec, H100)
    assert (plan.layout.pipeline, plan.layout.world_size) == (1, 8)
    assert plan.layout.tensor * plan.layout.context <= 2
    assert plan.estimate is not None
    for stage in (0, 1, 2, 3):
        try:
            other = make_plan(llama(gpus=8, training=training, parallelism={"zeroStage": stage}), H100)
        except PlanError:
            continue
        assert other.estimate is not None
        assert other.estimate.seconds >= plan.estimate.seconds / 1.01


@pytest.mark.parametrize(
    ("gpus", "model", "batch", "replicas", "tensor", "pipeline"),
    [
        # Each of 16 replicas would have 75 sequences, whose micro-batches run worse than those of 80.
        pytest.param(512, "deepseek-v2-lite", 1200, 15, 2, 14, id="fewer replicas have larger micro-batches"),
        # 9 divides neither the 32 layers nor 33 or 34.
        pytest.param(1024, "llama-3.1-8b", 500, 25, 4, 9, id="stages of different sizes"),
    ],
)
def test_a_budget_is_planned_as_well_as_with_stated_degrees(
    gpus: int, model: str, batch: int, replicas: int, tensor: int, pipeline: int
) -> None:
    training = {**LLAMA["training"], "globalBatchSize": batch, "sequenceLength": 1024}
    workers = {**LLAMA["workers"], "gpusPerWorker": 1}
    job: dict[str, Any] = {"model": {"preset": model}, "training": training, "workers": workers}
    nodes = inventory(*racks(1, gpus // 8, 8, labels=PRODUCT))
    plan = make_plan(llama(gpus=gpus, **job), nodes)
    other = make_plan(llama(replicas=replicas, parallelism={"tensor": tensor, "pipeline": pipeline}, **job), nodes)
    assert plan.estimate is not None
    assert other.estimate is not None
    assert plan.estimate.seconds <= other.estimate.seconds * 1.01


def test_reasons_are_in_the_order_of_decisions() -> None:
    reasons = make_plan(llama(gpus=64, model={"preset": "mixtral-8x7b"}), H100).reasons
    order = ["64 of `gpus: 64`", "DP ", "ZeRO-", "TP ", "PP ", "EP ", "memory: ", "time: "]
    at = [next(index for index, reason in enumerate(reasons) if reason.startswith(name)) for name in order]
    assert at == sorted(at)


def test_stages_that_do_not_fit_are_named() -> None:
    plan = make_plan(llama(gpus=8), H100)
    stage = plan.strategy.zero_stage
    assert stage > 1
    (reason,) = starting(plan, "ZeRO-")
    assert f"with stage {stage - 1} a rank needs" in reason or f"than stage {stage - 1}" in reason


@pytest.mark.parametrize(
    ("gpus", "batch", "used", "why"),
    [(64, 64, 64, ""), (63, 64, 56, "all workers have 8 GPUs"), (48, 64, 32, "no larger number of replicas")],
)
def test_what_is_left_over_is_told(gpus: int, batch: int, used: int, why: str) -> None:
    training = {**LLAMA["training"], "globalBatchSize": batch}
    parallelism = {"tensor": 1, "pipeline": 1, "context": 1} if gpus != 63 else {"tensor": 1, "pipeline": 7}
    plan = make_plan(llama(gpus=gpus, training=training, parallelism=parallelism), H100)
    assert plan.layout.world_size == used
    assert plan.to_status().unused_gpus == gpus - used
    (reason,) = starting(plan, f"{used} of `gpus: {gpus}` are used")
    assert why in reason
    assert ("left over" in reason) == (used < gpus)


def test_what_the_spec_states_stays() -> None:
    stated = {"tensor": 2, "zeroStage": 1, "microBatches": 16}
    plan = make_plan(llama(gpus=16, parallelism=stated), H100)
    assert (plan.strategy.tensor, plan.strategy.zero_stage, plan.strategy.micro_batches) == (2, 1, 16)


def test_the_number_of_gpus_does_not_depend_on_the_cluster() -> None:
    """A job waits for its GPUs: it does not start with the few that are there."""
    few = inventory(node("only", labels=PRODUCT))
    assert make_plan(llama(gpus=32), few).layout.world_size == 32
    plan, placement = choose_plan(llama(gpus=32), few)
    assert plan.layout.world_size == 32
    assert placement is None


def test_without_a_known_gpu_the_first_layout_in_the_usual_order_is_taken() -> None:
    unknown = inventory(*racks(1, 8, 8))
    plan = make_plan(llama(gpus=16), unknown)
    assert (plan.layout.tensor, plan.layout.pipeline, plan.layout.data) == (1, 1, 16)
    assert plan.strategy.zero_stage > 0


def test_a_command_gets_as_many_replicas_as_fill_workers() -> None:
    plan = make_plan(spec_of(gpus=21, replicas=1, parallelism={"tensor": 2}, **COMMAND), H100)
    assert (plan.layout.tensor, plan.layout.data) == (2, 10)
    assert plan.to_status().unused_gpus == 1
    with pytest.raises(PlanError, match="fills workers of 2 GPUs with `gpus: 3`"):
        make_plan(spec_of(gpus=3, replicas=1, parallelism={"tensor": 1, "context": 3}, **COMMAND), H100)


def test_a_budget_that_no_layout_divides_names_the_fields() -> None:
    spec = llama(
        gpus=12,
        training={**LLAMA["training"], "globalBatchSize": 5},
        parallelism={"tensor": 1, "pipeline": 1, "context": 1},
    )
    with pytest.raises(PlanError, match="change `gpus`, `workers.gpusPerWorker` or `training.globalBatchSize`"):
        make_plan(spec, H100)


def test_the_run_and_the_status_have_every_choice() -> None:
    spec = llama(gpus=64, model={"preset": "llama-3-70b"})
    plan = make_plan(spec, H100)
    status, run, used = plan.to_status(), plan.run_config(spec), plan.strategy
    assert isinstance(run, NativeRun)
    assert plan.architecture is not None
    job = TrainingJob.of(spec, plan.architecture)
    assert run.parallelism.zero_stage == status.zero_stage == used.zero_stage
    assert run.parallelism.context_method == used.context_method
    assert status.context_method == (used.context_method if used.context > 1 else None)
    assert run.data_parallel == status.data == used.data
    assert worst_stage(job.work, used, job.runtime).total <= 0.97 * 81559 * 2**20


def test_a_budget_of_more_gpus_than_the_most_workers_have_names_that_limit() -> None:
    many = inventory(*racks(40, 32, 1, labels=PRODUCT))
    workers = {"image": "worker", "gpusPerWorker": 1}
    plan = make_plan(llama(gpus=1280, workers=workers, training={**LLAMA["training"], "globalBatchSize": 2048}), many)
    assert plan.layout.world_size == 1024
    assert plan.reasons[0] == (
        "1024 of `gpus: 1280` are used, 256 are left over: a job has at most 1024 workers, of 1 GPU each: raise "
        "`workers.gpusPerWorker`"
    )


def test_a_model_that_does_not_fit_reads_only_fields_that_would_help() -> None:
    """Micro-batches of one row cannot be smaller. 512 replicas of 16 GPUs are as many as 1024 workers have. A replica's
    only micro-batch is too large with 128 rows, and several accumulate gradients.
    """
    with pytest.raises(PlanError, match="Raise `gpus`, shorten"):
        make_plan(llama(gpus=1, workers={"image": "worker", "gpusPerWorker": 1}), H100)
    training = {**LLAMA["training"], "globalBatchSize": 16384}
    pinned = {"microBatches": 1}
    with pytest.raises(PlanError, match="Raise `parallelism.microBatches` or `gpus`, shorten"):
        make_plan(llama(gpus=8, training=training, parallelism=pinned), H100)
    training["globalBatchSize"] = 65536
    with pytest.raises(PlanError, match=r"Raise `workers.gpusPerWorker` \(a job has at most 1024 workers, here of 8"):
        make_plan(llama(model={"preset": "llama-3.1-405b"}, replicas=512, training=training), H100)


def test_a_job_that_is_larger_than_the_cluster_has_the_plan_of_a_cluster_with_enough_gpus() -> None:
    spec = llama(replicas=4, model={"preset": "llama-3.1-70b"})
    nodes = [node(f"n{i}", rack=None, labels=PRODUCT) for i in range(32)]
    here, there = make_plan(spec, inventory(*nodes[:2])), make_plan(spec, inventory(*nodes))
    assert there.layout.world_size > 16, "more GPUs than there are here"
    assert (here.strategy, here.estimate) == (there.strategy, there.estimate)


@pytest.mark.parametrize(("strategy", "stages"), [("ZeRO", (1, 2)), ("SHARD_GRAD_OP", (2,)), ("FULL_SHARD", (3,))])
def test_a_stated_strategy_leaves_its_stages_to_choose_from(strategy: str, stages: tuple[int, ...]) -> None:
    """Ranks run a stage of the strategy: memory, time and status must be those of that stage."""
    spec = llama(model={"preset": "tiny"}, gpus=8, parallelism={"dataParallel": {"strategy": strategy}, "tensor": 1})
    plan = make_plan(spec, H100)
    run = plan.run_config(spec)
    assert isinstance(run, NativeRun)
    assert plan.layout.data > 1
    assert plan.strategy.zero_stage == run.parallelism.zero_stage
    assert plan.strategy.zero_stage in stages
    assert make_plan(spec, inventory(), plan.to_status()).strategy == plan.strategy


@pytest.mark.parametrize("stated", ["None", "Selective", "Full"])
def test_activations_in_main_memory_are_fewer_with_recomputation_if_that_is_faster(stated: str) -> None:
    """The GPUs wait for them, so that a step may be shorter with less to move, or with another split."""
    model = {"layers": 24, "hiddenSize": 2048, "intermediateSize": 5632, "heads": 16, "kvHeads": 8, "vocabSize": 50257}
    training = {
        **LLAMA["training"],
        "globalBatchSize": 30,
        "sequenceLength": 16384,
        "activationOffload": True,
    }
    h200 = inventory(node("n", labels={"nvidia.com/gpu.product": "NVIDIA-H200"}, memory_mib=143771))
    free = make_plan(llama(model=model, gpus=8, training=training), h200)
    pinned = make_plan(llama(model=model, gpus=8, training={**training, "activationCheckpointing": stated}), h200)
    assert free.estimate is not None
    assert pinned.estimate is not None
    assert free.estimate.seconds <= 1.01 * pinned.estimate.seconds


@pytest.mark.parametrize("size", [{"replicas": 1}, {"gpus": 64}])
def test_an_odd_vocabulary_is_named_if_no_tensor_degree_divides_it(size: dict[str, int]) -> None:
    model = {"layers": 64, "hiddenSize": 8192, "intermediateSize": 28672, "heads": 64, "kvHeads": 8}
    training = {**LLAMA["training"], "globalBatchSize": 8, "sequenceLength": 1024}
    with pytest.raises(PlanError, match=r"It fits with `model.vocabSize: 50264`, a multiple of 8") as told:
        make_plan(llama(model={**model, "vocabSize": 50257}, training=training, **size), H100)
    assert "which 50257 allows up to TP 1" in str(told.value)
    assert make_plan(llama(model={**model, "vocabSize": 50264}, training=training, **size), H100).layout.tensor > 1


def test_no_vocabulary_is_named_if_the_model_does_not_fit_with_another() -> None:
    model = {"layers": 96, "hiddenSize": 16384, "intermediateSize": 65536, "heads": 128, "vocabSize": 50257}
    with pytest.raises(PlanError, match="does not fit") as told:
        make_plan(llama(model=model, gpus=8), H100)
    assert "vocabSize" not in str(told.value)
