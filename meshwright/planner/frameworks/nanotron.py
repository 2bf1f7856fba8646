"""Plans as nanotron's YAML configuration."""

from __future__ import annotations

from typing import Any

import yaml

from meshwright.api.model_parts import Activation, Norm
from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.precision import Precision
from meshwright.api.training import ActivationCheckpointing, OptimizerOffload, OptimizerSpec, RateDecay
from meshwright.models.architecture import Architecture
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.frameworks.target import (
    BATCH_FIELDS,
    CHECKPOINT_DIRECTORY,
    CHECKPOINT_FIELDS,
    LAYOUT_FIELDS,
    OPTIMIZER_FIELDS,
    FrameworkRun,
    Launch,
    Target,
    decay_note,
)
from meshwright.planner.search.request import Techniques

FILE = "nanotron.yaml"
_ENGINES = {PipelineSchedule.ONE_F_ONE_B: "1f1b", PipelineSchedule.GPIPE: "afab"}
_NUMBER_FORMATS = {Precision.BF16: "bfloat16", Precision.FP16: "float16", Precision.FP32: "float32"}
_DECAYS = {RateDecay.COSINE: "cosine", RateDecay.LINEAR: "linear", RateDecay.SQUARE_ROOT: "1-sqrt"}


def _model_problem(model: Architecture) -> str:
    llama = model.gated and model.activation is Activation.SILU and model.norm is Norm.RMS_NORM
    if not llama or model.biases or model.attention_biases or model.query_key_norms or model.positions:
        return "only models of Llama's kind are written"
    if model.output_norms or model.embedding_factor != 1:
        return "`model.outputNorms` and `embeddingFactor` have no keys"
    if model.sliding_window:
        return "`model.slidingWindow` has no key"
    if model.mixture is not None or model.latent is not None or model.rope_scaling is not None:
        return "mixtures, latent attention and rescaled rotary positions are not written"
    if model.head_size * model.heads != model.hidden_size or model.value_size != model.head_size:
        return "`model.headSize` has no key: it is `hiddenSize / heads`"
    return ""


def _strategy_problem(model: Architecture, strategy: Strategy) -> str:
    if strategy.pipeline > 1 and strategy.schedule not in _ENGINES:
        return f"`parallelism.schedule: {strategy.schedule}` has no engine: use 1F1B or GPipe"
    if strategy.pipeline > 1 and strategy.layer_split is not None:
        return "`parallelism.layerSplit` has no key"
    if strategy.context > 1 or strategy.expert > 1:
        return "context and expert parallelism are not written"
    if strategy.zero_stage > 1:
        return "`parallelism.zeroStage` 2 and 3 have no counterpart: use 0 or 1"
    if strategy.checkpointing not in (ActivationCheckpointing.NONE, ActivationCheckpointing.FULL):
        return f"`training.activationCheckpointing: {strategy.checkpointing}` has no counterpart"
    if strategy.checkpoint_layers is not None:
        return "recomputation of some layers has no key"
    if model.kv_heads % strategy.tensor:
        return f"`model.kvHeads` ({model.kv_heads}) must be a multiple of `parallelism.tensor` ({strategy.tensor})"
    if strategy.precision not in _NUMBER_FORMATS:
        return f"`training.precision: {strategy.precision}` has no key"
    if strategy.optimizer_offload is not OptimizerOffload.NONE or strategy.activation_offload:
        return "offload has no key"
    return ""


def _launch(run: FrameworkRun) -> Launch:
    text = yaml.safe_dump(_config(run), sort_keys=False)
    notes = ["data_stages[0].data.dataset is null, which is random data: name your data set and tokenizer"]
    if run.spec.checkpoint is not None:
        notes.append(f"replace {CHECKPOINT_DIRECTORY} in {FILE}, for example with envsubst")
    if run.training.optimizer.decay_or_default is RateDecay.INVERSE_SQUARE_ROOT:
        notes.append(decay_note(run.training.optimizer))
    command = ("python", "run_train.py", "--config-file", FILE)
    return Launch(command, files={FILE: text}, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, notes=tuple(notes))


