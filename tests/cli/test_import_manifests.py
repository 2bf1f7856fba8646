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
    assert any("name the codes of yours in `recovery.exitCodes`" in note for note in imported(tmp_path, job)[0])
    for role in job["spec"]["pytorchReplicaSpecs"].values():
        role["restartPolicy"] = "Never"
    assert imported(tmp_path, job)[1]["spec"]["recovery"] == {"maxRestarts": 0}


MPI_JOB: dict[str, Any] = {
    "apiVersion": "kubeflow.org/v2beta1",
    "kind": "MPIJob",
    "metadata": {"name": "bert"},
    "spec": {
        "slotsPerWorker": 8,
        "sshAuthMountPath": "/home/mpiuser/.ssh",
        "runPolicy": {"backoffLimit": 2, "schedulingPolicy": {"minAvailable": 5, "priorityClass": "research"}},
        "mpiReplicaSpecs": {
            "Launcher": {
                "replicas": 1,
                "template": {
                    "spec": {
                        "containers": [
                            {
                                "name": "mpi-launcher",
                                "image": "trainer:1",
                                "env": [
                                    {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"},
                                    {"name": "HERE", "value": "1"},
                                ],
                                "command": ["/usr/bin/mpirun", "--allow-run-as-root", "-np", "32", "-bind-to", "none"],
                                "args": [
                                    *(
                                        "-x",
                                        "NCCL_DEBUG=INFO",
                                        "-x",
                                        "NCCL_SOCKET_IFNAME",
                                        "-x",
                                        "PATH",
                                        "-x",
                                        "MASTER_PORT=1",
                                    ),
                                    *("-mca", "pml", "ob1", "python", "train.py", "-n", "3"),
                                ],
                            }
                        ]
                    }
                },
            },
            "Worker": {"replicas": 4, "template": simple(["/usr/sbin/sshd", "-De"])},
        },
    },
}


def test_the_workers_of_an_mpi_job_run_what_its_launcher_starts(tmp_path: Path) -> None:
    notes, job = imported(tmp_path, MPI_JOB)
    assert notes[0] == "From an MPIJob."
    assert job["spec"]["replicas"] == 32
    assert job["spec"]["runtime"]["command"] == ["python", "train.py", "-n", "3"]
    assert job["spec"]["workers"]["gpusPerWorker"] == 8
    assert job["spec"]["workers"]["env"] == [
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"},
    ]
    assert job["spec"]["recovery"] == {"maxRestarts": 2}
    assert job["spec"]["priorityClassName"] == "research"
    assert not any("sshd" in note or "no equivalent" in note or "processes:" in note for note in notes)
    assert any(note.startswith("to do: `mpirun` is left out, and MPI with it") for note in notes)
    assert check_manifest(job) == []


@pytest.mark.parametrize(
    ("changes", "ranks", "note"),
    [
        ({"runLauncherAsWorker": True}, 40, "the launcher, which runs ranks too, becomes a worker"),
        ({"slotsPerWorker": 1}, 32, "a pod has 1 processes for 8 GPUs: a worker has one rank for each GPU"),
    ],
)
def test_processes_of_an_mpi_job(tmp_path: Path, changes: dict[str, Any], ranks: int, note: str) -> None:
    notes, job = imported(tmp_path, {**MPI_JOB, "spec": {**MPI_JOB["spec"], **changes}})
    assert job["spec"]["replicas"] == ranks
    assert note in notes


def test_a_train_job_with_a_runtime_of_mpi(tmp_path: Path) -> None:
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": "deepspeed-distributed"},
        "spec": {
            "mlPolicy": {"numNodes": 1, "mpi": {"numProcPerNode": 4, "runLauncherAsNode": True}},
            "template": {
                "spec": {
                    "replicatedJobs": [
                        {"name": name, "template": {"spec": {"template": simple(command, gpus=0)}}}
                        for name, command in (("node", ["/usr/sbin/sshd", "-De"]), ("launcher", []))
                    ]
                }
            },
        },
    }
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "t5"},
        "spec": {
            "runtimeRef": {"name": "deepspeed-distributed"},
            "trainer": {
                "numNodes": 2,
                "command": ["mpirun", "--hostfile", "/etc/mpi/hostfile", "python", "t5.py"],
                "resourcesPerNode": {"limits": {"nvidia.com/gpu": 4}},
            },
        },
    }
    notes, found = imported(tmp_path, job, runtime)
    assert found["spec"]["runtime"]["command"] == ["python", "t5.py"]
    assert (found["spec"]["replicas"], found["spec"]["workers"]["gpusPerWorker"]) == (8, 4)
    assert any(note.startswith("to do: `mpirun` is left out") for note in notes)


