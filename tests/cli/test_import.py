"""`meshwright import` reads what `meshwright plan --for` prints, and the frameworks' usual files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from meshwright_cli.main import main

JOB = {
    "apiVersion": "meshwright.dev/v1alpha1",
    "kind": "ParallelTrainingJob",
    "metadata": {"name": "llama"},
    "spec": {
        "replicas": 4,
        "model": {"preset": "llama-2-7b"},
        "data": {"source": "PythonStdlib"},
        "training": {
            "steps": 500,
            "globalBatchSize": 64,
            "sequenceLength": 4096,
            "precision": "bf16",
            "activationCheckpointing": "Full",
            "optimizer": {"learningRate": 0.001, "minLearningRate": 0.0001, "warmupSteps": 10},
        },
        "parallelism": {"tensor": 2, "pipeline": 2, "microBatches": 4, "zeroStage": 1, "schedule": "1F1B"},
        "workers": {"image": "worker:1", "gpusPerWorker": 8},
        "checkpoint": {"claimName": "checkpoints", "everySteps": 50},
    },
}
SCRIPT = """#!/bin/bash
# A script as in Megatron-LM's examples.
GPUS_PER_NODE=8
TP=4
export CHECKPOINTS=${OUT:-/ckpt}
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096
    --num-attention-heads 32 --ffn-hidden-size 11008 --swiglu --normalization RMSNorm
    --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes 2 pretrain_gpt.py ${MODEL_ARGS[@]} \\
    --tensor-model-parallel-size ${TP} --sequence-parallel --seq-length=4096 --vocab-size 32000 \\
    --micro-batch-size 1 --global-batch-size 32 --train-iters 100 --lr 3e-4 --bf16 \\
    --tokenizer-model $TOKENIZER --save $CHECKPOINTS --save-interval 10 --log-params-norm
"""
QUOTED = """#!/bin/bash
# It doesn't matter where flags are.
LAYERS=24
MODEL_ARGS="
    --num-layers $LAYERS --hidden-size 1024  # don't change
    --num-attention-heads 16
"
PRECISION="--bf16"
DATA_ARGS="--data-path '0.5 a 0.5 b' --seq-length 2048"
torchrun --nproc_per_node 8 pretrain_gpt.py $MODEL_ARGS "${DATA_ARGS}" $PRECISION --train-iters 50 \\
    --recompute-activations \\
    --fp8-format hybrid --fp8-amax-history-len 32 --save "/a b"
"""
TITAN = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 4
seq_len = 8192
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
[checkpoint]
enable = true
interval = 20
"""


def run(*words: object) -> str:
    result = CliRunner().invoke(main, list(map(str, words)))
    assert result.exit_code == 0, result.output
    return result.output


def imported(path: Path, text: str, *options: object) -> tuple[list[str], dict[str, Any]]:
    path.write_text(text)
    output = run("import", path, *options)
    comments = [line.removeprefix("# ") for line in output.splitlines() if line.startswith("# ")]
    return comments, yaml.safe_load(output)["spec"]


def planned_for(framework: str, path: Path) -> str:
    path.write_text(yaml.safe_dump(JOB))
    return run("plan", "-f", path, "--for", framework)


def test_arguments_of_megatron_are_read_back(tmp_path: Path) -> None:
    text = planned_for("megatron-lm", tmp_path / "job.yaml")
    comments, spec = imported(tmp_path / "train.sh", text, "--gpus", 16)
    assert spec["replicas"] == 4
    assert {name: spec["parallelism"][name] for name in ("tensor", "pipeline", "microBatches", "zeroStage")} == {
        "tensor": 2,
        "pipeline": 2,
        "microBatches": 4,
        "zeroStage": 1,
    }
    assert spec["model"]["vocabSize"] == 32_000
    assert spec["model"]["ropeTheta"] == 10_000
    assert spec["training"]["optimizer"]["learningRate"] == 0.001
    assert spec["training"]["activationCheckpointing"] == "Full"
    assert spec["checkpoint"]["everySteps"] == 50
    assert "no equivalent: --tokenizer-type" in comments


