"""Plans: what the spec fixes is checked, what it leaves out is chosen, and each choice says why."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.api.status import PlanStatus
from meshwright.api.training import ActivationCheckpointing
from meshwright.layout import Layout
from meshwright.models.huggingface.reader import to_model_spec
from meshwright.models.huggingface.registry import config_from_architecture
from meshwright.models.presets import PRESETS, resolve
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.copies import rank_copies_bytes, with_copies_memory
from meshwright.planner.cost.frameworks import FRAMEWORKS
from meshwright.planner.cost.memory import memory_by_stage
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright.planner.errors import PlanError
from meshwright.planner.plan import make_plan
from meshwright.planner.search.search_space import divisors, request_tiers
from meshwright.planner.search.spec_request import pinned_request
from meshwright.planner.workload import TrainingJob
from meshwright.protocol.run_config import CommandRun, NativeRun
from meshwright_worker.trainer.train import validate_run
from tests.planner.builders import inventory, node, racks, spec_of

TRAINING = {"steps": 100, "globalBatchSize": 16, "sequenceLength": 128}
DEMO = inventory(*racks(2, 2, 2, memory_mib=2048))
H100 = inventory(*racks(4, 4, 8))
LARGE: dict[str, Any] = {
    "replicas": 2,
    "training": {"steps": 1, "globalBatchSize": 128, "sequenceLength": 4096, "precision": "bf16"},
    "workers": {"image": "worker", "gpusPerWorker": 8},
}


SHARDED = {"tensor": 2, "pipeline": 2, "zeroStage": 3}
COPIES = {"inMemory": True, "copyEverySteps": 10}


def with_memory(memory: str | None) -> dict[str, Any]:
    return {"image": "worker", "gpusPerWorker": 2, **({"resources": {"memory": memory}} if memory else {})}


def test_workers_request_the_host_memory_of_copies() -> None:
    plain = make_plan(spec_of(parallelism=SHARDED, workers=with_memory("2Gi")), DEMO)
    plan = make_plan(spec_of(parallelism=SHARDED, recovery=COPIES, workers=with_memory("2Gi")), DEMO)
    assert plan.memory is not None
    # Two steps of a rank's own state and of a peer's, of fp32 parameters and two moments each.
    fullest = 4 * 1.5 * plan.memory.optimizer * plan.gpus_per_worker
    assert plan.copies_bytes == pytest.approx(fullest, rel=0.01)
    assert plain.worker_request.memory_bytes == 2 << 30
    assert plan.worker_request.memory_bytes == (2 << 30) + plan.copies_bytes
    assert replace(plan.worker_request, memory_bytes=2 << 30) == plain.worker_request
    (reason,) = (reason for reason in plan.reasons if "copies in host memory" in reason)
    gib = plan.copies_bytes / (1 << 30)
    assert f"every 10 steps: {gib:.3g} GiB in each worker, which pods request besides" in reason
    assert f"{2 + gib:.3g} GiB together" in reason
    assert plain.copies_bytes == 0
    assert not any("copies in host" in reason for reason in plain.reasons)


def test_without_a_stated_memory_workers_request_none_for_copies() -> None:
    plan = make_plan(spec_of(parallelism=SHARDED, recovery=COPIES, workers=with_memory(None)), DEMO)
    assert plan.copies_bytes > 0
    assert plan.worker_request.memory_bytes == 0
    assert any("which pods do not request, because `workers.resources.memory` is left out" in r for r in plan.reasons)


def test_copies_are_counted_on_the_stage_with_the_most_state() -> None:
    # The first and the last stage have the tables, and the first stores most activations: copies have none of these.
    work, both = Workload(PRESETS["llama-3-8b"], 4096, 64), Strategy(pipeline=4, data=8, zero_stage=1, micro_batches=8)
    runtime = FRAMEWORKS["meshwright"]
    each = [memory.optimizer for memory in memory_by_stage(work, both, runtime)]
    assert rank_copies_bytes(work.model, both, runtime) == pytest.approx(4 * 1.5 * max(each))
    assert min(each) < max(each)


def test_an_elastic_job_requests_what_copies_take_with_the_fewest_replicas() -> None:
    fields = {"parallelism": SHARDED, "recovery": COPIES, "workers": with_memory("2Gi"), "replicas": 2}
    elastic = spec_of(**fields, elastic={"minReplicas": 1}, checkpoint={"claimName": "c"})
    plan = make_plan(spec_of(**fields), DEMO)
    adapted = plan.with_copies(elastic)
    assert adapted.copies_bytes == pytest.approx(2 * plan.copies_bytes, rel=0.01)
    assert adapted.with_copies(elastic) == adapted
    assert adapted.worker_request.memory_bytes == (2 << 30) + adapted.copies_bytes
    assert with_copies_memory(elastic, adapted.copies_bytes).workers.resources.memory == (
        f"{-(-adapted.worker_request.memory_bytes // (1 << 20))}Mi"
    )


def test_what_the_spec_says_is_what_runs() -> None:
    plan = make_plan(spec_of(parallelism={"tensor": 2, "pipeline": 2, "microBatches": 4}), DEMO)
    assert plan.layout == Layout(2, 2, 2)
    assert plan.strategy.micro_batches == 4
    assert plan.summary == "TP 2 x PP 2 x DP 2"
    assert plan.workers == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert "TP 2: set by `parallelism.tensor`" in plan.reasons


def test_a_configuration_is_planned_as_its_fields_are() -> None:
    config = config_from_architecture(PRESETS["llama-3-8b"])
    told = make_plan(spec_of(model={"huggingFace": json.dumps(config)}, **LARGE), H100)
    fields = make_plan(spec_of(model=to_model_spec(PRESETS["llama-3-8b"]).wire(), **LARGE), H100)
    assert (told.strategy, told.memory) == (fields.strategy, fields.memory)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"model_type": "bert"},
            "spec: `model.huggingFace`: `model_type` 'bert' is not supported: use one of",
        ),
        ({"num_key_value_heads": 5}, "spec.model.kvHeads: must divide `model.heads`"),
        ({"vocab_size": 200}, "spec.model.vocabSize: must be at least 257 with `data.tokenizer: Byte`"),
        ({"rope_theta": 10**400}, "spec: `model.huggingFace`: `rope_theta` is too large, it has 401 digits"),
        ({"vocab_size": 1 << 21}, "spec: `model.huggingFace`: its numbers make `vocabSize: 2097152`: "),
    ],
)
def test_a_configuration_that_cannot_run_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    config = {**config_from_architecture(PRESETS["llama-3-8b"]), **change}
    with pytest.raises(PlanError, match=named) as refused:
        make_plan(spec_of(model={"huggingFace": json.dumps(config)}, **LARGE), H100)
    assert refused.value.reason == "InvalidSpec"


def test_a_configurations_positions_hold_the_sequence() -> None:
    config = {**config_from_architecture(PRESETS["gpt2"]), "n_positions": 64}
    with pytest.raises(PlanError, match="spec.model.positions: must be at least `training.sequenceLength`"):
        make_plan(spec_of(model={"huggingFace": json.dumps(config)}), DEMO)


def test_a_small_model_is_not_split_at_all() -> None:
    plan = make_plan(spec_of(workers={"image": "w", "gpusPerWorker": 1}), DEMO)
    assert plan.layout == Layout(1, 1, 2)
    assert plan.strategy.micro_batches == 1
    assert any("fits without a pipeline" in reason for reason in plan.reasons)


def test_the_smallest_tensor_degree_that_fits_memory_is_chosen_and_explained() -> None:
    plan = make_plan(spec_of(model={"preset": "llama-3-8b"}, parallelism={"zeroStage": 0}, **LARGE), H100)
    assert plan.layout == Layout(4, 1, 2)
    assert plan.memory is not None
    assert plan.memory.total < 0.97 * 81559 * 2**20
    assert any("TP 2 needs" in reason and "77.3 GiB are usable" in reason for reason in plan.reasons)


def test_a_model_beyond_one_domain_gets_a_pipeline_with_enough_micro_batches() -> None:
    plan = make_plan(spec_of(model={"preset": "llama-3-70b"}, **LARGE), H100)
    assert plan.layout.tensor == 8
    assert plan.layout.pipeline > 1
    assert plan.strategy.micro_batches >= 4 * plan.layout.pipeline
    assert any("an NVLink domain of 8 GPUs alone does not hold a replica" in reason for reason in plan.reasons)


def test_sharding_over_replicas_needs_less_splitting() -> None:
    asked = {**LARGE, "replicas": 8, "workers": {"image": "worker", "gpusPerWorker": 2}}
    plain, sharded, chosen = (
        make_plan(spec_of(model={"preset": "llama-3-8b"}, parallelism=parallelism, **asked), H100)
        for parallelism in ({"zeroStage": 0}, {"zeroStage": 3}, {})
    )
    assert sharded.layout.replica_size < plain.layout.replica_size
    assert chosen.layout.replica_size == sharded.layout.replica_size
    assert chosen.strategy.zero_stage > 0
    assert any(reason.startswith(f"ZeRO-{chosen.strategy.zero_stage}: ") for reason in chosen.reasons)


def test_a_tied_model_never_gets_a_pipeline() -> None:
    plan = make_plan(spec_of(model={"preset": "llama-3.2-3b"}, **LARGE), H100)
    assert plan.layout.pipeline == 1


def test_gpus_of_different_memory_are_used_where_they_suffice() -> None:
    mixed = inventory(*racks(1, 2, 8, memory_mib=15360), *(node(f"big{i}", rack="big") for i in range(2)))
    plan = make_plan(spec_of(model={"preset": "llama-3-8b"}, **LARGE), mixed)
    assert plan.layout == Layout(4, 1, 2)


def test_unknown_memory_is_not_held_against_a_plan() -> None:
    plan = make_plan(spec_of(model={"preset": "llama-3-8b"}, **LARGE), inventory(node("n", memory_mib=None)))
    assert any("the memory of the GPUs is not known" in reason for reason in plan.reasons)


@pytest.mark.parametrize(
    ("model", "batch", "count"), [("tiny", 16, 1), ("llama-3-8b", 16, 8), ("llama-3.2-1b", 64, 32)]
)
def test_micro_batches_on_gpus_of_unknown_memory_fit_the_smallest_gpu_if_any_do(
    model: str, batch: int, count: int
) -> None:
    training = {"steps": 1, "globalBatchSize": batch, "sequenceLength": 2048 if model != "tiny" else 128}
    nodes = inventory(node("n", memory_mib=None))
    plan = make_plan(spec_of(model={"preset": model}, training={**training, "precision": "bf16"}), nodes)
    assert plan.strategy.micro_batches == count
    (reason,) = (one for one in plan.reasons if "micro-batch" in one)
    assert ("the fewest that fit in 14.5 GiB" in reason) == (model == "tiny")
    assert "set `parallelism.microBatches`" in reason


def test_replicas_fill_workers_when_nothing_else_asks_for_more() -> None:
    plan = make_plan(spec_of(replicas=1, workers={"image": "w", "gpusPerWorker": 2}), DEMO)
    assert plan.layout == Layout(2, 1, 1)
    assert any("fills workers of 2 GPUs" in reason for reason in plan.reasons)


def test_a_plan_tells_which_matrices_get_no_adapter() -> None:
    lora = {"targets": ["Query", "Gate"]}
    plan = make_plan(spec_of(model={"preset": "tiny-mixture"}, training={**TRAINING, "lora": lora}), DEMO)
    assert any("no adapter for Gate" in reason for reason in plan.reasons)


@pytest.mark.parametrize(
    ("changes", "reason", "text", "cluster"),
    [
        ({"parallelism": {"tensor": 4, "pipeline": 1}}, "InvalidSpec", "`model.kvHeads`", False),
        (
            {"model": {"preset": "tiny-mixture"}, "training": {**TRAINING, "lora": {"targets": ["Gate"]}}},
            "InvalidSpec",
            "spec.training.lora.targets: must contain a matrix that every layer has",
            False,
        ),
        ({"model": {"preset": "lama-3-8b"}}, "InvalidSpec", "did you mean `llama-3-8b`", False),
        ({"workers": {"image": "w", "gpusPerWorker": 8}}, "NoNodeLargeEnough", "largest usable node has 2 GPUs", True),
        (
            {"model": {"preset": "llama-3-8b"}, "parallelism": {"tensor": 8}},
            "NoDomainWideEnough",
            "widest NVLink domain has 2 GPUs",
            True,
        ),
        ({"model": {"preset": "llama-3-8b"}}, "OutOfMemory", "needs the least memory", True),
        (
            {"replicas": 1, "parallelism": {"tensor": 1, "pipeline": 1}},
            "InvalidSpec",
            "spec.workers.gpusPerWorker: must divide the world size",
            False,
        ),
    ],
)
def test_a_plan_that_is_not_possible_says_why(changes: dict[str, Any], reason: str, text: str, cluster: bool) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(spec_of(**changes), DEMO)
    assert text in str(caught.value)
    assert (caught.value.reason, caught.value.depends_on_cluster) == (reason, cluster)


def test_without_nodes_stated_degrees_plan_and_open_ones_wait() -> None:
    stated = make_plan(spec_of(parallelism={"tensor": 2, "pipeline": 2, "microBatches": 4}), Inventory())
    assert stated.layout == Layout(2, 2, 2)
    with pytest.raises(PlanError, match="`parallelism.microBatches` left out, and no usable GPU node") as caught:
        make_plan(spec_of(parallelism={"tensor": 2, "pipeline": 2}), Inventory())
    assert caught.value.depends_on_cluster


def test_open_degrees_without_a_usable_node_say_which_nodes_are_excluded_and_why() -> None:
    wanted = spec_of(parallelism={}, workers={"image": "i", "gpusPerWorker": 8, "nodeSelector": {"pool": "a100"}})
    nodes = [node(f"n{index}", labels={"pool": "h100"}) for index in range(4)]
    found = Inventory.from_objects(nodes, [], node_selector={"pool": "a100"})
    with pytest.raises(PlanError, match=r"Excluded nodes: 4 \(4 label pool is h100, not a100\)"):
        make_plan(wanted, found)


def test_no_degree_fills_the_workers() -> None:
    odd = {"layers": 2, "hiddenSize": 64, "intermediateSize": 96, "heads": 1, "vocabSize": 300}
    training = {"steps": 1, "globalBatchSize": 1, "sequenceLength": 64}
    with pytest.raises(PlanError, match=r"no tensor and pipeline degree gives full workers of 2 GPUs"):
        make_plan(spec_of(replicas=1, model=odd, training=training), DEMO)


def test_a_running_job_keeps_its_degrees_whatever_the_cluster_became() -> None:
    spec = spec_of(model={"preset": "llama-3-70b"}, **LARGE)
    first = make_plan(spec, H100)
    again = make_plan(spec, Inventory(), first.to_status())
    assert again == first
    on_other = make_plan(spec, inventory(node("n", gpus=1)), first.to_status())
    assert on_other == first


@pytest.mark.parametrize("strategy", ["ZeRO", "FSDP", "SHARD_GRAD_OP", "FULL_SHARD"])
def test_a_running_job_of_one_replica_keeps_its_degrees_with_any_strategy(strategy: str) -> None:
    """One rank has nothing to shard: its plan has ZeRO stage 0, which the strategy does not allow elsewhere."""
    spec = spec_of(replicas=1, parallelism={"dataParallel": {"strategy": strategy}})
    first = make_plan(spec, DEMO)
    again = make_plan(spec, Inventory(), first.to_status())
    assert again == first
    assert again.run_config(spec) == first.run_config(spec)


def test_a_running_job_follows_a_new_number_of_replicas() -> None:
    spec = spec_of(parallelism={"tensor": 2, "pipeline": 2})
    first = make_plan(spec, DEMO)
    again = make_plan(spec.model_copy(update={"replicas": 1}), DEMO, first.to_status())
    assert again.layout == Layout(2, 2, 1)
    assert again.strategy.micro_batches == first.strategy.micro_batches


def test_degrees_that_the_spec_no_longer_allows_are_chosen_again() -> None:
    kept = PlanStatus(tensor=3, pipeline=1, data=2, micro_batches=1, world_size=6, workers=3)
    assert make_plan(spec_of(), DEMO, kept).layout.tensor == 1
    damaged = PlanStatus(tensor=0, pipeline=0, data=0, micro_batches=0, world_size=0, workers=0)
    assert make_plan(spec_of(), DEMO, damaged).layout == make_plan(spec_of(), DEMO).layout


def command_spec(**changes: Any) -> Any:
    base: dict[str, Any] = {"model": None, "data": None, "training": None, "replicas": 4}
    return spec_of(**{**base, "runtime": {"command": ["python", "train.py"]}, **changes})


def test_a_command_gets_what_it_asks_for_and_no_estimate() -> None:
    plan = make_plan(command_spec(), DEMO)
    assert plan.layout == Layout(1, 1, 4)
    assert plan.memory is None
    assert plan.architecture is None
    run = plan.run_config(command_spec())
    assert isinstance(run, CommandRun)
    assert run.command == ["python", "train.py"]
    assert make_plan(command_spec(), Inventory(), plan.to_status()).layout == plan.layout
    with pytest.raises(PlanError, match="largest usable node"):
        make_plan(command_spec(replicas=8, workers={"image": "w", "gpusPerWorker": 8}), DEMO)


def test_a_command_keeps_its_checkpoint_fields_empty() -> None:
    spec = command_spec(checkpoint={"claimName": "c"})
    run = make_plan(spec, DEMO).run_config(spec)
    assert run.checkpoint is not None
    assert run.checkpoint.every_steps is None


def test_the_run_config_leaves_nothing_open() -> None:
    spec = spec_of(checkpoint={"claimName": "c"})
    run = make_plan(spec, DEMO).run_config(spec)
    wire = run.wire()
    assert isinstance(wire["parallelism"], dict)
    for name in ("tensor", "pipeline", "context", "expert", "microBatches"):
        assert wire["parallelism"][name] == wire[name]
    assert isinstance(run, NativeRun)
    assert run.checkpoint is not None
    assert (run.checkpoint.every_steps, run.checkpoint.keep) == (100, 2)


def test_status_carries_the_plan() -> None:
    plan = make_plan(spec_of(parallelism={"tensor": 2, "pipeline": 2}), DEMO)
    status = plan.to_status()
    assert (status.tensor, status.pipeline, status.data, status.world_size, status.workers) == (2, 2, 2, 8, 4)
    assert plan.memory is not None
    assert status.memory_per_rank_bytes == plan.memory.total
    assert status.parameters == plan.architecture.parameters if plan.architecture else False
    assert status.summary == plan.summary
    assert list(plan.reasons) == status.reasons


def test_other_numbers_of_replicas_must_fill_workers_and_divide_the_batch() -> None:
    plan = make_plan(spec_of(parallelism={"tensor": 2, "pipeline": 2, "microBatches": 4}), DEMO)
    assert [r for r in range(6) if plan.allows_replicas(r)] == [1, 2, 4]


@given(
    st.fixed_dictionaries(
        {
            "layers": st.integers(1, 8),
            "hiddenSize": st.sampled_from([64, 128]),
            "intermediateSize": st.sampled_from([96, 192, 200]),
            "heads": st.sampled_from([1, 2, 4, 8]),
            "vocabSize": st.sampled_from([257, 320]),
        }
    ),
    st.integers(1, 4),
    st.sampled_from([1, 2, 6, 8, 16]),
    st.sampled_from([8, 30, 64]),
    st.fixed_dictionaries(
        {},
        optional={
            "tensor": st.sampled_from([1, 2, 4]),
            "pipeline": st.integers(1, 4),
            "microBatches": st.integers(1, 8),
            "sequence": st.booleans(),
            "zeroStage": st.sampled_from([0, 2, 3]),
            "context": st.sampled_from([1, 2, 3]),
            "contextMethod": st.sampled_from(["Ring", "RingZigZag", "Ulysses", "AllGather"]),
        },
    ),
    st.sampled_from([1, 2]),
)
@settings(max_examples=100, deadline=None)
def test_every_plan_is_one_the_runtime_accepts(
    model: dict[str, int], replicas: int, per_replica: int, length: int, parallelism: dict[str, Any], gpus: int
) -> None:
    spec = spec_of(
        replicas=replicas,
        model=model,
        training={"steps": 1, "globalBatchSize": replicas * per_replica, "sequenceLength": length},
        parallelism=parallelism,
        workers={"image": "w", "gpusPerWorker": gpus},
    )
    try:
        plan = make_plan(spec, H100)
    except PlanError:
        return
    validate_run(plan.run_config(spec))
    assert make_plan(spec, Inventory(), plan.to_status()).layout == plan.layout


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 360])
def test_divisors_are_all_and_ascending(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_selective_checkpointing_of_compiled_layers_is_left_to_who_asks_for_it() -> None:
    def tried(**training: Any) -> list[ActivationCheckpointing | None]:
        spec = spec_of(training={**TRAINING, **training})
        assert spec.model is not None
        request = pinned_request(spec, TrainingJob.of(spec, resolve(spec.model)), None)
        return [one.pins.checkpointing for one in next(request_tiers(request))]

    assert ActivationCheckpointing.SELECTIVE in tried()
    assert ActivationCheckpointing.SELECTIVE not in tried(compile=True)
    assert tried(compile=True, activationCheckpointing="Selective") == [ActivationCheckpointing.SELECTIVE]
