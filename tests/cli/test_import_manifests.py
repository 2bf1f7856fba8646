"""`meshwright import` reads jobs of other operators."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from meshwright.crd.manifest_check import check_manifest, check_mistakes
from meshwright_cli.importing.launchers import without_launcher
from meshwright_cli.main import main

CONTAINER: dict[str, Any] = {
    "name": "pytorch",
    "image": "registry.example.com/trainer:1",
    "command": ["torchrun", "--nnodes=4", "--nproc_per_node", "8", "--max-restarts=3", "train.py"],
    "args": ["--lr", "0.1"],
    "env": [
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "MASTER_PORT", "value": "29500"},
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
    ],
    "resources": {
        "limits": {"nvidia.com/gpu": 8, "memory": "512Gi", "cpu": 96, "rdma/ib": 1, "hugepages-2Mi": "5120Mi"},
        "requests": {"cpu": 48},
    },
    "volumeMounts": [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "fsx", "mountPath": "/fsx/"},
        {"name": "local", "mountPath": "/local"},
    ],
}
TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"team": "llm", "app.kubernetes.io/name": "train"}},
    "spec": {
        "hostNetwork": True,
        "containers": [{"name": "sidecar", "image": "logs"}, CONTAINER],
        "nodeSelector": {"pool": "h100"},
        "priorityClassName": "research",
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}},
            {"name": "fsx", "persistentVolumeClaim": {"claimName": "fsx"}},
            {"name": "local", "hostPath": {"path": "/mnt"}},
        ],
    },
}
PYTORCH_JOB: dict[str, Any] = {
    "apiVersion": "kubeflow.org/v1",
    "kind": "PyTorchJob",
    "metadata": {
        "name": "llama",
        "namespace": "research",
        "uid": "4f1c",
        "labels": {"kueue.x-k8s.io/queue-name": "team"},
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}"},
    },
    "spec": {
        "nprocPerNode": "8",
        "runPolicy": {"cleanPodPolicy": "None", "ttlSecondsAfterFinished": 600, "backoffLimit": 5, "suspend": True},
        "pytorchReplicaSpecs": {
            "Master": {"replicas": 1, "restartPolicy": "OnFailure", "template": TEMPLATE},
            "Worker": {"replicas": 3, "restartPolicy": "OnFailure", "template": TEMPLATE},
        },
    },
    "status": {"conditions": []},
}


def simple(command: list[str], gpus: int = 8) -> dict[str, Any]:
    """A pod template with a command."""
    limits = {"nvidia.com/gpu": gpus} if gpus else {}
    container = {"name": "node", "image": "trainer:1", "command": command, "resources": {"limits": limits}}
    return {"spec": {"restartPolicy": "Never", "containers": [container]}}


def imported(tmp_path: Path, *objects: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The comments and the job."""
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    result = CliRunner().invoke(main, ["import", str(path)])
    assert result.exit_code == 0, result.output
    comments = [line.removeprefix("# ") for line in result.output.splitlines() if line.startswith("# ")]
    return comments, yaml.safe_load(result.output)