def test_flags_in_quotes_and_over_several_lines_are_read(tmp_path: Path) -> None:
    comments, spec = imported(tmp_path / "train.sh", QUOTED)
    assert [spec["model"][name] for name in ("layers", "hiddenSize", "heads")] == [24, 1024, 16]
    training = spec["training"]
    assert (training["steps"], training["sequenceLength"], training["precision"]) == (50, 2048, "bf16")
    assert training["activationCheckpointing"] == "Selective"
    assert training["fp8"] == {"scaling": "Tensorwise", "update": "Delayed", "history": 32}
    assert spec["replicas"] == 8
    assert not any("fp8" in comment or "recompute" in comment for comment in comments)


def test_a_recipe_of_fp8_that_a_job_does_not_have_is_named(tmp_path: Path) -> None:
    comments, spec = imported(tmp_path / "train.sh", f"{QUOTED.rstrip()} --fp8-recipe blockwise\n")
    assert "fp8" not in spec["training"]
    assert "no equivalent: --fp8-recipe" in comments


def test_a_byte_order_mark_is_no_part_of_the_configuration(tmp_path: Path) -> None:
    text = '\ufeff{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}'
    _, spec = imported(tmp_path / "ds.json", text, "--gpus", 8)
    assert spec["training"]["globalBatchSize"] == 64


def test_a_quote_that_nothing_closes_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f'{QUOTED}echo "--num-layers\n')
    result = CliRunner().invoke(main, ["import", str(path)])
    assert result.exit_code == 1
    assert "quotes do not match" in result.output


def test_a_job_that_only_lacks_its_data_is_valid_with_it(tmp_path: Path) -> None:
    _, spec = imported(tmp_path / "t.sh", planned_for("megatron-lm", tmp_path / "job.yaml"), "--gpus", 16)
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump({**JOB, "spec": {**spec, "data": {"source": "PythonStdlib"}}}))
    assert "TP 2 x PP 2 x DP 4" in run("plan", "-f", again)


def test_a_script_with_variables_and_arrays(tmp_path: Path) -> None:
    comments, spec = imported(tmp_path / "train.sh", SCRIPT)
    assert spec["replicas"] == 4, "16 GPUs of torchrun's flags, in tensor-parallel groups of 4"
    assert spec["parallelism"]["tensor"] == 4
    assert spec["parallelism"]["microBatches"] == 8
    assert spec["model"]["vocabSize"] == 32_256
    assert spec["training"]["sequenceLength"] == 4096
    assert "the vocabulary of 32000 tokens is padded to 32256" in comments
    assert "the value of --tokenizer-model is a variable that the file does not set" in comments
    assert "no equivalent: --log-params-norm" in comments


def test_deepspeed_configuration(tmp_path: Path) -> None:
    config = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.99]}},
        "bf16": {"enabled": True},
    }
    comments, spec = imported(tmp_path / "ds.json", json.dumps(config), "--preset", "llama-2-7b")
    assert spec["replicas"] == 8
    assert spec["parallelism"] == {"tensor": 1, "pipeline": 1, "microBatches": 4, "zeroStage": 3}
    assert spec["training"]["optimizer"]["offload"] == "CPU"
    assert spec["training"]["optimizer"]["beta2"] == 0.99
    assert spec["training"]["precision"] == "bf16"
    assert "no equivalent: zero_optimization.overlap_comm" in comments
    assert any(one.startswith("to do: spec.training.steps") for one in comments)


def test_gpus_of_a_worker(tmp_path: Path) -> None:
    def gpus(text: str, *options: object) -> int:
        return int(imported(tmp_path / "train.sh", text, *options)[1]["workers"]["gpusPerWorker"])

    assert gpus("torchrun --nproc-per-node 4 --nnodes 2 pretrain_gpt.py --num-layers 2\n") == 4
    assert gpus("python pretrain_gpt.py --num-layers 2 --tensor-model-parallel-size 2\n", "--gpus", 12) == 4
    assert gpus("python pretrain_gpt.py --num-layers 2\n", "--gpus", 1) == 1
    assert gpus("python pretrain_gpt.py --num-layers 2\n") == 8
    assert gpus("python pretrain_gpt.py --num-layers 2\n", "--gpus", 8, "--gpus-per-worker", 2) == 2


