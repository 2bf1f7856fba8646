"""The planner chooses only layouts that ranks run. It reports a layout that they would reject before a pod exists."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.errors import PlanError
from meshwright.planner.plan import Plan, make_plans
from meshwright.rules.validation import check_spec
from meshwright_worker.trainer.train import validate_run
from tests.planner.builders import inventory, racks, spec_of

PRODUCT = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
CLUSTER = inventory(*racks(1, 8, 8, labels=PRODUCT, memory_mib=81559))
SMALL = {"layers": 12, "heads": 2, "kvHeads": 1, "hiddenSize": 16, "intermediateSize": 128, "vocabSize": 257}
SPARSE = {
    **SMALL,
    "kvHeads": 2,
    "vocabSize": 264,
    "mixture": {"experts": 8, "perToken": 2, "intermediateSize": 16, "sharedIntermediateSize": 16},
}
MIXTRAL = {"preset": "mixtral-8x7b"}
SELECTIVE = {"activationCheckpointing": "Selective", "compile": True}


def asked(**changes: Any) -> ParallelTrainingJobSpec:
    """A job that the API accepts; `training` is added to what every job says of it."""
    training = {"steps": 10, "globalBatchSize": 64, "sequenceLength": 64, "precision": "bf16"}
    whole = {
        "replicas": 2,
        "model": {"preset": "llama-3-8b"},
        "workers": {"image": "w", "gpusPerWorker": 1},
        "parallelism": {},
        **changes,
        "training": {**training, **changes.get("training", {})},
    }
    spec = spec_of(**whole)
    assert not check_spec(spec)
    return spec


def chosen(spec: ParallelTrainingJobSpec, nodes: Inventory = CLUSTER) -> list[Plan]:
    """What may be chosen, every one of which ranks run."""
    plans = make_plans(spec, nodes)
    for plan in plans:
        validate_run(plan.run_config(spec))
    return plans


@pytest.mark.parametrize(
    ("job", "holds"),
    [
        (
            {"training": {"outer": {"method": "LocalSGD", "islands": 2}}, "parallelism": {"zeroStage": 3}},
            lambda plan: plan.layout.expert == 1,
        ),
        (
            {"parallelism": {"zeroStage": 3, "dataParallel": {"shardSize": 2}}},
            lambda plan: plan.layout.expert == 1,
        ),
        (
            {"model": SPARSE, "parallelism": {"zeroStage": 1}},
            lambda plan: (plan.layout.expert, plan.layout.tensor) == (1, 1),
        ),
    ],
    ids=["experts would span islands", "experts and shardSize", "flat shards"],
)
def test_experts_are_left_whole_where_they_cannot_be_split(job: dict[str, Any], holds: Any) -> None:
    assert all(holds(plan) for plan in chosen(asked(**{"model": MIXTRAL, "replicas": 4, **job})))


@pytest.mark.parametrize(
    "job",
    [
        {"replicas": 4, "model": SMALL, "parallelism": {"pipeline": 2, "sequence": False, "microBatches": 8}},
        {"training": {"sequenceLength": 8192}},
    ],
    ids=["schedule left out", "tensor left out"],
)
def test_compiled_layers_that_are_recomputed_in_part_stay_whole(job: dict[str, Any]) -> None:
    plans = chosen(asked(**{**job, "training": {**job.get("training", {}), **SELECTIVE}}))
    assert all(plan.layout.tensor == 1 for plan in plans)


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (
            {"model": MIXTRAL, "replicas": 4, "parallelism": {"zeroStage": 1}, "training": {"globalBatchSize": 16}},
            "is not supported with a `model.mixture` whose experts are split",
        ),
        (
            {"model": {"preset": "llama-3-70b"}, "replicas": 1, "parallelism": {"schedule": "PipeDream2BW"}},
            "`training.optimizer.gradientClip: 1.0` must be 0 with `PipeDream` and `PipeDream2BW`",
        ),
        (
            {"model": {"preset": "gpt2"}, "parallelism": {"zeroStage": 1, "pipeline": 2}},
            "is not supported with `model.tieEmbeddings` in a pipeline",
        ),
        (
            {"replicas": 1, "training": {"parameterOffload": True}, "parallelism": {"zeroStage": 3}},
            "`training.parameterOffload: true` needs",
        ),
        (
            {"training": {"outer": {"method": "DiLoCo"}, "optimizer": {"offload": "CPU"}}},
            "`training.outer` needs `training.optimizer.name: AdamW`",
        ),
    ],
)
def test_what_ranks_refuse_in_every_layout_is_told_before_any_pod(job: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=r".") as caught:
        make_plans(asked(**job), CLUSTER)
    assert caught.value.reason == "InvalidSpec"
    assert text in str(caught.value)


FAULTS = {
    "activationCheckpointing": ["None", "Full", "Selective"],
    "compile": [True],
    "precision": ["fp32", "fp16"],
    "outer": [{"method": "LocalSGD", "islands": 2}, {"method": "DiLoCo", "islands": 2}],
    "fp8": [{}],
    "attentionDropout": [0.1],
    "parameterOffload": [True],
    "masterWeights": [False],
    "optimizer": [{"name": "Muon"}, {"offload": "CPU"}, {"gradientClip": 0}],
    "sequenceLength": [8, 4096],
}
DEGREES = {
    "zeroStage": [1, 2, 3],
    "schedule": ["PipeDream2BW", "DualPipe", "ZBV", "Interleaved1F1B"],
    "tensor": [1, 2],
    "pipeline": [2, 4],
    "context": [2],
    "expert": [2, 4],
    "microBatches": [8, 16],
    "dataParallel": [{"shardSize": 2}, {"strategy": "FSDP"}, {"reshardSize": 2}],
}


def any_job(source: random.Random) -> dict[str, Any]:
    """A job that leaves most degrees out, and asks for what does not go with all of them."""

    def some(values: dict[str, list[Any]]) -> dict[str, Any]:
        return {name: source.choice(strategy) for name, strategy in values.items() if source.random() < 0.25}

    return {
        "replicas": source.choice([1, 2, 4]),
        "model": {**source.choice([SMALL, SPARSE]), **some({"tieEmbeddings": [True]})},
        "training": some(FAULTS),
        "parallelism": some(DEGREES),
    }


def test_whatever_is_chosen_runs() -> None:
    source = random.Random(7)
    outcomes: Counter[str] = Counter()
    for _ in range(60):
        job = any_job(source)
        try:
            spec = asked(**job)
        except AssertionError:
            outcomes["rejected at admission"] += 1
            continue
        outcomes[outcome(spec)] += 1
    # Admission asks the same rules: little is left that only a planner sees.
    assert set(outcomes) == {"runs", "InvalidSpec", "rejected at admission"}
    assert outcomes["runs"] > 20
    assert outcomes["rejected at admission"] > 20


def outcome(spec: ParallelTrainingJobSpec) -> str:
    """`runs`, or why there is no plan."""
    try:
        chosen(spec)
    except PlanError as error:
        return error.reason
    return "runs"


@pytest.mark.parametrize(("weight", "fits"), [(0.0001, False), (0.002, True)])
def test_a_corpus_that_would_get_no_sample_is_refused_before_there_is_a_pod(weight: float, fits: bool) -> None:
    corpora = [{"path": "web", "weight": 1}, {"path": "code", "weight": weight}]
    spec = asked(model=SMALL, data={"source": "Files", "claimName": "text", "mixture": corpora})
    if fits:
        assert chosen(spec)
        return
    with pytest.raises(PlanError, match="`data.mixture` must have no weight below a thousandth"):
        make_plans(spec, CLUSTER)