@pytest.mark.parametrize("gpus", [0, 8])
def test_a_volcano_job_whose_master_runs_mpirun(tmp_path: Path, gpus: int) -> None:
    script = "/usr/sbin/sshd; mpiexec --host ${MPI_HOST} -np 16 python train.py"
    master, worker = simple(["sh", "-c", script], gpus=0), simple(["/usr/sbin/sshd", "-D"], gpus)
    job = {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {"name": "mpi"},
        "spec": {
            "minAvailable": 3,
            "plugins": {"ssh": [], "svc": []},
            "tasks": [
                {"name": "mpimaster", "replicas": 1, "template": master},
                {"name": "mpiworker", "replicas": 2, "template": worker},
            ],
        },
    }
    notes, found = imported(tmp_path, job)
    assert found["spec"]["runtime"]["command"] == ["sh", "-c", "/usr/sbin/sshd; python train.py"]
    assert found["spec"]["replicas"] == 2 * (gpus or 1)
    assert "to do: take what starts `sshd` out of the script: the ranks need no SSH" in notes
    assert not any("mpimaster" in note or "wait for a launcher" in note for note in notes)


def test_a_launcher_that_runs_a_script_of_its_own_is_named(tmp_path: Path) -> None:
    changed = copy.deepcopy(MPI_JOB)
    launcher = changed["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    launcher |= {"command": ["/launch.sh"], "args": []}
    notes, job = imported(tmp_path, changed)
    assert job["spec"]["runtime"]["command"] == ["/launch.sh"]
    assert "to do: the command is that of the launcher: write what it starts as `runtime.command`" in notes
    del changed["spec"]["mpiReplicaSpecs"]["Launcher"]
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(changed))
    result = CliRunner().invoke(main, ["import", str(file)])
    assert "`spec.mpiReplicaSpecs` must have `Launcher` and `Worker`" in result.output


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
        (["mpirun", "--oversubscribe", "-N", "8", "-H", "a,b", "python", "t.py", "-x"], ["python", "t.py", "-x"]),
        (
            ["sh", "-c", "cd /x; mpirun -x A='1 2' --mca btl ^openib \\\n -np $N python t.py | tee log"],
            ["sh", "-c", "cd /x; python t.py | tee log"],
        ),
        (["sh", "-c", "mpirun -np 2\nls"], ["sh", "-c", "mpirun -np 2\nls"]),
        (["mpirun", "-x"], ["mpirun", "-x"]),
        (["mpirun", "-mca", "a"], ["mpirun", "-mca", "a"]),
    ],
)
def test_a_launcher_is_taken_out_of_a_command(command: list[str], expected: list[str]) -> None:
    assert without_launcher(command).words == expected


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        (["mpirun", "-x", "A=1", "--x", "B", "run"], {"A": "1", "B": None}),
        (["mpiexec", "-genv", "A", "1", "-env", "B=2", "-genvlist", "C,D", "run"], dict(A="1", B="2", C=None, D=None)),
        (["sh", "-c", """mpirun -x A='1 2' -x "B=3" -x C='{"d": 1}' run"""], {"A": "1 2", "B": "3", "C": '{"d": 1}'}),
    ],
)
def test_variables_that_mpirun_sets(command: list[str], variables: dict[str, str | None]) -> None:
    assert without_launcher(command).variables == variables


def pytorch_job(container: dict[str, Any], pods: int = 4, **spec: Any) -> dict[str, Any]:
    """A PyTorchJob of workers with this container. `spec` are further fields of their pods."""
    template = {"spec": {"containers": [{"name": "pytorch", "image": "trainer:1", **container}], **spec}}
    replicas = {"Worker": {"replicas": pods, "template": template}}
    body = {"pytorchReplicaSpecs": replicas}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "job"}, "spec": body}