def test_a_pytorch_job_becomes_a_job_that_is_valid(tmp_path: Path) -> None:
    comments, job = imported(tmp_path, PYTORCH_JOB)
    assert job["metadata"] == {
        "name": "llama",
        "namespace": "research",
        "labels": {"kueue.x-k8s.io/queue-name": "team"},
    }
    assert job["spec"] == {
        "replicas": 32,
        "runtime": {"command": ["python", "train.py", "--lr", "0.1"], "agent": "Injected"},
        "workers": {
            "image": "registry.example.com/trainer:1",
            "gpusPerWorker": 8,
            "resources": {
                "cpu": "48",
                "memory": "512Gi",
                "devices": {"rdma/ib": 1},
                "hugePages": {"2Mi": "5120Mi"},
                "sharedMemory": "64Gi",
            },
            "env": [
                {"name": "NCCL_DEBUG", "value": "INFO"},
                {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
            ],
            "volumes": [{"name": "fsx", "mountPath": "/fsx", "claimName": "fsx"}],
            "labels": {"team": "llm"},
            "nodeSelector": {"pool": "h100"},
        },
        "recovery": {"maxRestarts": 5},
        "priorityClassName": "research",
        "suspend": True,
        "ttlSecondsAfterFinished": 600,
        "successPolicy": "FirstWorker",
    }
    assert check_manifest(job) == []
    assert check_mistakes(job) == []
    assert comments[0] == "From a PyTorchJob."
    named = "\n".join(comments)
    for part in (
        "no equivalent: spec.runPolicy.cleanPodPolicy",
        "env[2].valueFrom.fieldRef",
        "no equivalent: container `sidecar`",
        "no equivalent: volume `local` at /local: hostPath",
        "no equivalent: hostNetwork",
        "`torchrun` is left out",
        "run as user 65532",
    ):
        assert part in named
    assert "status" not in named
    assert "uid" not in named


def test_pods_of_an_elastic_job_become_replicas(tmp_path: Path) -> None:
    job = copy.deepcopy(PYTORCH_JOB)
    del job["spec"]["pytorchReplicaSpecs"]["Master"]
    job["spec"]["elasticPolicy"] = {"rdzvBackend": "c10d", "minReplicas": 2, "maxReplicas": 6, "maxRestarts": 9}
    del job["spec"]["runPolicy"]["backoffLimit"]
    _, found = imported(tmp_path, job)
    assert (found["spec"]["replicas"], found["spec"]["elastic"]) == (24, {"minReplicas": 16, "maxReplicas": 48})
    assert found["spec"]["recovery"] == {"maxRestarts": 9}
    assert check_manifest(found) == []


def test_a_restart_policy_that_is_not_kept_is_named(tmp_path: Path) -> None:
    job = copy.deepcopy(PYTORCH_JOB)
    for role in job["spec"]["pytorchReplicaSpecs"].values():
        role["restartPolicy"] = "ExitCode"
    assert "no equivalent: spec.pytorchReplicaSpecs.Worker.restartPolicy" in imported(tmp_path, job)[0]
    for role in job["spec"]["pytorchReplicaSpecs"].values():
        role["restartPolicy"] = "Never"
    assert imported(tmp_path, job)[1]["spec"]["recovery"] == {"maxRestarts": 0}


def test_a_job_of_hyperpod(tmp_path: Path) -> None:
    job = {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": "hp"},
        "spec": {
            "nprocPerNode": "8",
            "replicaSpecs": [
                {"name": "pods", "replicas": 4, "spares": 1, "template": simple(["hyperpodrun", "train.py"])}
            ],
            "runPolicy": {
                "jobMaxRetryCount": 50,
                "restartPolicy": {"numRestartBeforeFullJobRestart": 3, "evalPeriodSeconds": 21600},
                "logMonitoringConfiguration": [{"name": "Hang", "logPattern": ".*loss.*"}],
            },
        },
    }
    comments, found = imported(tmp_path, job)
    assert (found["spec"]["replicas"], found["spec"]["workers"]["gpusPerWorker"]) == (32, 8)
    assert found["spec"]["recovery"] == {"maxRestarts": 50, "spareNodes": 1, "restartWindowSeconds": 21600}
    assert found["spec"]["runtime"]["command"] == ["python", "train.py"]
    assert "no equivalent: spec.runPolicy.restartPolicy.numRestartBeforeFullJobRestart" in comments
    assert any(line.startswith("hangs are found by steps") for line in comments)


TRAIN_JOB: dict[str, Any] = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "TrainJob",
    "metadata": {"name": "tj"},
    "spec": {
        "runtimeRef": {"name": "torch-distributed"},
        "initializer": {"model": {"storageUri": "hf://meta-llama/Llama-3.2-1B"}},
        "trainer": {
            "numNodes": 2,
            "command": ["torchrun", "train.py"],
            "resourcesPerNode": {"limits": {"nvidia.com/gpu": 4}},
            "env": [{"name": "LR", "value": "1"}],
        },
        "podTemplateOverrides": [
            {"targetJobs": [{"name": "node"}], "spec": {"nodeSelector": {"pool": "a"}}},
            {"targetJobs": [{"name": "model-initializer"}], "spec": {"nodeSelector": {"pool": "b"}}},
        ],
    },
}
RUNTIME: dict[str, Any] = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "ClusterTrainingRuntime",
    "metadata": {"name": "torch-distributed"},
    "spec": {
        "mlPolicy": {"numNodes": 1, "torch": {"numProcPerNode": "auto"}},
        "template": {
            "spec": {
                "replicatedJobs": [
                    {"name": "node", "template": {"spec": {"template": simple(["sleep"], gpus=0)}}},
                ]
            }
        },
    },
}


def test_a_train_job_with_its_runtime(tmp_path: Path) -> None:
    comments, found = imported(tmp_path, TRAIN_JOB, RUNTIME)
    assert found["spec"]["replicas"] == 8
    assert found["spec"]["workers"] == {
        "image": "trainer:1",
        "gpusPerWorker": 4,
        "env": [{"name": "LR", "value": "1"}],
        "nodeSelector": {"pool": "a"},
    }
    assert "no equivalent: spec.initializer" in comments
    assert any(line.startswith("no equivalent: spec.podTemplateOverrides[1]") for line in comments)
    assert not any("does not have the runtime" in line for line in comments)


