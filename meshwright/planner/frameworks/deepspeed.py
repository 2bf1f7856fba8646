"""Plans as DeepSpeed's JSON configuration. The script, and with a pipeline its `PipelineModule`, is the user's."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

from meshwright.api.parallelism import ContextMethod, PipelineSchedule
from meshwright.api.precision import Precision
from meshwright.api.training import ActivationCheckpointing, OptimizerOffload, OptimizerSpec, RateDecay
from meshwright.models.architecture import Architecture
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.frameworks.target import (
    BATCH_FIELDS,
    LAYOUT_FIELDS,
    OPTIMIZER_FIELDS,
    FrameworkRun,
    Launch,
    Target,
    decay_note,
)
from meshwright.planner.search.request import Techniques

FILE = "ds_config.json"
_LEAST_WARM_UP = 2
_NUMBER_FORMATS = {Precision.BF16: "bf16", Precision.FP16: "fp16"}


def _model_problem(model: Architecture) -> str:
    return ""


def _strategy_problem(model: Architecture, strategy: Strategy) -> str:
    if strategy.pipeline > 1 and strategy.schedule is not PipelineSchedule.ONE_F_ONE_B:
        return f"`parallelism.schedule: {strategy.schedule}` has no counterpart: its pipeline engine runs 1F1B"
    if strategy.pipeline > 1 and strategy.zero_stage > 1:
        return "ZeRO-2 and ZeRO-3 are incompatible with its pipeline"
    if strategy.pipeline > 1 and strategy.tensor > 1:
        return "AutoTP is not written together with a pipeline"
    if strategy.tensor > 1 and (strategy.zero_stage > 2 or strategy.context > 1):
        return "AutoTP supports ZeRO-0 to ZeRO-2, and no sequence parallelism"
    if strategy.context > 1 and (strategy.context_method is not ContextMethod.ULYSSES or strategy.pipeline > 1):
        return "context parallelism must be `Ulysses`, without a pipeline"
    if strategy.expert > 1:
        return "expert parallelism is set in the code of its MoE layer"
    if strategy.zero_stage and strategy.settings.shard_size not in (None, strategy.data):
        return "`parallelism.dataParallel.shardSize` has no key"
    if strategy.precision is Precision.FP64:
        return "`training.precision: fp64` has no key"
    return ""


def _launch(run: FrameworkRun) -> Launch:
    used, notes = run.strategy, []
    if used.pipeline > 1:
        layers = run.stage_layers
        notes.append(
            f"in the script, build the model as PipelineModule(num_stages={used.pipeline}): stages of "
            f"{', '.join(map(str, layers))} layers"
        )
    if used.checkpointing is not ActivationCheckpointing.NONE:
        interval = used.recompute_group(run.architecture.layers)
        notes.append(f"in the script, recompute activations every {interval} layers ({used.checkpointing})")
    notes.extend(_schedule_notes(run.training.optimizer, run.training.steps))
    notes.append("the model and the data are those of your script, train.py")
    config = json.dumps(_config(run), indent=2) + "\n"
    command = ("python", "train.py", "--deepspeed", "--deepspeed_config", FILE)
    # It takes the configuration itself in place of the name of a file.
    encoded = base64.urlsafe_b64encode(config.encode()).decode()
    return Launch(command, ("--deepspeed", "--deepspeed_config", encoded), {FILE: config}, notes=tuple(notes))


def _config(run: FrameworkRun) -> dict[str, Any]:
    used, training, optimizer = run.strategy, run.training, run.training.optimizer
    zero: dict[str, Any] = {"stage": used.zero_stage}
    if used.optimizer_offload is OptimizerOffload.CPU:
        zero["offload_optimizer"] = {"device": "cpu"}
    elif used.optimizer_offload is OptimizerOffload.FILE:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": optimizer.offload_path}
    if used.settings.parameter_offload:
        zero["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_batch_size": training.global_batch_size,
        "train_micro_batch_size_per_gpu": used.micro_batch_size,
        "gradient_accumulation_steps": used.micro_batches,
        "zero_optimization": zero,
        "gradient_clipping": optimizer.gradient_clip,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": optimizer.learning_rate,
                "betas": [optimizer.beta1, optimizer.beta2],
                "weight_decay": optimizer.weight_decay,
            },
        },
    }
    if (scheduler := _scheduler(optimizer, training.steps)) is not None:
        config["scheduler"] = scheduler
    if (name := _NUMBER_FORMATS.get(training.precision)) is not None:
        config[name] = {"enabled": True}
    if used.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": used.tensor}
    if used.pipeline > 1:
        config["pipeline"] = {"stages": used.pipeline}
    if used.context > 1:
        config["sequence_parallel_size"] = used.context
    return config


def _scheduler(optimizer: OptimizerSpec, steps: int) -> dict[str, Any] | None:
    """Its scheduler with the job's rates; None if it has none, or needs none."""
    decay, warm_up = optimizer.decay_or_default, optimizer.warmup_steps
    # DeepSpeed rejects 0, and warms up on a logarithmic curve by default.
    params: dict[str, Any] = {"warmup_num_steps": max(1, warm_up), "warmup_type": "linear"}
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": optimizer.learning_rate}
    if decay is RateDecay.CONSTANT:
        return {"type": "WarmupLR", "params": {**rates, **params}} if warm_up else None
    if optimizer.decay_steps is not None or decay not in (RateDecay.COSINE, RateDecay.LINEAR):
        return None
    params = {"total_num_steps": steps, **params}
    if decay is RateDecay.LINEAR:
        # It decays to the rate at which its warm-up begins.
        return {"type": "WarmupDecayLR", "params": {**params, **rates, "warmup_min_lr": optimizer.min_learning_rate}}
    # A warm-up from the full rate is none.
    begin = {} if warm_up else {"warmup_min_ratio": 1.0}
    ratio = optimizer.min_learning_rate / optimizer.learning_rate
    return {"type": "WarmupCosineLR", "params": {**params, **begin, "cos_min_ratio": ratio}}


def _schedule_notes(optimizer: OptimizerSpec, steps: int) -> Iterator[str]:
    """How its rates differ from those of the job."""
    if _scheduler(optimizer, steps) is None and optimizer.decay_or_default is not RateDecay.CONSTANT:
        yield decay_note(optimizer)
    elif optimizer.decay_or_default is RateDecay.LINEAR and optimizer.decay_steps is None:
        if optimizer.warmup_steps < _LEAST_WARM_UP:
            yield f"WarmupDecayLR warms up for at least {_LEAST_WARM_UP} steps"
        if optimizer.min_learning_rate:
            yield "the warm-up of WarmupDecayLR begins at minLearningRate, not at 0"


DEEPSPEED = Target(
    name="deepspeed",
    account="megatron-deepspeed",
    techniques=Techniques(
        schedules=(PipelineSchedule.ONE_F_ONE_B,),
        context=(ContextMethod.ULYSSES,),
        expert=False,
        uneven_split=False,
        replicates_kv_heads=False,
    ),
    model_problem=_model_problem,
    strategy_problem=_strategy_problem,
    launch=_launch,
    handled=LAYOUT_FIELDS
    | BATCH_FIELDS
    | OPTIMIZER_FIELDS
    | {"training.precision", "training.optimizer.offload", "training.optimizer.offloadPath"}
    | {"training.parameterOffload", "training.activationCheckpointing", "training.checkpointEvery"},
    stages_outermost=True,
)
