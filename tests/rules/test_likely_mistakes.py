"""Valid settings that are probably mistakes: named, and accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.rules.likely_mistakes import beyond_trained_length, likely_mistakes_of_spec
from meshwright.rules.validation import check_spec
from tests.rules.specs import COMMAND, GOOD, changed

FILES = {"data.source": None, "data.claimName": "text"}
RECORDS = {**FILES, "data.format": "PromptCompletion"}
CONFIG = {
    **{"model_type": "llama", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 320},
    **{"num_attention_heads": 4, "max_position_embeddings": 64},
}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"training.lora": {"rank": 4}}, "training.lora"),
        ({**FILES, "model.vocabSize": 32000}, "data.tokenizer"),
        ({**FILES, "model": {"preset": "llama-3.2-1b"}}, "data.tokenizer"),
        ({"data.heldOut": 0.1}, "data.heldOut"),
        ({**FILES, "data.format": "Tokens", "data.pattern": "*.tokens"}, "data.pattern"),
        ({**RECORDS, "data.packing": "Documents"}, "data.packing"),
        ({"training.initialWeights": "/models/a"}, "training.optimizer.learningRate"),
        ({"training.optimizer": {"decay": "Constant", "minLearningRate": 1e-5}}, "training.optimizer.minLearningRate"),
        ({"training.steps": 1000}, "checkpoint"),
        ({"training.checkpointEvery": 4}, "training.checkpointEvery"),
        ({"training.lossScale": {"initial": 2}, "training.precision": "bf16"}, "training.lossScale"),
        ({"training.optimizer": {"momentum": 0.9}}, "training.optimizer.momentum"),
        ({"model": {"huggingFace": json.dumps(CONFIG)}}, "training.sequenceLength"),
    ],
)
def test_a_likely_mistake_is_named_and_accepted(changes: dict[str, Any], field: str) -> None:
    spec = ParallelTrainingJobSpec.model_validate(changed(GOOD, changes))
    assert check_spec(spec) == []
    assert [mistake.field for mistake in likely_mistakes_of_spec(spec)] == [field]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            **{"training.lora": {"rank": 4}, "training.initialWeights": "/models/a", "data.heldOut": 0.1},
            "training.evaluation": {},
        },
        {"training.initialWeights": "/models/a", "training.optimizer": {"learningRate": 1e-5}},
        {"training.optimizer": {"decay": "InverseSquareRoot", "minLearningRate": 1e-5, "warmupSteps": 5}},
        {"training.steps": 5000, "checkpoint": {"claimName": "c", "everySteps": 100}},
        {"training.checkpointEvery": 4, "training.activationCheckpointing": "EveryK"},
        {"training.lossScale": {"initial": 2}, "training.precision": "fp16"},
        {"training.optimizer": {"name": "Muon", "momentum": 0.9}},
        {**FILES, "model.vocabSize": 32000, "data.tokenizer": "BPE", "data.tokenizerFile": "tokenizer.json"},
        {"model": {"huggingFace": json.dumps({**CONFIG, "max_position_embeddings": 128})}},
        {"model": {"preset": "no-such-model"}},
        {"model": {"huggingFace": "{}"}},
    ],
)
def test_nothing_is_said_of_what_is_meant(changes: dict[str, Any]) -> None:
    assert likely_mistakes_of_spec(ParallelTrainingJobSpec.model_validate(changed(GOOD, changes))) == []


@pytest.mark.parametrize(
    "command",
    [
        ["python", "train.py"],
        ["python", "-m", "torch.distributed.nn"],
        ["bash", "-c", "cd /src && exec python train.py --launcher torchrun"],
        ["sh", "-c", "pip install deepspeed; python train.py"],
        ["bash", "/scripts/torchrun.sh"],
    ],
)
def test_nothing_is_said_of_a_command(command: list[str]) -> None:
    spec = changed(COMMAND, {"runtime.command": command})
    assert likely_mistakes_of_spec(ParallelTrainingJobSpec.model_validate(spec)) == []


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", "--nproc-per-node", "8", "train.py"],
        ["/opt/conda/bin/torchrun", "train.py"],
        ["python3", "-m", "torch.distributed.run", "train.py"],
        ["accelerate", "launch", "train.py"],
        ["bash", "-c", "cd /src && exec torchrun train.py"],
        ["bash", "-lc", "set -e\nNCCL_DEBUG=INFO accelerate launch \\\n  train.py"],
        ["mpirun", "-np", "8", "python", "train.py"],
    ],
)
def test_a_launcher_in_each_rank_is_named(command: list[str]) -> None:
    spec = ParallelTrainingJobSpec.model_validate(changed(COMMAND, {"runtime.command": command}))
    assert check_spec(spec) == []
    assert [mistake.field for mistake in likely_mistakes_of_spec(spec)] == ["runtime.command"]


def test_a_command_in_one_word_is_named() -> None:
    spec = ParallelTrainingJobSpec.model_validate(changed(COMMAND, {"runtime.command": ["python train.py --lr 1"]}))
    assert check_spec(spec) == []
    (mistake,) = likely_mistakes_of_spec(spec)
    assert (mistake.field, "write each word as an entry" in mistake.message) == ("runtime.command", True)


@pytest.mark.parametrize(
    ("command", "parallelism", "fields"),
    [
        (["python", "train.py", "--tensor-model-parallel-size", "8"], {}, ["parallelism.tensor"]),
        (
            ["bash", "-c", "python train.py \\\n --tp_size=2 --cp_size='4'"],
            {},
            ["parallelism.tensor", "parallelism.context"],
        ),
        (["python", "train.py", "--tensor-model-parallel-size", "8"], {"tensor": 8}, []),
        (["python", "train.py", "--tensor-parallel-size=$TP", "--pp-size", "x"], {}, []),
        (["python", "t.py", "--pipeline-parallel-size=2"], {}, []),
        (
            ["python", "t.py", "--pipeline-model-parallel-size=2", "--use-tp-pp-dp-mapping"],
            {},
            ["parallelism.pipeline"],
        ),
        (["python", "main.py", "actor.rollout.tensor_model_parallel_size=2"], {}, []),
        (["python", "main.py", "actor.megatron.tensor_model_parallel_size=2"], {}, ["parallelism.tensor"]),
    ],
)
def test_degrees_that_only_the_command_has_are_named(
    command: list[str], parallelism: dict[str, int], fields: list[str]
) -> None:
    changes = {"runtime.command": command, "parallelism": parallelism, "replicas": 8, "workers.gpusPerWorker": 8}
    spec = ParallelTrainingJobSpec.model_validate(changed(COMMAND, changes))
    assert [mistake.field for mistake in likely_mistakes_of_spec(spec)] == fields


def test_a_queue_of_pods_is_named() -> None:
    changes = {"workers.labels": {"kueue.x-k8s.io/queue-name": "team"}}
    spec = ParallelTrainingJobSpec.model_validate(changed(COMMAND, changes))
    assert [mistake.field for mistake in likely_mistakes_of_spec(spec)] == ["workers.labels"]


def test_a_length_that_is_no_number_is_not_compared() -> None:
    assert beyond_trained_length({"max_position_embeddings": "long"}, 10) == ""
    assert "more than the 4 tokens" in beyond_trained_length({"max_position_embeddings": 4}, 10)
