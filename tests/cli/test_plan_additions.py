"""`meshwright plan` and `validate` with profiles and claims: the same answer as the operator's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from meshwright.api.parsing import parse_spec
from meshwright.devices.claims import CHANNEL_CLASS, CLASS_PREFIX
from meshwright_cli.main import main
from meshwright_cli.plan.pod_additions import additions_of

ROOT = Path(__file__).parents[2]
GPU, NIC = "gpu.nvidia.com", "mrdma.example.com"
PROFILES = """
ib:
  namespaces: [default]
  devices: {rdma/ib: 1}
  sidecars:
  - {name: daemon, image: d, cpu: "2", memory: 1Gi}
"""


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def job(**workers: Any) -> dict[str, Any]:
    return {
        "apiVersion": "meshwright.dev/v1alpha1",
        "kind": "ParallelTrainingJob",
        "metadata": {"name": "train"},
        "spec": {
            "replicas": 2,
            "model": {"preset": "tiny"},
            "data": {"source": "PythonStdlib"},
            "training": {"steps": 10, "globalBatchSize": 24, "sequenceLength": 64},
            "parallelism": {"tensor": 2, "pipeline": 1, "microBatches": 1},
            "workers": {"image": "worker:1", "gpusPerWorker": 2, **workers},
        },
    }


def write(path: Path, *documents: Any) -> Path:
    path.write_text(yaml.safe_dump_all(documents))
    return path


def node(name: str, gpus: int = 8, **allocatable: str) -> dict[str, Any]:
    own = {"cpu": "64", "memory": "512Gi", "pods": "110", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    conditions = [{"type": "Ready", "status": "True"}]
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": {}},
        "spec": {},
        "status": {"allocatable": {**own, **allocatable}, "conditions": conditions},
    }


def device_class(name: str, driver: str) -> dict[str, Any]:
    selector = {"cel": {"expression": f"device.driver == '{driver}'"}}
    return {"kind": "DeviceClass", "metadata": {"name": name}, "spec": {"selectors": [selector]}}


def devices(host: str, driver: str, count: int) -> dict[str, Any]:
    found = [{"name": f"d{number}", "attributes": {}} for number in range(count)]
    pool = {"name": host, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": driver, "nodeName": host, "pool": pool, "devices": found}
    return {"kind": "ResourceSlice", "metadata": {"name": f"{host}-{driver}"}, "spec": spec}


def template(name: str, device: str, count: int = 1) -> dict[str, Any]:
    requests = [{"name": "r", "exactly": {"deviceClassName": device, "count": count}}]
    spec = {"spec": {"devices": {"requests": requests}}}
    return {"kind": "ResourceClaimTemplate", "metadata": {"name": name, "namespace": "default"}, "spec": spec}


def claimed(name: str) -> list[dict[str, str]]:
    return [{"name": "claim", "resourceClaimTemplateName": name}]


def nodes_of(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    return sorted(one["node"] for one in document["placement"]["workers"])


def test_a_profile_counts_and_one_that_is_missing_is_named_as_by_the_operator(tmp_path: Path) -> None:
    profiles = tmp_path / "profiles.yaml"
    profiles.write_text(PROFILES)
    nodes = write(
        tmp_path / "nodes.yaml", {"items": [node("a"), node("b", **{"rdma/ib": "1"}), node("c", **{"rdma/ib": "1"})]}
    )
    manifest = write(tmp_path / "job.yaml", job(profile="ib"))
    words = ("plan", "-f", manifest, "--inventory", nodes, "-o", "json")
    assert nodes_of(run(*words, "--profiles", profiles)) == ["b", "c"], "one device of each node"
    without = run(*words)
    assert "without --profiles, what it adds to the pods is not counted" in without.output
    write(manifest, job(profile="ibb"))
    for command in (words, ("validate", manifest)):
        result = run(*command, "--profiles", profiles)
        assert result.exit_code == 1
        assert "`spec.workers.profile` is `ibb`, but the administrator has defined no such profile" in result.output
        assert "Did you mean `ib`?" in result.output


def test_the_chart_s_values_are_read_and_namespaces_count(tmp_path: Path) -> None:
    manifest = write(tmp_path / "job.yaml", job(profile="eks-efa"))
    values = ROOT / "helm" / "meshwright" / "profiles" / "eks-efa.yaml"
    result = run("validate", manifest, "--profiles", values)
    assert result.exit_code == 1
    assert "does not allow in namespace default" in result.output
    allowed = yaml.safe_load(values.read_text())
    allowed["profiles"]["eks-efa"]["namespaces"] = ["*"]
    mine = write(tmp_path / "values.yaml", allowed)
    result = run("validate", manifest, "--profiles", mine)
    assert "Profile `eks-efa` adds huge pages, which Kubernetes allows only with CPU or memory" in result.output
    write(manifest, job(profile="eks-efa", resources={"memory": "64Gi"}))
    assert run("validate", manifest, "--profiles", mine).exit_code == 0
    mine.write_text("ib: {device: {}}")
    result = run("validate", "--profiles", mine)
    assert "unknown field `ib.device`" in result.output
    assert run("plan", "-f", manifest, "--profiles", mine).exit_code == 1
    assert run("validate").exit_code == 2


def test_devices_of_a_claim_are_counted_from_resource_slices(tmp_path: Path) -> None:
    items = [node("a"), node("b"), node("c"), device_class(NIC, NIC), devices("a", NIC, 1), devices("c", NIC, 1)]
    nodes = write(tmp_path / "nodes.yaml", {"items": items})
    manifest = write(tmp_path / "job.yaml", job(resourceClaims=claimed("nics")), template("nics", NIC))
    assert nodes_of(run("plan", "-f", manifest, "--inventory", nodes, "-o", "json")) == ["a", "c"]
    write(manifest, job(resourceClaims=claimed("nics")), template("nics", NIC, 2))
    result = run("plan", "-f", manifest, "--inventory", nodes)
    assert result.exit_code == 3
    assert f"too little {CLASS_PREFIX}{NIC}" in result.output


def test_gpus_of_a_claim_are_the_job_s_gpus(tmp_path: Path) -> None:
    items = [node("a", gpus=0), node("b", gpus=0), device_class(GPU, GPU), devices("a", GPU, 2), devices("b", GPU, 4)]
    nodes = write(tmp_path / "nodes.yaml", {"items": items})
    claiming = job(gpuResource=f"{CLASS_PREFIX}{GPU}", resourceClaims=claimed("gpus"))
    manifest = write(
        tmp_path / "job.yaml", {**claiming, "spec": {**claiming["spec"], "replicas": 3}}, template("gpus", GPU, 2)
    )
    assert nodes_of(run("plan", "-f", manifest, "--inventory", nodes, "-o", "json")) == ["a", "b", "b"]


@pytest.mark.parametrize("where", ["manifest", "inventory"])
def test_a_claimed_channel_joins_the_hosts_of_a_clique(tmp_path: Path, where: str) -> None:
    hosts = [node(f"t{number}", gpus=2) for number in range(2)]
    for host in hosts:
        host["metadata"]["labels"] = {"nvidia.com/gpu.clique": "u.1"}
    wide = job(resourceClaims=claimed("channel"))
    wide["spec"]["replicas"], wide["spec"]["parallelism"]["tensor"] = 1, 4
    wide["spec"]["model"] = {"preset": "llama-3.2-1b"}
    channel = template("channel", CHANNEL_CLASS)
    manifest = write(tmp_path / "job.yaml", wide, *([channel] if where == "manifest" else []))
    nodes = write(tmp_path / "nodes.yaml", {"items": [*hosts, *([channel] if where == "inventory" else [])]})
    assert nodes_of(run("plan", "-f", manifest, "--inventory", nodes, "-o", "json")) == ["t0", "t1"]
    write(manifest, wide)
    write(nodes, {"items": hosts})
    result = run("plan", "-f", manifest, "--inventory", nodes)
    assert result.exit_code == 1
    assert "the widest NVLink domain has 2 GPUs" in result.output


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    manifest = write(tmp_path / "job.yaml", job(resourceClaims=claimed("nics")))
    result = run("plan", "-f", manifest)
    assert result.exit_code == 0
    assert (
        "ResourceClaimTemplate `nics` (`workers.resourceClaims[0].resourceClaimTemplateName`) is not in"
        in result.output
    )
    assert "no DeviceClass is known" in result.output


def test_a_claim_with_gpus_that_pods_share_joins_the_pods_of_a_host(tmp_path: Path) -> None:
    shared = {**template("all", GPU, 8), "kind": "ResourceClaim"}
    shared["spec"] = shared["spec"]["spec"]
    body = job(resourceClaims=[{"name": "all", "resourceClaimName": "all"}])
    manifest = write(tmp_path / "job.yaml", body, shared)
    spec = parse_spec(body)
    found = additions_of(body, spec, None, manifest).spec_of(spec)
    assert (found.joins_pods, found.has_channel, found.joins_hosts) == (True, False, False)
    own = job(resourceClaims=claimed("each"))
    write(manifest, own, template("each", GPU, 2))
    spec = parse_spec(own)
    assert not additions_of(own, spec, None, manifest).spec_of(spec).joins_pods, "each pod has GPUs of its own"