EIGHT = {"limits": {"nvidia.com/gpu": 8}}


@pytest.mark.parametrize(
    ("options", "parallelism", "replicas", "comment"),
    [
        (["--tensor-model-parallel-size", "8"], {"tensor": 8}, 4, ""),
        (["--tp_size=4", "--context_parallel_size=2"], {"tensor": 4, "context": 2}, 4, ""),
        (
            ["--parallelism.tensor_parallel_degree=8", "--parallelism.pipeline_parallel_degree=2"],
            {"tensor": 8},
            4,
            "to do",
        ),
        (["model.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size=4"], {"tensor": 2}, 16, ""),
        (["--tensor-model-parallel-size=$TP"], None, 32, ""),
        (["--tensor-model-parallel-size=5"], None, 32, "(tensor 5) do not divide 32 ranks"),
    ],
)
def test_degrees_of_the_command_are_those_of_the_job(
    tmp_path: Path, options: list[str], parallelism: dict[str, int] | None, replicas: int, comment: str
) -> None:
    command = ["torchrun", "--nproc_per_node=8", "train.py", *options]
    comments, job = imported(tmp_path, pytorch_job({"command": command, "resources": EIGHT}))
    assert job["spec"].get("parallelism") == parallelism
    assert job["spec"]["replicas"] == replicas
    assert comment in "\n".join(comments)
    assert job["spec"]["runtime"]["command"] == ["python", "train.py", *options]
    assert not check_manifest(job)


def test_stages_of_megatron_get_the_order_of_the_mesh(tmp_path: Path) -> None:
    options = ["--tensor-model-parallel-size=4", "--pipeline-model-parallel-size=2"]
    container = {"command": ["torchrun", "pretrain_gpt.py", *options], "resources": EIGHT}
    comments, job = imported(tmp_path, pytorch_job(container))
    assert job["spec"]["parallelism"] == {"tensor": 4, "pipeline": 2}
    assert job["spec"]["replicas"] == 4
    assert job["spec"]["runtime"]["command"][2:] == [*options, "--use-tp-pp-dp-mapping"]
    assert any("--use-tp-pp-dp-mapping` is added" in line for line in comments)
    assert check_mistakes(job) == []
    del job["spec"]["parallelism"]
    assert [str(one) for one in check_mistakes(job)][0].startswith(
        "spec.parallelism.tensor: is not the 4 of the command"
    )
    assert len(check_mistakes(job)) == 2


def test_what_a_job_cannot_have_is_changed_if_its_meaning_stays(tmp_path: Path) -> None:
    mounts = [("shm", "/dev/shm"), ("checkpoints", "/a"), ("fsx", "/b"), ("fsx", "/c"), ("fsx-1", "/d")]
    container = {
        "command": ["python", "train.py"],
        "resources": EIGHT,
        "env": [{"name": "TORCHELASTIC_MAX_RESTARTS", "value": "3"}, {"name": "ROLE_RANK", "value": "0"}],
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts],
    }
    volumes = [
        {"name": "shm", "hostPath": {"path": "/dev/shm"}},
        *({"name": name, "persistentVolumeClaim": {"claimName": name}} for name in ("checkpoints", "fsx", "fsx-1")),
    ]
    job = pytorch_job(container, volumes=volumes, terminationGracePeriodSeconds=0)
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    template["metadata"] = {"labels": {"kueue.x-k8s.io/queue-name": "team", "app": "x"}}
    comments, found = imported(tmp_path, job)
    workers = found["spec"]["workers"]
    assert [(one["name"], one["mountPath"]) for one in workers["volumes"]] == [
        ("checkpoints-1", "/a"),
        ("fsx", "/b"),
        ("fsx-1", "/c"),
        ("fsx-1-1", "/d"),
    ]
    assert workers["terminationGracePeriodSeconds"] == 1
    assert workers["labels"] == {"app": "x"}
    assert "env" not in workers
    assert check_manifest(found) == []
    named = "\n".join(comments)
    assert "queue-name is left out: Kueue reads that of the job" in named
    assert "hostPath" not in named


