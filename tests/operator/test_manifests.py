"""The objects the operator makes."""

from __future__ import annotations

from typing import Any

from meshwright.api import labels
from meshwright.api.status import WorkerPlacement
from meshwright_operator.kube.pod_info import read_pod
from meshwright_operator.manifests.owned_objects import service, token_secret
from meshwright_operator.manifests.worker_pod import CoordinatorTrust, PodContext, worker_pod
from tests.operator.builders import spec

UID = "0f1e2d3c-0000-4000-8000-000000000000"


def make(**fields: Any) -> dict[str, Any]:
    context = PodContext("train", "team", UID, spec(**fields), "0123456789", "http://coordinator:9470", "its-secret")
    return worker_pod(context, WorkerPlacement(worker=1, incarnation=3, pod="train-w1-3", node="node-7", ranks="2-3"))


def environment(pod: dict[str, Any]) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in pod["spec"]["containers"][0]["env"]}


def test_a_pod_is_named_owned_gated_and_pinned() -> None:
    pod = make()
    metadata, body = pod["metadata"], pod["spec"]
    assert (metadata["name"], metadata["namespace"]) == ("train-w1-3", "team")
    assert metadata["labels"][labels.LABEL_REVISION] == "0123456789"
    assert metadata["labels"][labels.LABEL_WORKER] == "1"
    assert metadata["ownerReferences"] == [
        {
            "apiVersion": "meshwright.dev/v1alpha1", "kind": "ParallelTrainingJob", "name": "train", "uid": UID,
            "controller": True, "blockOwnerDeletion": True,
        }
    ]  # fmt: skip
    assert body["schedulingGates"] == [{"name": "meshwright.dev/gang"}]
    terms = body["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms == [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-7"]}]}]
    assert "nodeName" not in body
    assert (body["hostname"], body["subdomain"], body["restartPolicy"]) == ("train-w1-3", "train-0f1e2d3c", "Never")
    read = read_pod({**pod, "metadata": {**metadata, "uid": "p"}})
    assert read is not None
    assert (read.node, read.worker, read.incarnation, read.gated, read.bound) == ("node-7", 1, 3, True, False)


