"""What planner and search propose passes the API's rules and the worker's, whatever the job and the cluster."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.layout import Layout
from meshwright.models.architecture import Architecture
from meshwright.models.presets import resolve
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cost_model import cost_model_for
from meshwright.planner.errors import PlanError
from meshwright.planner.plan import Plan, make_plan, make_plans
from meshwright.planner.search.best_first import search
from meshwright.planner.search.errors import NothingFitsError
from meshwright.planner.search.expand import memory_savings, strategy_of
from meshwright.planner.search.spec_request import apply_strategy, search_request
from meshwright.protocol.run_config import NativeRun
from meshwright.rules.validation import check_spec
from meshwright_worker.trainer.train import validate_run
from tests.planner.builders import inventory, node, racks, spec_of

PRODUCT = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
MIXTURE = {"experts": 8, "perToken": 2, "intermediateSize": 1408, "sharedIntermediateSize": 2816, "denseLayers": 1}


def shape(**changes: Any) -> dict[str, Any]:
    whole = {"layers": 24, "hiddenSize": 2048, "intermediateSize": 5632, "heads": 16, "kvHeads": 8, "vocabSize": 32000}
    return {**whole, **changes}


MODELS = [
    shape(),
    shape(layers=7, tieEmbeddings=True),
    shape(mixture=MIXTURE),
    shape(mixture={**MIXTURE, "capacityFactor": 1.5, "sharedIntermediateSize": 0}),
    shape(layers=80, hiddenSize=8192, intermediateSize=28672, heads=64, vocabSize=128256),
    {"preset": "llama-3-8b"},
    {"preset": "mixtral-8x7b"},
]
TRAININGS: list[dict[str, Any]] = [
    {"precision": "bf16"},
    {"precision": "fp32"},
    {"precision": "bf16", "fp8": {}},
    {"precision": "bf16", "masterWeights": False},
    {"precision": "bf16", "optimizer": {"name": "Muon"}},
    {"precision": "bf16", "attentionDropout": 0.1},
    {"precision": "bf16", "lora": {}},
    {"precision": "fp16", "optimizer": {"offload": "CPU"}},
]


def cluster(nodes: int, memory_mib: int = 81559) -> Inventory:
    return inventory(*racks(1, nodes, 8, labels=PRODUCT, memory_mib=memory_mib))


jobs = st.builds(
    lambda model, training, batch, length, gpus: spec_of(
        model=model,
        replicas=1,
        training={"steps": 10, "globalBatchSize": batch, "sequenceLength": length, **training},
        workers={"image": "worker", "gpusPerWorker": gpus},
    ),
    st.sampled_from(MODELS),
    st.sampled_from(TRAININGS),
    st.sampled_from([12, 32, 64]),
    st.sampled_from([2048, 16384, 131072]),
    st.sampled_from([1, 4, 8]),
)


def refused(spec: ParallelTrainingJobSpec, plan: Plan) -> list[str]:
    """What the API and the worker say against a plan."""
    run = plan.run_config(spec)
    assert isinstance(run, NativeRun)
    parallelism = run.parallelism.model_copy(update=run.degrees)
    filled = spec.model_copy(update={"parallelism": parallelism, "training": run.training})
    problems = [f"{problem.field}: {problem.message}" for problem in check_spec(filled)]
    try:
        validate_run(run)
    except ValueError as error:
        problems.append(str(error))
    return problems


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(jobs, st.sampled_from([1, 2]))
def test_a_search_proposes_what_is_run(spec: ParallelTrainingJobSpec, nodes: int) -> None:
    if check_spec(spec):
        return
    found = cluster(nodes)
    cost_model = cost_model_for(spec, make_architecture(spec), found)
    assert cost_model is not None
    try:
        result = search(search_request(spec, cost_model, 8 * nodes))
    except NothingFitsError:
        return
    for one in [result.best, *result.ranked[:6], *result.alternatives]:
        wanted = apply_strategy(spec, one.strategy)
        assert check_spec(wanted) == []
        plan = make_plan(wanted, found)
        assert refused(wanted, plan) == []
        # The estimate is for what is run, and compared with the same memory.
        assert plan.layout.world_size == one.strategy.world_size
        assert plan.memory is not None
        assert plan.memory.total == pytest.approx(one.estimate.memory.total, rel=0.02)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    jobs,
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([81559, 24000]),
    st.sampled_from([{}, {"zeroStage": 1}, {"zeroStage": 3}, {"pipeline": 4}, {"pipeline": 6, "zeroStage": 1}]),
)
def test_what_a_spec_leaves_out_is_chosen_so_that_it_runs(
    spec: ParallelTrainingJobSpec, replicas: int, nodes: int, memory: int, asked: dict[str, Any]
) -> None:
    fields = spec.model_dump(by_alias=True, exclude_none=True, exclude={"parallelism"})
    spec = ParallelTrainingJobSpec.model_validate({**fields, "replicas": replicas, "parallelism": asked})
    try:
        plans = make_plans(spec, cluster(nodes, memory))
    except PlanError:
        return
    for plan in plans:
        problems = refused(spec, plan)
        # What a spec itself asks for may be refused by the worker alone: flat shards with Muon, say.
        assert not problems or refused_by_itself(spec), problems


def refused_by_itself(spec: ParallelTrainingJobSpec) -> bool:
    training, model = spec.training, spec.model
    assert training is not None
    assert model is not None
    flat = spec.parallelism.zero_stage == 1
    return flat and (
        training.optimizer.name == "Muon"
        or not training.master_weights
        or model.mixture is not None
        or model.preset == "mixtral-8x7b"
        or bool(model.tie_embeddings)
    )


def make_architecture(spec: ParallelTrainingJobSpec) -> Architecture:
    assert spec.model is not None
    return resolve(spec.model)


LONG: dict[str, Any] = {
    "model": {"preset": "llama-3-8b"},
    "replicas": 8,
    "training": {"steps": 1, "globalBatchSize": 8, "sequenceLength": 65536, "precision": "bf16"},
    "workers": {"image": "worker", "gpusPerWorker": 8},
}
SHARDED = {"tensor": 1, "pipeline": 1, "zeroStage": 3}


@pytest.mark.parametrize(
    ("model", "gpus", "each", "batch", "length"),
    [
        pytest.param("llama-3-8b", 60, 8, 60, 4096, id="micro-batches of 5"),
        pytest.param("llama-3-8b", 40, 4, 256, 8192, id="a pipeline of 5"),
        pytest.param("qwen3-8b", 320, 8, 720, 4096, id="micro-batches of 5 on more than 256 GPUs"),
    ],
)
def test_with_every_degree_free_no_layout_is_slower_than_the_plan_of_the_job(
    model: str, gpus: int, each: int, batch: int, length: int
) -> None:
    spec = spec_of(
        model={"preset": model},
        gpus=gpus,
        replicas=1,
        training={"steps": 10, "globalBatchSize": batch, "sequenceLength": length, "precision": "bf16"},
        workers={"image": "worker", "gpusPerWorker": each},
    )
    nodes = cluster(-(-gpus // 8))
    plan = make_plan(spec, nodes)
    cost_model = cost_model_for(spec, plan.architecture, nodes)
    assert cost_model is not None
    assert plan.estimate is not None
    assert search(search_request(spec, cost_model, gpus)).best.seconds <= plan.estimate.seconds


@pytest.mark.parametrize(
    ("training", "stages"),
    [({}, [0, 1]), ({"masterWeights": False}, [0, 2]), ({"parameterOffload": True}, [2])],
)
def test_the_lowest_stage_that_shards_is_tried_though_nothing_has_to_be_saved(
    training: dict[str, Any], stages: list[int]
) -> None:
    spec = spec_of(
        model=shape(),
        replicas=1,
        training={"steps": 1, "globalBatchSize": 32, "sequenceLength": 512, "precision": "bf16", **training},
    )
    cost_model = cost_model_for(spec, make_architecture(spec), cluster(2))
    assert cost_model is not None
    request = search_request(spec, cost_model, 16)
    base = strategy_of(request, Layout(tensor=2, pipeline=2, data=4), 1)
    assert [one.zero_stage for one, _ in memory_savings(request, base)] == stages


def test_nothing_is_recomputed_while_a_layout_fits_without() -> None:
    plan = make_plan(spec_of(**{**LONG, "training": {**LONG["training"], "sequenceLength": 4096}}), cluster(8))
    assert plan.to_status().activation_checkpointing == "None"
    assert plan.layout.context == 1


def test_the_cheapest_saving_that_fits_is_taken_and_told() -> None:
    short = {**LONG["training"], "sequenceLength": 12288, "lossChunkTokens": 1024}
    plan = make_plan(spec_of(**{**LONG, "training": short, "parallelism": SHARDED}), cluster(1))
    assert plan.strategy.checkpointing == "Selective"
    assert any(reason.startswith("activation checkpointing Selective: without it a rank") for reason in plan.reasons)
    run = plan.run_config(spec_of(**{**LONG, "training": short, "parallelism": SHARDED}))
    assert isinstance(run, NativeRun)
    assert run.training.activation_checkpointing == "Selective"
    given = spec_of(**{**LONG, "training": {**short, "activationCheckpointing": "Full"}, "parallelism": SHARDED})
    assert make_plan(given, cluster(1)).strategy.checkpointing == "Full"


def test_sequences_are_shared_where_recomputing_is_not_enough() -> None:
    asked = spec_of(**{**LONG, "parallelism": SHARDED})
    plan = make_plan(asked, cluster(8))
    assert plan.layout.context > 1
    assert any("the fewest ranks to a sequence with which a layout fits" in reason for reason in plan.reasons)
    whole = spec_of(**{**LONG, "parallelism": {**SHARDED, "context": 1}})
    with pytest.raises(PlanError, match="does not fit"):
        make_plan(whole, cluster(8))


def test_a_running_job_keeps_what_was_chosen_for_it() -> None:
    asked = spec_of(**{**LONG, "parallelism": SHARDED})
    plan = make_plan(asked, cluster(8))
    roomy = inventory(*(node(f"n{i}", memory_mib=800_000, labels=PRODUCT) for i in range(8)))
    assert make_plan(asked, roomy).layout != plan.layout
    kept = make_plan(asked, roomy, keep=plan.to_status())
    assert kept.strategy == plan.strategy


def test_a_schedule_is_chosen_by_what_it_gains() -> None:
    asked: dict[str, Any] = {
        "model": {"preset": "llama-3-8b"},
        "replicas": 1,
        "training": {"steps": 1, "globalBatchSize": 16, "sequenceLength": 4096, "precision": "bf16"},
        "workers": {"image": "worker", "gpusPerWorker": 8},
        "parallelism": {"tensor": 1, "pipeline": 8, "microBatches": 16},
    }
    plan = make_plan(spec_of(**asked), cluster(1))
    assert plan.strategy.schedule != "1F1B"
    assert plan.to_status().schedule == plan.strategy.schedule
    assert any(
        reason.startswith(f"schedule {plan.strategy.schedule.value}: ") and "faster than 1F1B" in reason
        for reason in plan.reasons
    )
    plain = {**asked, "parallelism": {**asked["parallelism"], "schedule": "1F1B"}}
    given = make_plan(spec_of(**plain), cluster(1))
    assert given.strategy.schedule == "1F1B"
    assert given.estimate is not None
    assert plan.estimate is not None
    assert plan.estimate.seconds < given.estimate.seconds
    # Many micro-batches leave no bubble to shorten.
    many = {**asked, "training": {**asked["training"], "globalBatchSize": 1024}}
    many["parallelism"] = {**asked["parallelism"], "microBatches": 1024}
    assert make_plan(spec_of(**many), cluster(1)).strategy.schedule == "1F1B"
