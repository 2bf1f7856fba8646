"""Plans for other frameworks: only what a framework can express is planned, and what it does not take is named."""

from __future__ import annotations

import base64
import json
from itertools import islice
from typing import Any

import pytest
import yaml

from meshwright.api.parsing import parse_spec
from meshwright.api.spec import Framework
from meshwright.models.presets import PRESETS
from meshwright.planner.cost.frameworks import FRAMEWORKS
from meshwright.planner.errors import PlanError
from meshwright.planner.frameworks.of_spec import target_of
from meshwright.planner.frameworks.planning import launch_of
from meshwright.planner.frameworks.registry import TARGETS
from meshwright.planner.frameworks.target import Launch
from meshwright.planner.plan import Plan, make_plan, make_plans
from meshwright.planner.workload import ACCOUNTS, TrainingJob
from meshwright.protocol.run_config import CommandRun
from meshwright.rules.validation import check_spec
from tests.planner.frameworks.plans import cluster, job, planned


def launched(name: str, raw: dict[str, Any]) -> tuple[Plan, Launch]:
    spec = parse_spec(raw)
    plan = make_plans(spec, cluster(), max_plans=1, target=TARGETS[name])[0]
    assert plan.architecture is not None
    return plan, launch_of(spec, plan.architecture, plan.strategy, TARGETS[name])


def value(launch: Launch, flag: str) -> str:
    return launch.command[launch.command.index(flag) + 1]


@pytest.mark.parametrize("name", TARGETS)
def test_every_plan_can_be_expressed_and_fits_the_batch(name: str) -> None:
    target = TARGETS[name]
    assert target.account in FRAMEWORKS
    for one in islice(planned(target, seed=1), 5):
        strategy, model = one.plan.strategy, one.plan.architecture
        assert model is not None
        assert target.strategy_problem(model, strategy) == ""
        assert strategy.micro_batch_size * strategy.micro_batches * strategy.data == 256
        assert one.plan.estimate is not None


def test_megatron_stages_of_different_sizes_are_written_as_a_layout() -> None:
    asked = {"tensor": 2, "pipeline": 4, "layerSplit": [7, 9, 9, 7], "schedule": "1F1B", "zeroStage": 1}
    plan, launch = launched("megatron-lm", job("llama-3.1-8b", asked))
    assert value(launch, "--pipeline-model-parallel-layout") == "|".join(
        ["E" + 7 * "t", 9 * "t", 9 * "t", 7 * "t" + "L"]
    )
    assert "--use-distributed-optimizer" not in launch.command, "one replica has nothing to shard over"
    assert "no equivalent: spec.data.source" in launch.notes
    assert plan.strategy.world_size == 8


def test_virtual_stages_sharding_and_experts_of_megatron() -> None:
    asked = {"tensor": 2, "pipeline": 2, "schedule": "Interleaved1F1B", "virtualStages": 4, "zeroStage": 0, "expert": 4}
    _, launch = launched("megatron-lm", job("mixtral-8x7b", asked, replicas=8))
    assert value(launch, "--num-virtual-stages-per-pipeline-rank") == "4"
    assert value(launch, "--expert-model-parallel-size") == "4"
    assert value(launch, "--num-experts") == "8"
    _, launch = launched("megatron-lm", job("llama-2-7b", {"tensor": 2, "pipeline": 2, "zeroStage": 1}, replicas=8))
    assert "--use-distributed-optimizer" in launch.command


def test_pieces_of_torchtitan() -> None:
    shards = {"tensor": 1, "pipeline": 2, "zeroStage": 3, "dataParallel": {"shardSize": 8}, "schedule": "1F1B"}
    plan, launch = launched("torchtitan", job("llama-3.1-8b", shards, replicas=16))
    assert value(launch, "--parallelism.data_parallel_replicate_degree") == "2"
    assert value(launch, "--parallelism.data_parallel_shard_degree") == "8"
    strategy = plan.strategy
    local = strategy.micro_batches * strategy.micro_batch_size
    assert value(launch, "--training.local_batch_size") == str(local)


