"""The profiles that the chart ships: the pod of each is recorded, and carries what its platform's own manifest has.

A real API server that enforces the Pod Security Standards takes or refuses these pods.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.api.parsing import parse_spec
from meshwright.api.status import WorkerPlacement
from meshwright.profiles.document import parse_profiles
from meshwright.profiles.merged import conflict, with_profile
from meshwright.profiles.profile import Profile, ProfileContainer, ProfileMount, ProfileVolume
from meshwright.rules.validation import check_spec
from meshwright_operator.manifests.worker_pod import PodContext, worker_pod
from tests.golden import files
from tests.operator.conftest import StartOperator
from tests.operator.support import JOBS, ROOT, Api, condition, job, until

CHART = ROOT / "helm" / "meshwright"
PROFILES = {path.stem: path for path in sorted((CHART / "profiles").glob("*.yaml"))}
UID = "0f1e2d3c-0000-4000-8000-000000000000"
PRIVILEGED = {"runAsUser": 0, "privileged": True, "add": ["IPC_LOCK"]}
RDMA_NETWORKS = [f"rdma-{number}" for number in range(8)]

ESSENTIAL: dict[str, dict[str, Any]] = {
    "h100-infiniband": {"limits": {"rdma/ib": "1"}, "security": {"runAsUser": 0, "add": ["IPC_LOCK"]}},
    "eks-efa": {"limits": {"vpc.amazonaws.com/efa": "32", "hugepages-2Mi": "5120Mi"}, "env": {"FI_PROVIDER": "efa"}},
    "gke-a3-high": {
        "hostNetwork": True,
        "security": {"runAsUser": 0, "add": ["IPC_LOCK"]},
        "hostPaths": {"/home/kubernetes/bin/nvidia/lib64": "/usr/local/nvidia/lib64", "/run/tcpx": "/run/tcpx"},
        "sidecars": {"tcpx-daemon": {"privileged": True}},
    },
    "gke-a3-mega": {
        "hostPaths": {
            "/home/kubernetes/bin/nvidia": None,
            "/sys": None,
            "/proc/sys": None,
            "/dev/aperture_devices": "/dev/aperture_devices",
        },
        "sidecars": {"tcpxo-daemon": {"capabilities": {"add": ["NET_ADMIN", "NET_BIND_SERVICE"]}}},
        "init": ["nccl-plugin-installer"],
        "env": {"NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": "/dev/aperture_devices"},
        "tolerations": ["nvidia.com/gpu", "cloud.google.com/impending-node-termination"],
        "networks": ["default", *(f"vpc{number}" for number in range(1, 9))],
    },
    **{
        name: {
            "hostPaths": {
                "/home/kubernetes/bin/nvidia": "/usr/local/nvidia",
                "/home/kubernetes/bin/gib": "/usr/local/gib",
            },
            "networks": ["default", "gvnic-1", *RDMA_NETWORKS],
            "tolerations": ["nvidia.com/gpu", "cloud.google.com/impending-node-termination"],
            "nodeSelector": {"cloud.google.com/gke-accelerator": accelerator},
        }
        for name, accelerator in (("gke-a3-ultra", "nvidia-h200-141gb"), ("gke-a4", "nvidia-b200"))
    },
    "aks-nd": {"limits": {"rdma/ib": "8"}, "security": PRIVILEGED},
    "coreweave": {
        "limits": {"rdma/ib": "1"},
        "nodeSelector": {"gpu.nvidia.com/model": "H100_NVLINK_80GB"},
        "env": {"NCCL_IB_HCA": "ibp", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_COLLNET_ENABLE": "0"},
    },
    "oci": {
        "hostNetwork": True,
        "security": PRIVILEGED,
        "hostPaths": {"/dev/infiniband": "/dev/infiniband"},
        "nodeSelector": {"node.kubernetes.io/instance-type": "BM.GPU.H100.8"},
        "env": {"NCCL_IB_GID_INDEX": "3", "NCCL_IB_TC": "41", "NCCL_IB_SL": "0"},
    },
    "gb200-nvl72": {"limits": {"rdma/ib": "1"}, "nodeSelector": {"kubernetes.io/arch": "arm64"}},
    "mi300": {
        "hostNetwork": True,
        "security": {"runAsUser": 0, "privileged": True, "add": ["IPC_LOCK", "SYS_PTRACE"]},
        "groups": [44, 109],
        "tolerations": ["amd.com/gpu"],
        "limits": {"amd.com/gpu": "8"},
    },
}
"""What the platforms' own manifests of NCCL tests and training jobs carry, besides GPUs, `/dev/shm` and images."""


