"""`meshwright import` of batch scripts of Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from meshwright.crd.manifest_check import check_manifest, check_mistakes
from meshwright_cli.importing.batch_script import read_script
from meshwright_cli.importing.settings import ImportFileError
from meshwright_cli.importing.slurm import _seconds
from meshwright_cli.main import main

CONTAINER = """#!/bin/bash
#SBATCH --job-name=LLaMA_8B
#SBATCH --nodes=4                 # of the partition
#SBATCH --gpus-per-node=h100:8
#SBATCH --ntasks-per-node=1
#SBATCH -c 96 --mem=900G
#SBATCH -t 2-12:00:00 -p h100
#SBATCH --output=logs/%j.out
set -euxo pipefail
module load cuda/12.4
mkdir -p logs
export NCCL_DEBUG=INFO HF_HOME="/fsx/cache"
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
export LD_LIBRARY_PATH=/opt/efa/lib:$LD_LIBRARY_PATH
LR=3e-4   # of the schedule
declare -a LAUNCH=(
    # the same on each node
    --nproc_per_node=8
    --nnodes=$SLURM_NNODES
    --rdzv_id=$SLURM_JOB_ID
    --rdzv_endpoint=$(hostname):29500
)
ARGS=(--lr "$LR" --name "a run")
ARGS+=(--warmup 10)
srun --container-image=nvcr.io#nvidia/pytorch:25.10-py3 --container-mounts /fsx:/fsx \\
    torchrun "${LAUNCH[@]}" train.py "${ARGS[@]}" "$@"