def test_dynamic_loss_scales(tmp_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 2, "loss_scale": 0}
    comments, spec = imported(tmp_path / "ds.json", json.dumps({"train_batch_size": 8, "fp16": fp16}))
    assert spec["training"]["lossScale"] == {"initial": 4096, "growthInterval": 500}
    assert [line for line in comments if "fp16" in line] == ["no equivalent: fp16.hysteresis"]
    comments, _ = imported(tmp_path / "ds.json", json.dumps({"train_batch_size": 8, "fp16": {**fp16, "loss_scale": 8}}))
    assert "no equivalent: fp16.loss_scale" in comments
    arguments = "--num-layers 2 --fp16 --initial-loss-scale 65536 --loss-scale-window 100 --loss-scale 4\n"
    comments, spec = imported(tmp_path / "m.sh", arguments)
    assert spec["training"]["lossScale"] == {"initial": 65536, "growthInterval": 100}
    assert "no equivalent: --loss-scale" in comments


def test_torchtitan_configuration(tmp_path: Path) -> None:
    comments, spec = imported(tmp_path / "llama3_8b.toml", TITAN, "--gpus", 32)
    assert spec["replicas"] == 8
    assert spec["model"] == {"preset": "llama-3.1-8b"}
    asked = spec["parallelism"]
    assert (asked["tensor"], asked["pipeline"], asked["schedule"], asked["microBatches"], asked["zeroStage"]) == (
        *(2, 2, "Interleaved1F1B", 4, 3),
    )
    assert spec["training"]["globalBatchSize"] == 32
    assert "no equivalent: training.dataset" in comments


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "unknown format: expected a batch script of Slurm, a script with `torchrun`"),
        ("hello", "unknown format"),
        ('{"train_batch_size": "many"}', "`train_batch_size` must be an integer, got 'many'"),
        ("x --num-layers 'two", "quotes do not match"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    result = CliRunner().invoke(main, ["import", str(path)])
    assert result.exit_code == 1
    assert message in result.output


def test_plan_for_a_framework_as_json_and_what_it_cannot_express(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    found = json.loads(run("plan", "-f", path, "--for", "nanotron", "-o", "json"))
    assert found["command"][-2:] == ["--config-file", "nanotron.yaml"]
    assert found["plan"]["tensor"] == 2
    assert yaml.safe_load(found["files"]["nanotron.yaml"])["parallelism"]["dp"] == 4
    result = CliRunner().invoke(main, ["plan", "-f", str(path), "--for", "torchtitan"])
    assert result.exit_code == 1
    assert "torchtitan: `llama-2-7b` has no configuration in torchtitan" in result.output


def test_values_that_the_script_decides_are_left_out_and_named(tmp_path: Path) -> None:
    text = json.dumps(
        {
            "bf16": {"enabled": "auto"},
            "gradient_clipping": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "zero_optimization": {"stage": 3},
        }
    )
    comments, spec = imported(tmp_path / "ds.json", text, "--gpus", 4)
    assert not {"precision", "globalBatchSize"} & set(spec.get("training", {}))
    assert "gradientClip" not in str(spec)
    (named,) = [comment for comment in comments if "auto" in comment]
    assert named.endswith(": bf16.enabled, gradient_clipping, train_micro_batch_size_per_gpu")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", TITAN),
        ("a.sh", "torchrun pretrain_gpt.py --num-layers 2 --tensor-model-parallel-size 4"),
        ("a.json", json.dumps({"zero_optimization": {"stage": 1}, "pipeline": {"stages": 4}})),
    ],
)
def test_gpus_that_replicas_do_not_divide_are_an_error(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    result = CliRunner().invoke(main, ["import", str(tmp_path / name), "--gpus", "6"])
    assert result.exit_code == 1
    assert "the number of GPUs (6) must be a multiple of 4 (" in result.output