def profile_of(name: str) -> Profile:
    values = yaml.safe_load(PROFILES[name].read_text(encoding="utf-8"))["profiles"]
    assert list(values) == [name]
    assert values[name]["namespaces"] == [], "nobody may use it until the administrator says so"
    values[name]["namespaces"] = ["*"]
    profile = parse_profiles(yaml.safe_dump(values)).find(name, "anywhere")
    assert isinstance(profile, Profile)
    return profile


def pod_of(name: str, namespace: str = "team", **workers: Any) -> dict[str, Any]:
    """The pod of one worker of a job with the profile."""
    body = job("train")
    gpu = {"gpuResource": "amd.com/gpu"} if name == "mi300" else {}
    body["spec"]["workers"] = {
        "image": "worker:1",
        "gpusPerWorker": 8,
        "resources": {"cpu": "96", "memory": "1000Gi"},
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "volumes": [{"name": "cache", "mountPath": "/cache", "scratch": "100Gi"}],
        "profile": name,
        **gpu,
        **workers,
    }
    body["spec"]["parallelism"] = {"tensor": 8, "pipeline": 1}
    spec, profile = parse_spec(body), profile_of(name)
    assert not [problem for problem in check_spec(spec) if problem.field.startswith("workers")]
    assert conflict(spec, name, profile) == ""
    context = PodContext(
        "train", namespace, UID, with_profile(spec, profile), "2-0123456789", "https://c:9470", "token", profile=profile
    )
    placed = WorkerPlacement(worker=0, incarnation=0, pod="train-w0-0", node="n0", ranks="0-7")
    return worker_pod(context, placed)


def test_every_platform_has_its_essential_fields_listed() -> None:
    assert set(ESSENTIAL) == set(PROFILES)
    assert len(PROFILES) >= 10


@pytest.mark.parametrize("name", PROFILES)
def test_the_pod_of_a_platform_is_as_recorded(name: str) -> None:
    files.check(f"profiles/{name}.yaml", yaml.safe_dump(pod_of(name), sort_keys=True, width=110))


@pytest.mark.parametrize("name", PROFILES)
def test_a_pod_carries_what_the_platforms_own_manifest_has(name: str) -> None:
    pod, wanted = pod_of(name), ESSENTIAL[name]
    spec = pod["spec"]
    (worker,) = spec["containers"]
    security = {**spec["securityContext"], **worker["securityContext"], **worker["securityContext"]["capabilities"]}
    assert wanted.get("limits", {}).items() <= worker["resources"]["limits"].items()
    for field, value in wanted.get("security", {"runAsNonRoot": True, "runAsUser": 65532}).items():
        assert security[field] == value
    assert spec.get("hostNetwork", False) == wanted.get("hostNetwork", False)
    assert wanted.get("env", {}).items() <= {each["name"]: each.get("value") for each in worker["env"]}.items()
    assert wanted.get("nodeSelector", {}).items() <= spec["nodeSelector"].items()
    assert set(wanted.get("tolerations", ())) <= {each["key"] for each in spec["tolerations"]}
    assert spec["securityContext"].get("supplementalGroups", []) == wanted.get("groups", [])
    mounts = {mount["name"]: mount["mountPath"] for mount in worker["volumeMounts"]}
    paths = {v["hostPath"]["path"]: mounts.get(v["name"]) for v in spec["volumes"] if "hostPath" in v}
    assert paths == wanted.get("hostPaths", {})
    started = {each["name"]: each for each in spec.get("initContainers", ())}
    sidecars = {name: each for name, each in started.items() if each.get("restartPolicy") == "Always"}
    assert set(sidecars) == set(wanted.get("sidecars", ()))
    for sidecar, fields in wanted.get("sidecars", {}).items():
        assert fields.items() <= sidecars[sidecar]["securityContext"].items()
    assert [name for name in started if name not in sidecars] == wanted.get("init", [])
    interfaces = json.loads(pod["metadata"]["annotations"].get("networking.gke.io/interfaces", "[]"))
    assert [each["network"] for each in interfaces] == wanted.get("networks", [])