def test_a_pod_is_restricted() -> None:
    pod = make()
    body, container = pod["spec"], pod["spec"]["containers"][0]
    assert body["automountServiceAccountToken"] is body["enableServiceLinks"] is False
    assert body["securityContext"]["runAsNonRoot"] is True
    assert body["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_a_pod_asks_for_gpus_and_what_the_spec_says() -> None:
    workers = {"image": "i", "gpusPerWorker": 2, "resources": {"cpu": "3", "memory": "4Gi"}}
    container = make(workers=workers)["spec"]["containers"][0]
    assert container["resources"] == {
        "requests": {"nvidia.com/gpu": "2", "cpu": "3", "memory": "4Gi"},
        "limits": {"nvidia.com/gpu": "2", "memory": "4Gi"},
    }
    assert container["command"] == ["python", "-m", "meshwright_worker"]


def test_the_environment_is_the_contract() -> None:
    found = environment(make(checkpoint={"claimName": "ckpt"}))
    assert found == {
        labels.ENV_JOB_NAME: "train",
        labels.ENV_JOB_NAMESPACE: "team",
        labels.ENV_JOB_UID: UID,
        labels.ENV_WORKER_INDEX: "1",
        labels.ENV_INCARNATION: "3",
        labels.ENV_COORDINATOR_URL: "http://coordinator:9470",
        labels.ENV_METRICS_PORT: "9464",
        labels.ENV_GRACE_SECONDS: "60",
        labels.ENV_CHECKPOINT_DIR: "/meshwright/checkpoints/train-0f1e2d3c",
        labels.ENV_POD_IP: {"fieldRef": {"fieldPath": "status.podIP"}},
        labels.ENV_POD_UID: {"fieldRef": {"fieldPath": "metadata.uid"}},
        labels.ENV_TOKEN: {"secretKeyRef": {"name": "its-secret", "key": "token"}},
    }
    assert labels.ENV_CHECKPOINT_DIR not in environment(make())


def test_volumes_follow_the_spec() -> None:
    pod = make(
        data={"source": "Files", "claimName": "texts"},
        checkpoint={"claimName": "ckpt"},
        runtime={"scripts": "my-scripts"},
    )
    mounts = {m["mountPath"]: m for m in pod["spec"]["containers"][0]["volumeMounts"]}
    volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
    assert set(mounts) == {"/dev/shm", "/meshwright/checkpoints", "/meshwright/data", "/meshwright/scripts"}
    assert mounts["/meshwright/data"]["readOnly"] is mounts["/meshwright/scripts"]["readOnly"] is True
    assert volumes["checkpoints"]["persistentVolumeClaim"] == {"claimName": "ckpt"}
    assert volumes["scripts"]["configMap"] == {"name": "my-scripts"}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory"}
    assert environment(pod)[labels.ENV_DATA_DIR] == "/meshwright/data"


def test_pod_options_of_the_spec_reach_the_pod() -> None:
    workers = {
        "image": "i",
        "gpusPerWorker": 2,
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "nodeSelector": {"pool": "a"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "serviceAccountName": "trainer",
        "terminationGracePeriodSeconds": 90,
    }
    pod = make(workers=workers)
    body = pod["spec"]
    assert environment(pod)["NCCL_DEBUG"] == "INFO"
    assert body["nodeSelector"] == {"pool": "a"}
    assert body["tolerations"] == [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert body["serviceAccountName"] == "trainer"
    assert body["terminationGracePeriodSeconds"] == 90
    assert environment(pod)[labels.ENV_GRACE_SECONDS] == "90"


def test_registry_credentials_pull_policy_and_priority_reach_the_pod() -> None:
    workers = {
        "image": "i",
        "gpusPerWorker": 2,
        "imagePullPolicy": "Always",
        "imagePullSecrets": [{"name": "registry"}],
    }
    body = make(workers=workers, priorityClassName="high")["spec"]
    assert body["imagePullSecrets"] == [{"name": "registry"}]
    assert body["priorityClassName"] == "high"
    assert body["containers"][0]["imagePullPolicy"] == "Always"
    plain = make()["spec"]
    assert not {"imagePullSecrets", "priorityClassName", "serviceAccountName"} & set(plain)
    assert "imagePullPolicy" not in plain["containers"][0]


def test_secrets_reach_the_environment_by_reference_alone() -> None:
    env = [
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        {"name": "HUB", "valueFrom": {"configMapKeyRef": {"name": "hub", "key": "url"}}},
    ]
    found = environment(make(workers={"image": "i", "gpusPerWorker": 2, "env": env}))
    assert found["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert found["HUB"] == {"configMapKeyRef": {"name": "hub", "key": "url"}}


def test_volumes_of_the_job_are_mounted_beside_the_operators_own() -> None:
    extra = [
        {"name": "a", "mountPath": "/a", "claimName": "c", "readOnly": True},
        {"name": "b", "mountPath": "/b", "configMapName": "m"},
        {"name": "c", "mountPath": "/c", "secretName": "s"},
        {"name": "d", "mountPath": "/d", "scratch": "10Gi"},
    ]
    body = make(workers={"image": "i", "gpusPerWorker": 2, "volumes": extra})["spec"]
    volumes = {v["name"]: v for v in body["volumes"]}
    mounts = {m["name"]: m for m in body["containers"][0]["volumeMounts"]}
    assert volumes["a"]["persistentVolumeClaim"] == {"claimName": "c", "readOnly": True}
    assert volumes["b"]["configMap"] == {"name": "m"}
    assert volumes["c"]["secret"] == {"secretName": "s"}
    assert volumes["d"]["emptyDir"] == {"sizeLimit": "10Gi"}
    assert {name: mounts[name]["readOnly"] for name in "abcd"} == {"a": True, "b": True, "c": True, "d": False}
    assert mounts["a"]["mountPath"] == "/a"
    assert "shm" in volumes


def test_small_children_belong_to_the_job() -> None:
    headless, secret = service("train", "team", UID), token_secret("train", "team", UID, {"token": "t0ken"})
    assert headless["spec"]["clusterIP"] == "None"
    assert headless["spec"]["selector"] == {labels.LABEL_JOB: "train", labels.LABEL_JOB_UID: UID}
    assert headless["metadata"]["name"] == "train-0f1e2d3c"
    assert (secret["immutable"], secret["stringData"]) == (True, {"token": "t0ken"})
    for child in (headless, secret):
        assert child["metadata"]["ownerReferences"][0]["uid"] == UID


def test_the_cas_of_the_coordinator_are_in_the_environment_only_with_tls() -> None:
    def found(trust: CoordinatorTrust) -> tuple[object, object]:
        context = PodContext("train", "team", UID, spec(), "0123456789", "https://coordinator:9470", "secret", trust)
        values = environment(
            worker_pod(context, WorkerPlacement(worker=0, incarnation=0, pod="train-w0-0", node="n", ranks="0-1"))
        )
        return values.get(labels.ENV_COORDINATOR_CA), values.get(labels.ENV_COORDINATOR_NAME)

    assert found(CoordinatorTrust()) == (None, None)
    assert found(CoordinatorTrust("PEM")) == ("PEM", None)
    assert found(CoordinatorTrust("PEM", "mw.example")) == ("PEM", "mw.example")


def test_devices_huge_pages_and_storage_are_requests_and_limits_and_cpus_are_pinned_when_asked() -> None:
    resources = {
        "cpu": "16",
        "memory": "64Gi",
        "devices": {"rdma/ib": 1},
        "hugePages": {"2Mi": "5120Mi"},
        "ephemeralStorage": "100Gi",
        "sharedMemory": "32Gi",
        "exclusiveCpus": True,
    }
    pod = make(workers={"image": "i", "gpusPerWorker": 2, "resources": resources})
    found = pod["spec"]["containers"][0]["resources"]
    assert found["requests"] == found["limits"]
    assert found["limits"] == {
        "nvidia.com/gpu": "2", "cpu": "16", "memory": "64Gi", "rdma/ib": "1", "hugepages-2Mi": "5120Mi",
        "ephemeral-storage": "100Gi",
    }  # fmt: skip
    (shm,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Gi"}


def test_user_and_groups_of_the_processes() -> None:
    pod = make(workers={"image": "i", "gpusPerWorker": 2, "runAsUser": 1000, "supplementalGroups": [44, 109]})
    context = pod["spec"]["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (1000, 65532, 65532)
    assert context["supplementalGroups"] == [44, 109]
    assert make(workers={"image": "i", "gpusPerWorker": 2, "runAsGroup": 7})["spec"]["securityContext"]["fsGroup"] == 7
