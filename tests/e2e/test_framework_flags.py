"""`runtime.framework`: the script of a framework gets the planner's choice by its own flags, and asserts it.

The scripts are those of examples/frameworks. `FRAMEWORKS_PYTHON` names an interpreter with the frameworks.
"""

from __future__ import annotations

import pytest
import pytest_asyncio

from meshwright.api.labels import API_VERSION, KIND
from meshwright_local.kube.resources import NODES
from tests.e2e import framework_numbers as numbers
from tests.e2e import framework_runs as runs
from tests.e2e.local_stack import merged
from tests.e2e.test_framework_examples import interpreter

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
STEPS = 4
GPU_MEMORY = "nvidia.com/gpu.memory"
SPEC = {
    "model": {"layers": 2, "hiddenSize": 32, "intermediateSize": 128, "heads": 4, "vocabSize": 64},
    "training": {"steps": STEPS, "globalBatchSize": 8, "sequenceLength": 16, "precision": "fp32"},
    "workers": {"image": "frameworks:1", "gpusPerWorker": 2},
}


def objects(name: str, example: str, framework: str, python: str, changes: dict) -> list[dict]:
    """A job with a framework, the script of an example, and a claim."""
    script = (runs.DIRECTORY / example / "train.py").read_text()
    environment = [{"name": key, "value": value} for key, value in {**runs.ENVIRONMENT, "STEPS": str(STEPS)}.items()]
    own = {
        "runtime": {"framework": framework, "command": [python, "/meshwright/scripts/train.py"], "scripts": name},
        "workers": {"env": environment},
        "checkpoint": {"claimName": name, "everySteps": 100},
    }
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"train.py": script}},
        {
            **{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}},
            "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
        },
        {
            **{"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}},
            "spec": merged(merged(SPEC, own), changes),
        },
    ]


@pytest_asyncio.fixture(loop_scope="session")
async def large_gpus(stage):
    """Nodes whose GPUs have the memory that these frameworks reserve on a real GPU."""
    nodes = (await stage.client.list(NODES)).items
    before = {node["metadata"]["name"]: node["metadata"]["labels"].get(GPU_MEMORY) for node in nodes}
    for name in before:
        await stage.client.patch(NODES, name, {"metadata": {"labels": {GPU_MEMORY: "81920"}}})
    yield
    for name, memory in before.items():
        await stage.client.patch(NODES, name, {"metadata": {"labels": {GPU_MEMORY: memory}}})


async def finished(stage, name, items):
    """The status of a job that has trained to its end, and the log of rank 0."""
    await stage.apply(items)
    status = await stage.complete(name, seconds=900)
    output = await stage.log((await stage.pod(name, 0))["metadata"]["name"])
    assert (status.step, status.total_steps) == (STEPS, STEPS)
    assert max(numbers.losses(output)) == STEPS
    return status, output


@pytest.mark.usefixtures("large_gpus")
async def test_megatron_core_gets_the_degrees(stage):
    # The planner chooses what is left out: the pipeline, the micro-batches, the number of replicas.
    changes = {"gpus": 4, "parallelism": {"tensor": 2, "zeroStage": 0}}
    python, name = interpreter("megatron-core"), "flags-megatron"
    status, output = await finished(stage, name, objects(name, "megatron-core", "MegatronLM", python, changes))
    plan = status.plan
    layout = f"GPTModel with TP {plan.tensor} x PP {plan.pipeline}" + (f" x DP {plan.data}" if plan.data > 1 else "")
    assert runs.what_runs(output) == layout
    assert (plan.tensor, plan.tensor * plan.pipeline * plan.data) == (2, plan.world_size)
    ((first, *_),) = numbers.printed_steps(output)
    assert (first.tokens, first.total_steps) == (8 * 16, STEPS), "batch, length and steps are flags"
    assert f"micro-batches {plan.micro_batches}" in output


@pytest.mark.usefixtures("large_gpus")
@pytest.mark.parametrize("stage_of_zero", [1, 2])
async def test_deepspeed_gets_the_configuration(stage, stage_of_zero):
    changes = {"replicas": 2, "parallelism": {"tensor": 1, "pipeline": 1, "zeroStage": stage_of_zero}}
    python, name = interpreter("deepspeed-zero"), f"flags-deepspeed-{stage_of_zero}"
    status, output = await finished(stage, name, objects(name, "deepspeed-zero", "DeepSpeed", python, changes))
    plan = status.plan
    assert runs.what_runs(output) == f"DeepSpeedEngine with ZeRO-{plan.zero_stage}"
    assert plan.zero_stage == stage_of_zero
    micro = 8 // plan.micro_batches // plan.data
    assert f"batch {micro} x {plan.micro_batches} x {plan.data}" in output