def test_accelerators_of_aws_and_google(tmp_path: Path) -> None:
    command = ["torchrun", "--nproc_per_node=32", "train.py"]
    container = {"command": command, "resources": {"limits": {"aws.amazon.com/neuron": 16}}}
    _, job = imported(tmp_path, pytorch_job(container, pods=2))
    workers = job["spec"]["workers"]
    assert (workers["gpuResource"], workers["gpusPerWorker"]) == ("aws.amazon.com/neuroncore", 32)
    assert job["spec"]["replicas"] == 64
    comments, _ = imported(tmp_path, pytorch_job({"command": ["x"], "resources": {"limits": {"google.com/tpu": 4}}}))
    assert any(line.startswith("no equivalent: `google.com/tpu`") for line in comments)


def test_patches_of_a_runtime_are_applied_but_for_those_of_kueue(tmp_path: Path) -> None:
    def patch(manager: str, pool: str, name: str = "node") -> dict[str, Any]:
        pod = {"metadata": {"labels": {"team": "a"}}, "spec": {"nodeSelector": {"pool": pool}}}
        jobs = [{"name": name, "template": {"spec": {"template": pod}}}]
        return {"manager": manager, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}

    job = copy.deepcopy(TRAIN_JOB)
    del job["spec"]["podTemplateOverrides"]
    job["spec"]["runtimePatches"] = [
        patch("example.com/me", "a"),
        patch("example.com/me", "b", "model-initializer"),
        patch("kueue.x-k8s.io/manager", "c"),
    ]
    comments, found = imported(tmp_path, job, RUNTIME)
    assert found["spec"]["workers"]["nodeSelector"] == {"pool": "a"}
    assert found["spec"]["workers"]["labels"] == {"team": "a"}
    unread = [line for line in comments if "runtimePatches" in line]
    assert unread
    assert all("runtimePatches[1]" in line for line in unread)


def test_a_job_of_volcano(tmp_path: Path) -> None:
    job = {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {"name": "vc"},
        "spec": {
            "minAvailable": 3,
            "schedulerName": "volcano",
            "queue": "research",
            "maxRetry": 4,
            "priorityClassName": "high",
            "plugins": {"pytorch": ["--master=master", "--worker=worker"], "svc": []},
            "volumes": [{"mountPath": "/data", "volumeClaimName": "data-claim"}],
            "tasks": [
                {"name": "master", "replicas": 1, "template": simple(["python", "train.py"], gpus=1)},
                {"name": "worker", "replicas": 2, "template": simple(["python", "train.py"], gpus=1)},
            ],
        },
    }
    comments, found = imported(tmp_path, job)
    assert comments[0] == "From a Job of Volcano."
    assert found["spec"]["replicas"] == 3
    assert found["spec"]["recovery"] == {"maxRestarts": 4}
    assert found["spec"]["priorityClassName"] == "high"
    workers = found["spec"]["workers"]
    assert (workers["schedulerName"], workers["podGroup"]) == ("volcano", {"kind": "Volcano", "queue": "research"})
    assert workers["volumes"] == [{"name": "claim-0", "claimName": "data-claim", "mountPath": "/data"}]
    assert check_manifest(found) == []
    job["spec"] |= {"queue": "default", "minAvailable": 2}
    comments, found = imported(tmp_path, job)
    assert "schedulerName" not in found["spec"]["workers"]
    assert "no equivalent: spec.minAvailable" in comments


def test_placeholders_and_templates_are_named(tmp_path: Path) -> None:
    job = pytorch_job({"command": ["a"]})
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = "$NUM_NODES"
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    assert "got '$NUM_NODES': replace placeholders first, for example with `envsubst`" in run_import(path)
    path.write_text("kind: PyTorchJob\nmetadata:\n  name: {{ .Values.name }}\n")
    assert "is a template: render it first" in run_import(path)


def run_import(path: Path) -> str:
    """The message of an import that fails."""
    result = CliRunner().invoke(main, ["import", str(path)])
    assert result.exit_code == 1
    return result.output