"""


def imported(tmp_path: Path, text: str, *options: str) -> tuple[list[str], dict[str, Any]]:
    """The comments and the job."""
    path = tmp_path / "run.sbatch"
    path.write_text(text)
    result = CliRunner().invoke(main, ["import", str(path), *options])
    assert result.exit_code == 0, result.output
    comments = [line.removeprefix("# ") for line in result.output.splitlines() if line.startswith("# ")]
    return comments, yaml.safe_load(result.output)


def script(command: str, *options: str) -> str:
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), command, ""])


def test_a_script_with_a_container_becomes_a_job_that_is_valid(tmp_path: Path) -> None:
    comments, job = imported(tmp_path, CONTAINER)
    assert job["metadata"] == {"name": "llama-8b"}
    assert job["spec"] == {
        "replicas": 32,
        "runtime": {
            "command": ["python", "train.py", "--lr", "3e-4", "--name", "a run", "--warmup", "10"],
            "agent": "Injected",
        },
        "workers": {
            "image": "nvcr.io/nvidia/pytorch:25.10-py3",
            "gpusPerWorker": 8,
            "resources": {"cpu": "96", "memory": "900Gi"},
            "env": [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "HF_HOME", "value": "/fsx/cache"}],
        },
        "activeDeadlineSeconds": 216_000,
    }
    assert check_manifest(job) == []
    assert check_mistakes(job) == []
    assert comments == [
        "From a batch script of Slurm.",
        "to do: bring into the image what the script sets up: module load cuda/12.4",
        "no equivalent: export LD_LIBRARY_PATH: its value is known on the node only; set it in the command",
        "`torchrun` is left out: each rank runs its script with the variables that it sets",
        comments[4],
        "no equivalent: --container-mounts=/fsx:/fsx: `workers.volumes` mounts claims, a profile of the administrator "
        "host paths",
        "no equivalent: --partition=h100: `workers.nodeSelector` chooses nodes by label, a queue who may use them",
        "no equivalent: GPUs of the type `h100`: `workers.nodeSelector` chooses nodes by a label, such as "
        "nvidia.com/gpu.product",
        "a restart runs the command again: the script must resume from its own checkpoint",
    ]
    assert "run as user 65532" in comments[4]


@pytest.mark.parametrize(
    ("options", "nodes", "gpus", "resources"),
    [
        (["-N 4", "--gres=gpu:8"], 4, 8, None),
        (["-N4", "--gres=gpu:a100:4,nvme:1"], 4, 4, None),
        (["--nodes=2-4", "--gpus=16"], 2, 8, None),
        (["--ntasks=32", "--ntasks-per-node=8", "--gpus-per-task=1", "--cpus-per-task=12"], 4, 8, {"cpu": "96"}),
        (["-N 2", "-G 8", "--cpus-per-gpu=4", "--mem-per-gpu=64G"], 2, 4, {"cpu": "16", "memory": "256Gi"}),
        (["-N 1", "--gpus-per-node 2", "-c 8", "--mem-per-cpu=4000"], 1, 2, {"cpu": "8", "memory": "32000Mi"}),
        (["--gres gpu", "--mem=0"], 1, 1, None),
    ],
)
def test_the_allocation_is_that_of_the_directives(
    tmp_path: Path, options: list[str], nodes: int, gpus: int, resources: dict[str, str] | None
) -> None:
    _, job = imported(tmp_path, script("srun python train.py", *options))
    assert (job["spec"]["replicas"], job["spec"]["workers"]["gpusPerWorker"]) == (nodes * gpus, gpus)
    assert job["spec"]["workers"].get("resources") == resources
    assert job["spec"]["runtime"]["command"] == ["python", "train.py"]


def test_options_of_srun_replace_those_of_the_script(tmp_path: Path) -> None:
    text = script("srun -N 2 --gpus-per-node=4 -l --cpu-bind=none python train.py -n 5", "-N 4", "--gpus-per-node=8")
    _, job = imported(tmp_path, text)
    assert (job["spec"]["replicas"], job["spec"]["workers"]["gpusPerWorker"]) == (8, 4)
    assert job["spec"]["runtime"]["command"] == ["python", "train.py", "-n", "5"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("srun bash -c 'python a.py --rank $SLURM_PROCID'", ["bash", "-c", "python a.py --rank ${RANK}"]),
        ('srun bash -c "torchrun --nproc_per_node 8 a.py"', ["python", "a.py"]),
        ('srun bash -c "cd /w && python a.py \\$SLURM_LOCALID"', ["bash", "-c", "cd /w && python a.py ${LOCAL_RANK}"]),
        (
            "srun python a.py --nodes $SLURM_NNODES --all $SLURM_NTASKS",
            ["python", "a.py", "--nodes", "2", "--all", "16"],
        ),
        ("srun python a.py ${2:-small}", ["python", "a.py", "small"]),
        ("srun python a.py > log-$USER.txt", ["bash", "-c", "python a.py > log-$USER.txt"]),
        ("torchrun --nproc-per-node 8 a.py", ["python", "a.py"]),
        ("CMD='python a.py'\nsrun $CMD &\nwait", ["python", "a.py"]),
        ("srun hostname\nsrun python a.py\nsrun rm -rf tmp", ["python", "a.py"]),
        (": ${SIZE:=7b}\nsrun python a.py $SIZE", ["python", "a.py", "7b"]),
        ("cat > ds.json <<EOF\n{'a': 1\nEOF\nsrun python a.py", ["python", "a.py"]),
        ("function run() {\n  srun python a.py $1\n}\nrun small", ["bash", "-c", "python a.py $1"]),
    ],
)
def test_what_srun_starts_is_the_command(tmp_path: Path, command: str, words: list[str]) -> None:
    _, job = imported(tmp_path, script(command, "-N 2", "--gpus-per-node=8", "--ntasks-per-node=8"))
    assert job["spec"]["runtime"]["command"] == words


def test_what_a_job_does_not_have_is_named(tmp_path: Path) -> None:
    options = ("-N 1", "--array=0-7", "--dependency=afterok:7", "--no-requeue", "--foo=bar", "--exclusive")
    text = script("python prepare.py\nfor i in 1 2; do\n  srun ./train.sh $i $SLURM_ARRAY_TASK_ID\ndone", *options)
    comments, job = imported(tmp_path, text)
    told = "\n".join(comments)
    for part in (
        "no equivalent: --array=0-7: apply a job for each of its tasks",
        "no equivalent: --dependency=afterok:7: pipelines of Argo Workflows or Tekton",
        "no equivalent: --foo=bar",
        "to do: the job does not run `python prepare.py`",
        "to do: the script has loops or conditions",
        "to do: the script in the command runs once for each rank",
        "to do: the script does not state the GPUs of a node: pass --gpus",
        "the command reads SLURM_ARRAY_TASK_ID, which Kubernetes does not set",
        "to do: set `workers.image`",
    ):
        assert part in told
    assert "exclusive" not in told
    assert job["spec"]["recovery"] == {"maxRestarts": 0}
    _, job = imported(tmp_path, text, "--gpus", "4")
    assert (job["spec"]["replicas"], job["spec"]["workers"]["gpusPerWorker"]) == (4, 4)


def test_arguments_of_megatron_are_read_with_the_allocation(tmp_path: Path) -> None:
    arguments = "--num-layers $LAYERS --hidden-size 4096 --num-attention-heads 32 --tensor-model-parallel-size 8"
    command = f'export LAYERS=32\nsrun bash -c "torchrun --nnodes $SLURM_NNODES pretrain_gpt.py {arguments}"'
    options = ("-N 2", "--gpus-per-node=8", "-J gpt", "-t 90", "--qos=high")
    comments, job = imported(tmp_path, script(command, *options))
    assert comments[0] == "From a configuration of Megatron-LM in a batch script of Slurm."
    assert job["metadata"] == {"name": "gpt"}
    assert (job["spec"]["replicas"], job["spec"]["activeDeadlineSeconds"]) == (2, 5400)
    assert job["spec"]["model"]["layers"] == 32
    assert job["spec"]["parallelism"]["tensor"] == 8
    assert "no equivalent: --qos=high: `priorityClassName`" in comments


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (script("srun python a.py", "--nodes=<N>"), "--nodes must be an integer, got '<N>': replace placeholders"),
        (script("srun python a.py", "--nodes=0"), "--nodes must be at least 1, got '0'"),
        (script("srun python a.py", "-n 4", "--ntasks-per-node=0"), "--ntasks-per-node must be at least 1"),
        (script("srun python a.py", "-N 1", "--time=tomorrow"), "`--time` must be a time such as 2-00:00:00"),
        (script("srun python a.py", "--mem=lots", "-N 1"), "`--mem` must be a size such as 512G"),
        (script("srun python a.py", "-N 1", "hetjob", "-N 2"), "import each as a script of its own"),
        (script("echo done", "-N 1"), "the script starts nothing: expected `srun`, `torchrun` or `python`"),
        (script("srun python 'a.py", "-N 1"), "quotes or parentheses do not match"),
    ],
)
def test_scripts_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text)
    result = CliRunner().invoke(main, ["import", str(path)])
    assert result.exit_code == 1
    assert message in result.output


def test_a_page_with_a_script_is_none(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(f"# How to run\n```bash\n{CONTAINER}```\n")
    result = CliRunner().invoke(main, ["import", str(path)])
    assert "unknown format: expected a batch script of Slurm" in result.output


@pytest.mark.parametrize(("options", "says"), [("", True), ("#SBATCH --no-requeue\n", False)])
def test_a_script_that_restarts_is_told_to_resume(tmp_path: Path, options: str, says: bool) -> None:
    comments, _ = imported(tmp_path, f"#!/bin/sh\n#SBATCH --gpus-per-node=2\n{options}srun python train.py\n")
    assert ("a restart runs the command again: the script must resume from its own checkpoint" in comments) is says


def test_processes_without_a_number_are_asked_for(tmp_path: Path) -> None:
    comments, _ = imported(tmp_path, "torchrun --standalone --nproc-per-node=gpu train.py")
    assert any("does not state the GPUs of a node: pass --gpus" in comment for comment in comments)


def test_every_command_that_prepares_the_environment_is_named(tmp_path: Path) -> None:
    comments, _ = imported(tmp_path, "module load a\nsource env/bin/activate\ntorchrun --nproc-per-node=2 train.py")
    assert "to do: bring into the image what the script sets up: module load a; source env/bin/activate" in comments


@pytest.mark.parametrize(
    ("text", "replicas", "gpus", "words"),
    [
        ("torchrun --nnodes=4 --nproc-per-node 8 train.py --lr 1", 32, 8, ["python", "train.py", "--lr", "1"]),
        ("#!/bin/sh\nN=2\nexport A=1\nexec torchrun --nnodes $N --nproc_per_node=4 -m t.train", 8, 4,
         ["python", "-m", "t.train"]),
        ("python -m torch.distributed.run --nproc_per_node 2 a.py", 2, 2, ["python", "a.py"]),
        ("mpirun -np 8 -N 4 -x A=1 python a.py", 8, 4, ["python", "a.py"]),
    ],
)  # fmt: skip
def test_a_script_without_slurm(tmp_path: Path, text: str, replicas: int, gpus: int, words: list[str]) -> None:
    comments, job = imported(tmp_path, text)
    assert comments[0] == "From a script."
    assert (job["spec"]["replicas"], job["spec"]["workers"]["gpusPerWorker"]) == (replicas, gpus)
    assert job["spec"]["runtime"]["command"] == words
    assert not any("GPUs of a node" in comment for comment in comments)


def test_nodes_of_an_elastic_torchrun(tmp_path: Path) -> None:
    _, job = imported(tmp_path, "torchrun --nnodes=2:4 --nproc_per_node=8 --max-restarts=3 train.py")
    assert job["spec"]["elastic"] == {"minReplicas": 16, "maxReplicas": 32}
    assert (job["spec"]["replicas"], job["spec"]["recovery"]) == (16, {"maxRestarts": 3})


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("30", 1800), ("30:15", 1815), ("1:30:15", 5415), ("1-2", 93600), ("1-2:30", 95400), ("1-2:30:15", 95415),
        ("UNLIMITED", None), ("", None),
    ],
)  # fmt: skip
def test_time_limits(limit: str, seconds: int | None) -> None:
    assert _seconds(limit) == seconds


def test_variables_that_only_the_machine_knows_stay() -> None:
    read = read_script('A=$(date)\nexport B="x $A" C=`hostname` D=1\npython a.py $A $B "$D"', {})
    assert read.exports == {"D": "1"}
    assert read.unknown == ["B", "C"]
    assert read.lines[0].command() == ["bash", "-c", 'python a.py $A x $A "1"']
    with pytest.raises(ImportFileError, match="quotes or parentheses do not match"):
        read_script("ARGS=(\n--a\npython a.py", {})