def test_what_the_operator_sets_always_wins() -> None:
    profile = parse_profiles(
        """
        all:
          namespaces: ["*"]
          labels: {team: b}
          annotations: {note: b}
          env: [{name: NCCL_DEBUG, value: WARN}, {name: EXTRA, value: x}]
          devices: {rdma/ib: 4}
        """
    ).find("all", "x")
    assert isinstance(profile, Profile)
    body = job("train")
    body["spec"]["workers"] |= {
        "labels": {"team": "a"},
        "annotations": {"note": "a", "other": "c"},
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "resources": {"devices": {"rdma/ib": 1}},
    }
    spec = with_profile(parse_spec(body), profile)
    context = PodContext("train", "team", UID, spec, "2-a", "https://c:9470", "token", profile=profile)
    placed = WorkerPlacement(worker=0, incarnation=0, pod="train-w0-0", node="n0", ranks="0-7")
    pod = worker_pod(context, placed)
    (worker,) = pod["spec"]["containers"]
    assert pod["metadata"]["labels"]["team"] == "b"
    assert pod["metadata"]["labels"]["meshwright.dev/job-uid"] == UID
    assert {"note": "b", "other": "c"}.items() <= pod["metadata"]["annotations"].items()
    named = [each["name"] for each in worker["env"]]
    assert [each for each in worker["env"] if each["name"] == "NCCL_DEBUG"] == [{"name": "NCCL_DEBUG", "value": "INFO"}]
    assert named.index("EXTRA") < named.index("MESHWRIGHT_JOB_NAME")
    assert worker["resources"]["limits"]["rdma/ib"] == "1"


def test_the_charts_schema_has_the_fields_of_profiles() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["definitions"]
    profile, container = schema["profile"]["properties"], schema["profileContainers"]["items"]["properties"]
    for properties, model in (
        (profile, Profile),
        (container, ProfileContainer),
        (profile["volumes"]["items"]["properties"], ProfileVolume),
        (container["mounts"]["items"]["properties"], ProfileMount),
    ):
        assert set(properties) == {field.alias for field in model.model_fields.values()}


LEVELS = ("restricted", "baseline", "privileged")
ENFORCE = "pod-security.kubernetes.io/enforce"


@pytest.mark.parametrize("name", PROFILES)
async def test_each_pod_security_level_takes_what_it_allows(api: Api, real_server: str, name: str) -> None:
    if not real_server:
        pytest.skip("the embedded server does not check pods against the Pod Security Standards")
    profile, answers = profile_of(name), {}
    for level in LEVELS:
        labels = {ENFORCE: level}
        body = {"metadata": {"name": f"level-{level}", "labels": labels}}
        await api.call("POST", "/api/v1/namespaces", body, ok=False)
        pod = pod_of(name, f"level-{level}")
        path = f"/api/v1/namespaces/level-{level}/pods?dryRun=All&fieldValidation=Strict"
        answers[level] = await api.call("POST", path, pod, ok=False)
    refused = {level for level, answer in answers.items() if answer["kind"] == "Status"}
    for level in refused:
        assert answers[level]["code"] == 403, answers[level]["message"]
        assert "violates PodSecurity" in answers[level]["message"]
    assert refused == ({"restricted", "baseline"} if profile.grants() else set())


async def test_a_namespace_that_forbids_a_profile_is_named_in_the_jobs_condition(
    api: Api, real_server: str, start_operator: StartOperator, tmp_path: Path
) -> None:
    if not real_server:
        pytest.skip("the embedded server does not check pods against the Pod Security Standards")
    path = tmp_path / "profiles.yaml"
    path.write_text("rdma: {namespaces: [default], runAsRoot: true, capabilities: [IPC_LOCK]}")
    await api.patch("/api/v1/namespaces/default", {"metadata": {"labels": {ENFORCE: "restricted"}}})
    try:
        await start_operator(profiles_file=path)
        body = job("forbidden")
        body["spec"]["workers"]["profile"] = "rdma"
        await api.create(JOBS, body)

        async def refused() -> str:
            found = condition(await api.status("forbidden"), "Placed")
            return str(found["message"]) if found.get("reason") == "PodsForbidden" else ""

        message = await until(refused, "the condition says that the pods are forbidden")
        assert "enforces a Pod Security level that `spec.workers.profile: rdma` exceeds" in message
        assert "Remove the field, or have the administrator set the label" in message
        assert 'violates PodSecurity "restricted' in message
        await api.patch("/api/v1/namespaces/default", {"metadata": {"labels": {ENFORCE: "privileged"}}})
        await until(lambda: api.pods("forbidden"), "the pods are created")
        assert "ProfileUsed" in await api.reasons("forbidden")
    finally:
        await api.patch("/api/v1/namespaces/default", {"metadata": {"labels": {ENFORCE: None}}})