def _config(run: FrameworkRun) -> dict[str, Any]:
    training, checkpoint, used = run.training, run.spec.checkpoint, run.strategy
    config: dict[str, Any] = {
        "general": {"project": "meshwright", "run": "meshwright", "seed": training.seed},
        "parallelism": {
            "dp": used.data,
            "pp": used.pipeline,
            "tp": used.tensor,
            "context_parallel_size": used.context,
            "expert_parallel_size": used.expert,
            "pp_engine": _ENGINES.get(used.schedule, "1f1b"),
            "tp_mode": "REDUCE_SCATTER" if used.sequence_parallel and used.tensor > 1 else "ALL_REDUCE",
            "tp_linear_async_communication": used.sequence_parallel and used.tensor > 1,
            "recompute_layer": used.checkpointing is ActivationCheckpointing.FULL,
        },
        "model": _model(run),
        "tokens": {
            "sequence_length": training.sequence_length,
            "train_steps": training.steps,
            "micro_batch_size": used.micro_batch_size,
            "batch_accumulation_per_replica": used.micro_batches,
        },
        "optimizer": _optimizer(run),
        "data_stages": [
            {"name": "all", "start_training_step": 1, "data": {"dataset": None, "seed": training.seed}},
        ],
        "logging": {"iteration_step_info_interval": 1},
    }
    if checkpoint is not None:
        config["checkpoints"] = {
            "checkpoints_path": CHECKPOINT_DIRECTORY,
            "checkpoint_interval": checkpoint.interval,
            "checkpoints_path_is_shared_file_system": True,
            "resume_checkpoint_path": CHECKPOINT_DIRECTORY,
        }
    return config


def _model(run: FrameworkRun) -> dict[str, Any]:
    model, length = run.architecture, run.training.sequence_length
    return {
        "dtype": _NUMBER_FORMATS[run.training.precision],
        "init_method": {"std": 0.02},
        "model_config": {
            "is_llama_config": True,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_attention_heads": model.heads,
            "num_hidden_layers": model.layers,
            "num_key_value_heads": model.kv_heads,
            "max_position_embeddings": length,
            "rms_norm_eps": model.norm_epsilon,
            "rope_theta": float(model.rope_theta),
            "tie_word_embeddings": model.tie_embeddings,
            "vocab_size": model.vocab_size,
        },
    }


def _optimizer(run: FrameworkRun) -> dict[str, Any]:
    optimizer = run.training.optimizer
    return {
        "zero_stage": run.strategy.zero_stage,
        "weight_decay": optimizer.weight_decay,
        "clip_grad": optimizer.gradient_clip or None,
        "accumulate_grad_in_fp32": True,
        "optimizer_factory": {
            "name": "adamW",
            "adam_eps": 1e-8,
            "adam_beta1": optimizer.beta1,
            "adam_beta2": optimizer.beta2,
            "torch_adam_is_fused": True,
        },
        "learning_rate_scheduler": {
            "learning_rate": optimizer.learning_rate,
            "lr_warmup_steps": optimizer.warmup_steps,
            "lr_warmup_style": "linear",
            **_decay(optimizer, run.training.steps),
            "min_decay_lr": optimizer.min_learning_rate,
        },
    }


def _decay(optimizer: OptimizerSpec, steps: int) -> dict[str, Any]:
    decay = optimizer.decay_or_default
    if decay is RateDecay.CONSTANT:
        return {"lr_decay_style": "linear", "lr_decay_steps": 1, "lr_decay_starting_step": steps}
    if decay not in _DECAYS:
        return {}
    start = optimizer.decay_start(steps)
    stable = {"lr_decay_starting_step": start} if optimizer.decay_steps is not None else {}
    return {"lr_decay_style": _DECAYS[decay], "lr_decay_steps": max(1, steps - start), **stable}


NANOTRON = Target(
    name="nanotron",
    account="nanotron",
    techniques=Techniques(
        schedules=(PipelineSchedule.ONE_F_ONE_B,),
        context=(),
        expert=False,
        zero_stages=(0, 1),
        checkpointing=(ActivationCheckpointing.NONE, ActivationCheckpointing.FULL),
        offload=(OptimizerOffload.NONE,),
        uneven_split=False,
        replicates_kv_heads=False,
    ),
    model_problem=_model_problem,
    strategy_problem=_strategy_problem,
    launch=_launch,
    handled=LAYOUT_FIELDS
    | BATCH_FIELDS
    | OPTIMIZER_FIELDS
    | CHECKPOINT_FIELDS
    | {"training.precision", "training.seed", "training.activationCheckpointing"},
    stages_outermost=True,
)