def test_a_train_job_without_its_runtime_says_how_to_add_it(tmp_path: Path) -> None:
    comments, _ = imported(tmp_path, TRAIN_JOB)
    assert any("kubectl get clustertrainingruntime torch-distributed -o yaml" in line for line in comments)


def test_a_job_set_whose_driver_has_no_gpus(tmp_path: Path) -> None:
    def replicated(name: str, replicas: int, parallelism: int, template: dict[str, Any]) -> dict[str, Any]:
        spec = {"parallelism": parallelism, "completions": parallelism, "backoffLimit": 0, "template": template}
        return {"name": name, "replicas": replicas, "template": {"spec": spec}}

    job = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "js", "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "rack"}},
        "spec": {
            "failurePolicy": {"maxRestarts": 7, "rules": [{"action": "FailJobSet"}]},
            "replicatedJobs": [
                replicated("driver", 1, 1, simple(["sleep", "inf"], gpus=0)),
                replicated("workers", 2, 4, simple(["bash", "-c", "cd /src && torchrun --nproc_per_node=8 train.py"])),
            ],
        },
    }
    comments, found = imported(tmp_path, job)
    assert found["spec"]["replicas"] == 64
    assert found["spec"]["recovery"] == {"maxRestarts": 7}
    assert found["spec"]["runtime"]["command"] == ["bash", "-c", "cd /src && python train.py"]
    assert "no equivalent: the pods of `driver`, which have no GPUs" in comments
    assert "no equivalent: spec.failurePolicy.rules" in comments
    assert "the shell's script runs once for each rank, not once for each pod" in comments


def test_a_job_of_kubernetes_with_rules_for_exit_codes(tmp_path: Path) -> None:
    rules = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
    ]
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "plain"},
        "spec": {
            "parallelism": 2,
            "completions": 2,
            "backoffLimit": 4,
            "podFailurePolicy": {"rules": rules},
            "template": simple(["accelerate", "launch", "train.py"]),
        },
    }
    comments, found = imported(tmp_path, job)
    assert found["spec"]["recovery"] == {"maxRestarts": 4, "exitCodes": [{"values": [42], "action": "FailJob"}]}
    assert any(line.startswith("to do: the command runs `accelerate launch`") for line in comments)
    assert any("podFailurePolicy.rules[1]" in line for line in comments)
    assert any(line.startswith("warning: spec.runtime.command: runs a launcher") for line in comments)


def test_standard_input_a_list_and_options(tmp_path: Path) -> None:
    text = yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [PYTORCH_JOB]})
    result = CliRunner().invoke(main, ["import", "-", "--image", "mine:2", "--gpus-per-worker", "4"], input=text)
    assert result.exit_code == 0, result.output
    workers = yaml.safe_load(result.output)["spec"]["workers"]
    assert (workers["image"], workers["gpusPerWorker"]) == ("mine:2", 4)


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ([{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}], "expected one of PyTorchJob"),
        ([PYTORCH_JOB, PYTORCH_JOB], "got 2 of them"),
        ([{"apiVersion": "batch/v1", "kind": "Job", "spec": {}}], "containers` must have the container"),
        ([{"apiVersion": "batch/v1", "kind": "Job", "spec": []}], "`spec` must be an object"),
        (
            [{"apiVersion": "batch/v1", "kind": "Job", "spec": {"parallelism": "two", "template": simple(["a"])}}],
            "`spec.parallelism` must be an integer, got 'two'",
        ),
    ],
)
def test_manifests_that_cannot_be_read(tmp_path: Path, objects: list[dict[str, Any]], message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    result = CliRunner().invoke(main, ["import", str(path)])
    assert result.exit_code == 1
    assert message in result.output


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["torchrun", "--standalone", "-m", "pkg.train", "-x"], ["python", "-m", "pkg.train", "-x"]),
        (["/opt/bin/torchrun", "--no-python", "./run"], ["./run"]),
        (["python3", "-m", "torch.distributed.launch", "--use_env", "t.py"], ["python3", "t.py"]),
        (
            ["bash", "-c", "pip install x && torchrun --nproc_per_node $N \\\n --rdzv-conf 'a=1, b' \\\n t.py 'c'; ls"],
            ["bash", "-c", "pip install x && python t.py 'c'; ls"],
        ),
        (["bash", "-c", "torchrun --nnodes 2\nls"], ["bash", "-c", "torchrun --nnodes 2\nls"]),
        (["torchrun", "--nnodes"], ["torchrun", "--nnodes"]),
        (["python", "train.py"], ["python", "train.py"]),
    ],
)
def test_a_launcher_is_taken_out_of_a_command(command: list[str], expected: list[str]) -> None:
    assert without_launcher(command).words == expected