def test_configurations_are_files() -> None:
    plan, launch = launched("deepspeed", job("llama-2-7b", {"tensor": 1, "pipeline": 1, "zeroStage": 3}, replicas=8))
    config = json.loads(launch.files["ds_config.json"])
    assert config["zero_optimization"] == {"stage": 3}
    assert config["train_batch_size"] == 256
    assert config["gradient_accumulation_steps"] == plan.strategy.micro_batches
    _, launch = launched("nanotron", job("llama-2-7b", {"tensor": 2, "pipeline": 2}, replicas=2))
    asked = yaml.safe_load(launch.files["nanotron.yaml"])["parallelism"]
    assert (asked["tp"], asked["pp"], asked["dp"]) == (2, 2, 2)


@pytest.mark.parametrize(
    ("name", "model", "parallelism", "message"),
    [
        ("deepspeed", "llama-2-7b", {"pipeline": 2, "tensor": 1, "zeroStage": 3}, "incompatible with its pipeline"),
        ("nanotron", "mistral-7b", {}, "`model.slidingWindow` has no key"),
        ("megatron-lm", "gemma-3-4b", {}, "a gated feed-forward layer with `GELUTanh` has no flag"),
        ("nanotron", "llama-3.1-8b", {}, "rescaled rotary positions are not written"),
        ("nanotron", "llama-2-7b", {"zeroStage": 3}, "`parallelism.zeroStage` 2 and 3 have no counterpart"),
        ("torchtitan", "llama-2-7b", {}, "`llama-2-7b` has no configuration in torchtitan: use one of"),
        ("torchtitan", "llama-3.1-8b", {"zeroStage": 1}, "`parallelism.zeroStage: 1` has no counterpart"),
        ("megatron-lm", "llama-3.1-8b", {"pipeline": 2, "schedule": "ZBV"}, "`parallelism.schedule: ZBV` has no flag"),
    ],
)
def test_what_a_framework_cannot_express_is_rejected_with_the_field(
    name: str, model: str, parallelism: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=f"{name}: .*{message}"):
        launched(name, job(model, parallelism, replicas=8))


def test_settings_that_a_framework_does_not_take_are_named() -> None:
    raw = job("llama-2-7b", {}, replicas=8)
    raw["spec"]["training"]["evaluation"] = {"samples": 8}
    raw["spec"]["data"]["heldOut"] = 0.05
    raw["spec"]["training"]["lossChunkTokens"] = 128
    _, launch = launched("nanotron", raw)
    assert "no equivalent: spec.training.evaluation.samples" in launch.notes
    assert "no equivalent: spec.training.lossChunkTokens" in launch.notes


def framework_job(framework: str, command: list[str], parallelism: dict[str, Any], **spec: Any) -> dict[str, Any]:
    raw = job("llama-3.1-8b", parallelism, **spec)
    del raw["spec"]["data"]
    raw["spec"]["runtime"] = {"framework": framework, "command": command}
    return raw


@pytest.mark.parametrize("framework", ACCOUNTS)
def test_a_job_of_a_framework_is_planned_with_its_account_and_its_command_gets_the_flags(framework: Framework) -> None:
    command = ["python", "train.py", "--mine"]
    spec = parse_spec(framework_job(framework, command, {"tensor": 2, "zeroStage": 0}, replicas=8))
    assert not check_spec(spec)
    plan = make_plans(spec, cluster(), max_plans=1)[0]
    target = target_of(spec)
    assert target is not None
    assert TrainingJob.of(spec, PRESETS["llama-3.1-8b"]).runtime == FRAMEWORKS[target.account]
    assert plan.estimate is not None
    assert (
        plan.estimate.seconds
        != make_plans(
            parse_spec(job("llama-3.1-8b", {"tensor": 2, "zeroStage": 0}, replicas=8)), cluster(), max_plans=1
        )[0].estimate.seconds
    )  # type: ignore[union-attr]
    run = plan.run_config(spec)
    assert isinstance(run, CommandRun)
    words = run.command[2:] if run.command[0] == "env" else run.command
    assert words[:3] == command
    _, launch = launched(target.name, job("llama-3.1-8b", {"tensor": 2, "zeroStage": 0}, replicas=8))
    assert tuple(words[3:]) == launch.flags
    assert (run.tensor, run.data_parallel, run.micro_batches) == (2, 8, plan.strategy.micro_batches)
    assert "--mock-data" not in words, "the data is named in the command"


