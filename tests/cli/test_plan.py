"""`meshwright plan`: what it prints, and that it is what the operator would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from meshwright.api.parsing import parse_spec
from meshwright.planner.cluster.inventory import Inventory
from meshwright_cli.main import main
from meshwright_cli.plan.inventory_file import read_nodes
from tests.golden.planner.jobs import merged
from tests.planner.builders import choose_plan

ROOT = Path(__file__).parents[2]
H100 = "NVIDIA-H100-80GB-HBM3"


def job(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "meshwright.dev/v1alpha1",
        "kind": "ParallelTrainingJob",
        "metadata": {"name": "llama"},
        "spec": {
            "replicas": 2,
            "model": {"preset": "llama-3-8b"},
            "training": {"steps": 100, "globalBatchSize": 64, "sequenceLength": 8192, "precision": "bf16"},
            "workers": {"image": "worker:1", "gpusPerWorker": 8},
            **spec,
        },
    }


MUON = {
    "training": {"steps": 1, "globalBatchSize": 64, "sequenceLength": 64, "optimizer": {"name": "Muon"}},
}


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    documents = yaml.safe_load_all((ROOT / "examples/planner-chooses.yaml").read_text())
    example = next(one for one in documents if one["kind"] == "ParallelTrainingJob")
    wanted = job(data=example["spec"]["data"])
    wanted["spec"]["parallelism"] = {"zeroStage": 2}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(wanted))
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, words)])


def test_the_manifest_is_an_argument_or_an_option(manifest):
    by_argument, by_option = run(manifest, "--gpus", 16), run("-f", manifest, "--gpus", 16)
    assert by_argument.exit_code == 0
    assert by_argument.output == by_option.output
    for wrong in (run(), run(manifest, "-f", manifest)):
        assert wrong.exit_code == 2
        assert "exactly one manifest is needed: `plan FILE`, or `plan -f FILE`" in wrong.output


def test_the_manifest_may_come_from_standard_input(manifest):
    words = ["plan", "-f", "-", "--gpus", "16"]
    assert CliRunner().invoke(main, words, input=manifest.read_text()).output == run(manifest, "--gpus", 16).output
    empty = CliRunner().invoke(main, words, input="")
    assert (empty.exit_code, empty.output) == (1, "Error: -: expected exactly one ParallelTrainingJob, found 0\n")


@pytest.mark.parametrize(
    "text",
    ["metadata: {creationTimestamp: 2020-13-41}", f"spec: {{replicas: {'9' * 5000}}}", "[" * 500],
    ids=["no such day", "digits", "depth"],
)
def test_yaml_that_python_cannot_represent_is_reported(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"kind: ParallelTrainingJob\n{text}\n" if text[0] != "[" else text)
    for words in (("-f", path), ("-f", ROOT / "examples/planner-chooses.yaml", "--inventory", path)):
        result = run(*words)
        assert result.exit_code == 1
        assert "job.yaml: " in result.output, result.exception


def test_no_more_gpus_are_assumed_than_can_be_listed(manifest: Path) -> None:
    result = run("-f", manifest, "--gpus", 1_000_000)
    assert result.exit_code == 1
    assert "--gpus: must be at most 100000 nodes of 8" in result.output


def test_islands_are_planned_with_what_else_there_would_be(manifest: Path) -> None:
    wanted = yaml.safe_load(manifest.read_text())
    wanted["spec"]["replicas"] = 4
    wanted["spec"]["parallelism"] = {}
    wanted["spec"]["training"] |= {"outer": {"method": "DiLoCo"}, "sequenceLength": 4096}
    manifest.write_text(yaml.safe_dump(wanted))
    result = run("-f", manifest, "--gpus", 32)
    assert result.exit_code == 0, result.output
    assert "Not chosen" in result.output


def inventory(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "nodes.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_the_text_says_plan_reasons_placement_and_alternatives(manifest: Path) -> None:
    result = run("-f", manifest, "--gpus", 32, "--what-if")
    assert result.exit_code == 0, result.output
    for word in ("Plan: TP ", "Why", "Placement: cost ", "Not chosen", "With all 32 GPUs", "With better hardware"):
        assert word in result.output
    assert "DP 2: set by `replicas`" in result.output


def test_json_holds_what_the_operator_decides(manifest: Path, tmp_path: Path) -> None:
    nodes = inventory(tmp_path, [{"name": "node", "gpus": 8, "product": H100, "count": 4}])
    result = run("-f", manifest, "--inventory", nodes, "-o", "json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    spec = parse_spec(yaml.safe_load(manifest.read_text()))
    seen = Inventory.from_objects(*read_nodes(nodes, spec.workers.gpu_resource))
    plan, placement = choose_plan(spec, seen)
    assert placement is not None
    assert printed["plan"] == plan.to_status().model_dump(by_alias=True, exclude_none=True)
    assert printed["placement"] == placement.to_status("llama", {}).model_dump(by_alias=True)
    assert printed["estimate"]["stepSeconds"] > 0
    assert printed["wholeCluster"]["alternatives"]


def test_a_saved_node_list_is_read_as_the_cluster_is(manifest: Path, tmp_path: Path) -> None:
    node = {
        "kind": "Node",
        "metadata": {"name": "a", "labels": {"nvidia.com/gpu.product": H100}},
        "status": {
            "allocatable": {"nvidia.com/gpu": "32", "cpu": "64", "memory": "1Ti", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    result = run("-f", manifest, "--inventory", inventory(tmp_path, json.dumps({"kind": "List", "items": [node]})))
    assert result.exit_code == 0, result.output
    assert "a w0" in result.output


def test_no_room_now_says_what_is_short_and_exits_with_3(manifest: Path, tmp_path: Path) -> None:
    nodes = inventory(tmp_path, [{"name": "node", "gpus": 8, "free": 0, "product": H100, "count": 4}])
    result = run("-f", manifest, "--inventory", nodes)
    assert result.exit_code == 3
    assert "Placement: does not fit now" in result.output
    assert "Freeing node-0 (8 GPUs in use) would be enough" in result.output


def test_what_others_hold_is_priced(manifest: Path, tmp_path: Path) -> None:
    """A rack of its own would hold the job, and others hold half of each."""
    wanted = yaml.safe_load(manifest.read_text())
    wanted["spec"].update(replicas=4, parallelism={"tensor": 2, "pipeline": 2, "zeroStage": 2})
    manifest.write_text(yaml.safe_dump(wanted))
    leaf = "network.topology.nvidia.com/leaf"
    racks = [
        {"name": f"{rack}{free}", "gpus": 8, "free": free, "product": H100, "count": 1, "labels": {leaf: rack}}
        for rack in ("a", "b")
        for free in (8, 0)
    ]
    nodes = inventory(tmp_path, racks)
    result = run("-f", manifest, "--inventory", nodes)
    assert result.exit_code == 0, result.output
    assert " of the cost is due to other pods on these nodes" in result.output
    printed = json.loads(run("-f", manifest, "--inventory", nodes, "-o", "json").stdout)
    assert 0 < printed["placementQuality"]["costOfFragmentation"] <= printed["placementQuality"]["cost"]


def test_gpus_without_a_price_are_planned_by_memory(manifest: Path, tmp_path: Path) -> None:
    label = {"nvidia.com/gpu.product": "Home-Made", "nvidia.com/gpu.memory": "81559"}
    nodes = inventory(tmp_path, [{"name": "node", "gpus": 8, "labels": label, "count": 4}])
    result = run("-f", manifest, "--inventory", nodes)
    assert result.exit_code == 0, result.output
    assert "per step" not in result.output.partition("Why")[0].partition("replica and step")[2]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[{name: a}]", "node 1: gpus"),
        ("[{name: a, gpus: -1}]", "node 1: gpus"),
        ("[{name: a, gpus: 4, free: 8}]", "free must be at most gpus (4), got 8"),
        ("[{name: a, gpus: 4}, {name: a, gpus: 4}]", "`a` must be unique"),
        ("[{name: a, gpus: 4, rack: r1}]", "node 1: rack"),
        ("hello", "must be a list of nodes"),
        ("[: -", "neither valid YAML nor valid JSON"),
    ],
)
def test_a_wrong_inventory_names_entry_and_field(manifest: Path, tmp_path: Path, content: str, told: str) -> None:
    result = run("-f", manifest, "--inventory", inventory(tmp_path, content))
    assert result.exit_code == 1
    assert told in result.output


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"replicas": 0}, "spec.replicas"),
        ({"parallelism": {"pipeline": 2, "layerSplit": [1, 2]}}, "spec.parallelism.layerSplit: must add up"),
        ({"model": {"huggingFace": '{"model_type": ["x"]}'}}, "`model_type` must be a string"),
        ({"parallelism": {"zeroStage": 1}, **MUON}, "spec.parallelism.zeroStage: "),
        ({"parallelism": {"tensor": 3}}, "tensor"),
        ({"model": {"preset": "llama-9"}}, "llama-9"),
        ({"workers": {"image": "i", "gpusPerWorker": 16}}, "gpusPerWorker"),
    ],
)
def test_a_wrong_job_names_the_field(manifest: Path, change: dict[str, Any], told: str) -> None:
    wanted = yaml.safe_load(manifest.read_text())
    wanted["spec"].update(change)
    manifest.write_text(yaml.safe_dump(wanted))
    result = run("-f", manifest)
    assert result.exit_code == 1
    assert told in result.output


def test_files_that_are_not_there_and_gpus_that_are_not_known(manifest: Path, tmp_path: Path) -> None:
    assert "No such file" in run("-f", tmp_path / "none.yaml").output
    assert "No such file" in run("-f", manifest, "--inventory", tmp_path / "none.yaml").output
    assert "unknown product `Abacus`" in run("-f", manifest, "--gpu", "Abacus").output
    assert "leave one of them out" in run("-f", manifest, "--gpus", 8, "--inventory", manifest).output
    empty = tmp_path / "empty.yaml"
    empty.write_text("kind: ConfigMap\n")
    assert "expected exactly one ParallelTrainingJob, found 0" in run("-f", empty).output


def test_the_layout_that_fits_what_is_free_is_taken(tmp_path: Path, manifest: Path) -> None:
    wanted = yaml.safe_load(manifest.read_text())
    wanted["spec"].update(replicas=4, workers={"image": "worker", "gpusPerWorker": 1})
    wanted["spec"]["parallelism"]["schedule"] = "1F1B"
    wanted["spec"]["topology"] = {"multiNodeNVLink": True}
    wanted["spec"]["training"].update(sequenceLength=2048, activationCheckpointing="None")
    manifest.write_text(yaml.safe_dump(wanted))
    nodes = inventory(tmp_path, [{"name": "node", "gpus": 8, "free": 1, "product": H100, "count": 64}])
    result = run("-f", manifest, "--inventory", nodes)
    assert result.exit_code == 0, result.output
    assert "Plan: TP 1 x PP 2 x DP 4" in result.output
    assert "TP 2 x PP 1 x DP 4 would be faster, but does not fit on the GPUs that are free now" in result.output


def test_assumed_nodes_have_the_devices_that_the_job_requests(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    resources = {
        **{"memory": "64Gi", "devices": {"vpc.amazonaws.com/efa": 32}},
        **{"hugePages": {"2Mi": "5120Mi"}, "ephemeralStorage": "1Ti"},
    }
    wanted = job(data={"source": "PythonStdlib"}, workers={"image": "w:1", "gpusPerWorker": 8, "resources": resources})
    path.write_text(yaml.safe_dump(wanted))
    result = CliRunner().invoke(main, ["plan", str(path), "--gpus", "16"])
    assert result.exit_code == 0, result.output


def written(path: Path, **spec: Any) -> dict[str, Any]:
    """A manifest with a job of this spec."""
    found = job(data={"source": "PythonStdlib"}, **spec)
    path.write_text(yaml.safe_dump(found))
    return found


def printed(*words: object) -> dict[str, Any]:
    result = run(*words, "-o", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_gpus_that_fill_no_worker_are_not_planned_with(tmp_path: Path) -> None:
    """Nodes of 8 GPUs have two workers of 3."""
    path = tmp_path / "job.yaml"
    training = {"steps": 10, "globalBatchSize": 12, "sequenceLength": 4096, "precision": "bf16"}
    written(path, replicas=6, workers={"image": "worker:1", "gpusPerWorker": 3}, training=training)
    found = printed("-f", path, "--gpus", 40)["wholeCluster"]
    assert found["gpus"] == 30
    assert max(one["estimate"]["gpus"] for one in (found["best"], *found["alternatives"])) <= 30
    assert "With all 30 GPUs that fill workers of 3, and `replicas`" in run("-f", path, "--gpus", 40).output


def test_tensor_groups_span_pods_if_all_else_is_clearly_slower(tmp_path: Path) -> None:
    """One sequence, and a model that no single GPU holds: the alternative is an optimizer in main memory."""
    path = tmp_path / "job.yaml"
    model = {"layers": 31, "hiddenSize": 3072, "intermediateSize": 5632, "heads": 24, "kvHeads": 6, "vocabSize": 32000}
    training = {"steps": 10, "globalBatchSize": 1, "sequenceLength": 512, "precision": "bf16"}
    written(path, replicas=1, model=model, training=training, workers={"image": "worker:1", "gpusPerWorker": 1})
    found = printed("-f", path, "--gpus", 8, "--gpu", "V100-SXM2-32GB")["wholeCluster"]["best"]
    assert found["choices"]["tensor"] == 2
    assert found["choices"]["offload_optimizer"] == "none"


@pytest.mark.parametrize(
    "stated",
    [
        {"replicas": 1, "gpus": 16},
        {"replicas": 1, "parallelism": {"pipeline": 4, "layerSplit": [9, 8, 8, 7]}},
        {"replicas": 4, "parallelism": {"dataParallel": {"strategy": "DDP"}}},
        {"replicas": 4, "elastic": {"minReplicas": 2, "maxReplicas": 4}, "checkpoint": {"claimName": "c"}},
        {
            "replicas": 16,
            "elastic": {"minReplicas": 12},
            "checkpoint": {"claimName": "c"},
            "parallelism": {"tensor": 1},
        },
        {
            "replicas": 4,
            "elastic": {},
            "recovery": {"inMemory": True, "onReplicaLoss": "Continue"},
            "checkpoint": {"claimName": "c"},
            "parallelism": {"tensor": 2},
        },
    ],
)
def test_the_fields_of_the_best_layout_merge_into_the_job(tmp_path: Path, stated: dict[str, Any]) -> None:
    path = tmp_path / "job.yaml"
    wanted = written(path, **stated)
    found = printed("-f", path, "--gpus", 16)["wholeCluster"]
    path.write_text(yaml.safe_dump({**wanted, "spec": merged(wanted["spec"], found["spec"])}))
    applied = printed("-f", path, "--gpus", 16)
    assert applied["estimateUnplaced"]["stepSeconds"] == pytest.approx(found["best"]["estimate"]["stepSeconds"])
    assert applied["estimateUnplaced"]["memoryBytes"] == pytest.approx(found["best"]["estimate"]["memoryBytes"])


def test_a_forecast_counts_the_batch_of_the_replicas(tmp_path: Path) -> None:
    """With `scaledBatch`, 8 replicas train twice the tokens of 4 in as many steps."""
    path = tmp_path / "job.yaml"
    elastic = {"maxReplicas": 8, "scaledBatch": {"replicas": 4, "learningRate": "Linear"}}
    written(path, replicas=8, elastic=elastic, checkpoint={"claimName": "checkpoints"})
    found = printed("-f", path, "--gpus", 64, "--price", 2)
    assert found["forecast"]["tokens"] == 100 * 2 * 64 * 8192
    assert found["forecast"]["days"] * 86400 == pytest.approx(100 * found["estimate"]["stepSeconds"])
