"""Valid settings that are probably not what was meant: `meshwright validate`, `plan` and rank 0's log name them.

Each of them works, and stored jobs may have it, so no rule rejects it. A rule of this module has no CEL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.api.data import DataFormat, DataSource, DataSpec, Packing, Tokenizer
from meshwright.api.labels import KUEUE_QUEUE
from meshwright.api.precision import LossScaleSpec, Precision
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.training import ActivationCheckpointing, OptimizerName, OptimizerSpec, RateDecay, TrainingSpec
from meshwright.models.huggingface.config_fields import ConfigError
from meshwright.models.huggingface.reader import parse_config
from meshwright.models.presets import UnknownModelError, resolve
from meshwright.rules.command_degrees import MEGATRON_ORDER, option_words, stated_degrees
from meshwright.rules.facts import Facts
from meshwright.rules.launchers import launcher_of
from meshwright.rules.rule import Rule
from meshwright.rules.validation import Problem, with_model_numbers

_MANY_ROWS = 8192
"""Rows of an embedding that no model for bytes has."""
_LONG_RUN = 1000
"""Steps of a run whose result is worth a checkpoint."""


def _adapters_have_a_model(facts: Facts) -> bool:
    training = facts.training
    return training is None or training.lora is None or training.initial_weights is not None


def _tokenizer_is_the_models(facts: Facts) -> bool:
    data, model = facts.data, facts.model
    if data is None or data.tokenizer is not Tokenizer.BYTE or data.source is not DataSource.FILES or model is None:
        return True
    return (model.vocab_size or 0) < _MANY_ROWS


def _held_out_is_evaluated(facts: Facts) -> bool:
    evaluated = facts.training is None or facts.training.evaluation is not None
    return evaluated or facts.data is None or facts.data.held_out == 0


def _pattern_is_used(facts: Facts) -> bool:
    data = facts.data
    return data is None or data.format is not DataFormat.TOKENS or data.pattern == _default(DataSpec, "pattern")


def _records_are_one_document(facts: Facts) -> bool:
    data = facts.data
    return data is None or data.format is not DataFormat.PROMPT_COMPLETION or data.packing is Packing.TEXT


def _rate_is_for_fine_tuning(facts: Facts) -> bool:
    training = facts.training
    if training is None or training.initial_weights is None or training.lora is not None:
        return True
    return training.optimizer.learning_rate != _default(OptimizerSpec, "learning_rate")


def _least_rate_is_used(facts: Facts) -> bool:
    optimizer = facts.training.optimizer if facts.training is not None else None
    return optimizer is None or optimizer.decay is not RateDecay.CONSTANT or optimizer.min_learning_rate == 0


def _result_is_saved(facts: Facts) -> bool:
    training = facts.training
    return training is None or facts.checkpoint is not None or training.steps < _LONG_RUN


def _interval_is_used(facts: Facts) -> bool:
    training = facts.training
    if training is None or training.checkpointing is ActivationCheckpointing.EVERY_K:
        return True
    return training.checkpoint_every == _default(TrainingSpec, "checkpoint_every")


def _loss_scale_is_used(facts: Facts) -> bool:
    training = facts.training
    return training is None or training.precision is Precision.FP16 or training.loss_scale == LossScaleSpec()


def _momentum_is_used(facts: Facts) -> bool:
    optimizer = facts.training.optimizer if facts.training is not None else None
    if optimizer is None or optimizer.name is OptimizerName.MUON:
        return True
    return optimizer.momentum == _default(OptimizerSpec, "momentum")


def _command_starts_one_rank(facts: Facts) -> bool:
    command = facts.runtime.command
    return command is None or launcher_of(command) is None


def _command_is_split_into_words(facts: Facts) -> bool:
    command = facts.runtime.command
    return command is None or len(command[0].split()) == 1


def _kueue_admits_the_job(facts: Facts) -> bool:
    return facts.workers is None or KUEUE_QUEUE not in facts.workers.labels


def _default(model: type[DataSpec | TrainingSpec | OptimizerSpec], field: str) -> object:
    return model.model_fields[field].default


_LIKELY_MISTAKES: tuple[Rule[Facts], ...] = (
    Rule(
        "training.lora",
        "trains adapters of random weights, because `training.initialWeights` is not set: set it to the directory of "
        "the model to adapt",
        None,
        _adapters_have_a_model,
    ),
    Rule(
        "data.tokenizer",
        f"is `Byte`, the default, which uses 257 rows of an embedding of {_MANY_ROWS:,} or more, and other token ids "
        "than a published model: set `data.tokenizer` and `data.tokenizerFile` to the tokenizer of the model",
        None,
        _tokenizer_is_the_models,
    ),
    Rule(
        "data.heldOut",
        "excludes documents from training, and nothing evaluates them: add `training.evaluation`, or remove this field",
        None,
        _held_out_is_evaluated,
    ),
    Rule(
        "data.pattern",
        "has no effect with `data.format: Tokens`, which reads the shards of the manifest: remove it",
        None,
        _pattern_is_used,
    ),
    Rule(
        "data.packing",
        "separates tokens at each end-of-document token of a record with `data.format: PromptCompletion`, such as that "
        "between two turns of a chat: a turn then does not see the ones before it. Remove this field",
        None,
        _records_are_one_document,
    ),
    Rule(
        "training.optimizer.learningRate",
        "has its default, which is for training from random weights: fine-tuning all parameters usually takes 0.000005 "
        "to 0.00005",
        None,
        _rate_is_for_fine_tuning,
    ),
    Rule(
        "training.optimizer.minLearningRate",
        "has no effect with `decay: Constant`: remove one of the two",
        None,
        _least_rate_is_used,
    ),
    Rule(
        "checkpoint",
        f"is not set, so the trained model is lost at the end, and a failure costs all of {_LONG_RUN:,} or more steps: "
        "add it",
        None,
        _result_is_saved,
    ),
    Rule(
        "training.checkpointEvery",
        "has no effect without `training.activationCheckpointing: EveryK`: set that, or remove this field",
        None,
        _interval_is_used,
    ),
    Rule(
        "training.lossScale",
        "has no effect without `training.precision: fp16`: remove it",
        None,
        _loss_scale_is_used,
    ),
    Rule(
        "training.optimizer.momentum",
        "has no effect without `training.optimizer.name: Muon`: AdamW has `beta1`",
        None,
        _momentum_is_used,
    ),
    Rule(
        "runtime.command",
        "runs a launcher, such as `torchrun`, in each rank, which then starts ranks of its own. A worker has one rank "
        "for each of its GPUs, with the variables that torchrun sets: run the script itself, such as "
        "`[python, train.py]`",
        None,
        _command_starts_one_rank,
    ),
    Rule(
        "runtime.command",
        "has several words in its first entry, which is the name of a program: write each word as an entry, such as "
        "`[python, train.py]`",
        None,
        _command_is_split_into_words,
    ),
    Rule(
        "workers.labels",
        f"has `{KUEUE_QUEUE}`, by which Kueue may hold each pod until it admits the pod by itself: set it in "
        "`metadata.labels`, the labels of the job",
        None,
        _kueue_admits_the_job,
    ),
)


def likely_mistakes(facts: Facts) -> list[Problem]:
    """What is probably not meant in a run or a valid spec. The fields are not wrong."""
    found = [Problem(rule.field, rule.message) for rule in _LIKELY_MISTAKES if not rule.holds(facts)]
    return [*found, *_degrees_of_the_command_alone(facts)]


def _degrees_of_the_command_alone(facts: Facts) -> Iterator[Problem]:
    """Degrees that only the command has. The stages of a pipeline are no neighbors in the order of most frameworks."""
    command, framework = facts.runtime.command, facts.runtime.framework
    if command is None or framework is not None:
        return
    for name, degree in stated_degrees(command).items():
        ordered = name != "pipeline" or MEGATRON_ORDER in option_words(command)
        if ordered and (getattr(facts.parallelism, name) or 1) != degree:
            yield Problem(
                f"parallelism.{name}",
                f"is not the {degree} of the command, so ranks that communicate much may be placed far apart: set it "
                f"to {degree}. `replicas` then counts replicas of so many ranks",
            )


def likely_mistakes_of_spec(spec: ParallelTrainingJobSpec) -> list[Problem]:
    """The same for a spec, whose model may be a preset or a configuration."""
    model = spec.model
    if model is None:
        return likely_mistakes(spec)
    found = []
    try:
        found = likely_mistakes(with_model_numbers(spec, resolve(model)))
        config = parse_config(model.hugging_face) if model.hugging_face is not None else {}
    except (UnknownModelError, ConfigError):
        return found or likely_mistakes(spec)
    if spec.training is not None and (message := beyond_trained_length(config, spec.training.sequence_length)):
        found.append(Problem("training.sequenceLength", message))
    return found


def beyond_trained_length(config: Mapping[str, Any], length: int) -> str:
    """What to say if sequences are longer than those that a published model was trained on. Empty if they are not."""
    trained = config.get("max_position_embeddings")
    if not isinstance(trained, int) or isinstance(trained, bool) or length <= trained:
        return ""
    return (
        f"is {length:,}, more than the {trained:,} tokens that the model was trained on (`max_position_embeddings`): "
        "its rotary positions beyond them are untrained, unless `rope_scaling` extends them"
    )