@pytest.mark.parametrize(
    ("framework", "degrees", "differs"),
    [
        ("TorchTitan", {"tensor": 2, "pipeline": 2}, True),
        ("TorchTitan", {"tensor": 2, "pipeline": 1}, None),
        ("DeepSpeed", {"tensor": 1, "pipeline": 2}, True),
        ("MegatronLM", {"tensor": 2, "pipeline": 2}, None),
    ],
)
def test_ranks_get_the_numbers_of_the_framework(framework: str, degrees: dict[str, int], differs: bool | None) -> None:
    spec = parse_spec(framework_job(framework, ["python", "train.py"], degrees, replicas=4))
    run = make_plans(spec, cluster(), max_plans=1)[0].run_config(spec)
    assert isinstance(run, CommandRun)
    assert run.stages_outermost is differs
    target = target_of(spec)
    assert target is not None
    _, launch = launched(target.name, job("llama-3.1-8b", degrees, replicas=4))
    assert any("numbers ranks by stage first" in note for note in launch.notes) == bool(differs)


def test_deepspeed_gets_its_configuration_in_the_command() -> None:
    spec = parse_spec(framework_job("DeepSpeed", ["python", "train.py"], {"zeroStage": 3}, replicas=8))
    run = make_plans(spec, cluster(), max_plans=1)[0].run_config(spec)
    assert isinstance(run, CommandRun)
    config = json.loads(base64.urlsafe_b64decode(run.command[-1]))
    assert config["zero_optimization"]["stage"] == 3


def test_a_running_job_of_a_framework_keeps_its_layout() -> None:
    spec = parse_spec(framework_job("MegatronLM", ["python", "pretrain_gpt.py"], {}, replicas=8))
    first = make_plans(spec, cluster(), max_plans=1)[0]
    again = make_plan(spec, cluster(2), keep=first.to_status())
    assert again.strategy.layout == first.strategy.layout
    assert again.run_config(spec) == first.run_config(spec)


def test_fields_that_a_framework_needs() -> None:
    raw = framework_job("MegatronLM", ["x"], {}, replicas=8)
    del raw["spec"]["training"]
    (problem,) = [one for one in check_spec(parse_spec(raw)) if one.field == "runtime.framework"]
    assert "needs `runtime.command`, `model` and `training`" in problem.message


@pytest.mark.parametrize(("parallelism", "ranks"), [({}, 4), ({"tensor": 2}, 4), ({"tensor": 4, "pipeline": 2}, 8)])
def test_a_replica_group_has_whole_workers(parallelism: dict[str, int], ranks: int) -> None:
    fields: dict[str, Any] = {
        "replicas": 8,
        "parallelism": parallelism,
        "workers": {"image": "x", "gpusPerWorker": 4},
        "runtime": {"framework": "TorchFT", "command": ["python", "train.py"]},
    }
    spec = parse_spec({"metadata": {"name": "x"}, "spec": fields})
    assert not check_spec(spec)
    run = make_plan(spec, cluster()).run_config(spec)
    assert isinstance(run, CommandRun)
    assert (run.replica_group_ranks, run.command) == (ranks, ["python", "train.py"])
