"""Plans in the flags of torchtitan's `torchtitan.train`."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.api.parallelism import ContextMethod, PipelineSchedule
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
    number,
)
from meshwright.planner.search.request import Techniques

MODELS = {
    "llama-3-8b": ("llama3", "llama3_8b"),
    "llama-3.1-8b": ("llama3", "llama3_8b"),
    "llama-3-70b": ("llama3", "llama3_70b"),
    "llama-3.1-70b": ("llama3", "llama3_70b"),
    "llama-3.1-405b": ("llama3", "llama3_405b"),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b"),
    "qwen3-0.6b": ("qwen3", "qwen3_0_6b"),
    "qwen3-1.7b": ("qwen3", "qwen3_1_7b"),
    "qwen3-14b": ("qwen3", "qwen3_14b"),
    "qwen3-32b": ("qwen3", "qwen3_32b"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"),
}
"""`--module` and `--config` of the presets that torchtitan has. A model is chosen by name, not by its sizes."""
SCHEDULES = {
    PipelineSchedule.ONE_F_ONE_B: "1F1B",
    PipelineSchedule.GPIPE: "GPipe",
    PipelineSchedule.INTERLEAVED: "Interleaved1F1B",
    PipelineSchedule.LOOPED_BFS: "LoopedBFS",
    PipelineSchedule.ZB_V: "ZBVZeroBubble",
    PipelineSchedule.DUAL_PIPE_V: "DualPipeV",
}
_RECOMPUTATION = {
    ActivationCheckpointing.NONE: "none",
    ActivationCheckpointing.SELECTIVE: "selective",
    ActivationCheckpointing.FULL: "full",
}
DECAYS = {RateDecay.COSINE: "cosine", RateDecay.LINEAR: "linear", RateDecay.SQUARE_ROOT: "sqrt"}
"""`lr_scheduler.decay_type` of each decay that ends with the run."""


def _model_problem(model: Architecture) -> str:
    if model.name not in MODELS:
        named = f"`{model.name}`" if model.name else "a model without `model.preset`"
        return f"{named} has no configuration in torchtitan: use one of {', '.join(sorted(MODELS))}"
    return ""


def _strategy_problem(model: Architecture, strategy: Strategy) -> str:
    if strategy.pipeline > 1 and strategy.schedule not in SCHEDULES:
        return f"`parallelism.schedule: {strategy.schedule}` has no counterpart: use {', '.join(SCHEDULES)}"
    if strategy.pipeline > 1 and strategy.layer_split is not None:
        return "`parallelism.layerSplit` has no flag"
    stages = strategy.pipeline * strategy.schedule_kind.stages_per_rank(strategy.virtual_stages)
    if strategy.pipeline > 1 and -(-model.layers // -(-model.layers // stages)) != stages:
        return f"{model.layers} layers do not make {stages} stages of {-(-model.layers // stages)} layers"
    if strategy.context > 1 and strategy.context_method is not ContextMethod.RING_ZIG_ZAG:
        return f"`parallelism.contextMethod: {strategy.context_method}` has no flag: use RingZigZag"
    if strategy.zero_stage == 1:
        return "`parallelism.zeroStage: 1` has no counterpart: fully_shard is ZeRO-2 or ZeRO-3"
    if strategy.zero_stage == 0 and strategy.context > 1:
        return "context parallelism shards parameters: it needs `parallelism.zeroStage` 2 or 3"
    if strategy.expert > 1 and (strategy.tensor > 1 or strategy.zero_stage == 0):
        return "experts are written only with `parallelism.tensor: 1` and `zeroStage` 2 or 3"
    if strategy.checkpointing not in _RECOMPUTATION or strategy.checkpoint_layers is not None:
        return f"`training.activationCheckpointing: {strategy.checkpointing}` has no counterpart"
    if strategy.precision not in (Precision.BF16, Precision.FP32):
        return f"`training.precision: {strategy.precision}` has no flag"
    if strategy.optimizer_offload is not OptimizerOffload.NONE or strategy.activation_offload:
        return "offload of the optimizer or of activations alone has no flag"
    return ""


def _launch(run: FrameworkRun) -> Launch:
    module, config = MODELS[run.architecture.name]
    used = run.strategy
    flags = [*_layout(run), *_training(run), *_checkpoint(run)]
    notes = ["the tokenizer and the data set are those of the configuration: set --hf_assets_path and --dataloader.*"]
    if used.checkpointing is ActivationCheckpointing.SELECTIVE:
        notes.append("selective recomputation is torchtitan's: it recomputes every second product too")
    if run.training.optimizer.decay_or_default is RateDecay.INVERSE_SQUARE_ROOT:
        notes.append(decay_note(run.training.optimizer))
    chosen = f"activation-checkpoint:{_RECOMPUTATION[used.checkpointing]}"
    words = ("--module", module, "--config", config, *flags, chosen)
    return Launch(("python", "-m", "torchtitan.train", *words), words, notes=tuple(notes))


def _layout(run: FrameworkRun) -> Iterator[str]:
    used, model = run.strategy, run.architecture
    shards = used.settings.shard_size or used.data if used.zero_stage else 1
    degrees = {
        "data_parallel_replicate_degree": used.data // shards,
        "data_parallel_shard_degree": shards,
        "tensor_parallel_degree": used.tensor,
        "pipeline_parallel_degree": used.pipeline,
        "context_parallel_degree": used.context,
        "expert_parallel_degree": used.expert,
    }
    for name, degree in degrees.items():
        yield from (f"--parallelism.{name}", str(degree))
    if used.tensor > 1 and not used.sequence_parallel:
        yield "--parallelism.no-enable_sequence_parallel"
    if used.zero_stage:
        yield from ("--parallelism.fsdp_reshard_after_forward", "always" if used.zero_stage == 3 else "never")
    local = used.micro_batch_size
    if used.pipeline > 1:
        stages = used.pipeline * used.schedule_kind.stages_per_rank(used.virtual_stages)
        local *= used.micro_batches
        yield from ("--parallelism.pipeline_parallel_schedule", SCHEDULES[used.schedule])
        yield from ("--parallelism.pipeline_parallel_microbatch_size", str(used.micro_batch_size))
        yield from ("--parallelism.pipeline_parallel_layers_per_stage", str(-(-model.layers // stages)))
        # By default the first and the last stage have a layer less.
        yield from ("--parallelism.pipeline_parallel_first_stage_less_layers", "0")
        yield from ("--parallelism.pipeline_parallel_last_stage_less_layers", "0")
        yield "--training.disable_cuda_graphs"
    yield from ("--training.local_batch_size", str(local))
    yield from ("--training.global_batch_size", str(run.training.global_batch_size))


def _training(run: FrameworkRun) -> Iterator[str]:
    training, optimizer = run.training, run.training.optimizer
    group = "--optimizer.param_groups.0.optimizer_kwargs"
    factor = optimizer.min_learning_rate / optimizer.learning_rate
    yield from ("--training.seq_len", str(training.sequence_length), "--training.steps", str(training.steps))
    yield from ("--training.max_norm", number(optimizer.gradient_clip))
    yield from ("--training.mixed_precision_param", "float32" if training.precision is Precision.FP32 else "bfloat16")
    yield from (f"{group}.lr", number(optimizer.learning_rate))
    yield from (f"{group}.betas", number(optimizer.beta1), number(optimizer.beta2))
    yield from (f"{group}.weight_decay", number(optimizer.weight_decay))
    yield from ("--lr_scheduler.warmup_steps", str(optimizer.warmup_steps), *_decay(optimizer, training.steps))
    yield from ("--lr_scheduler.min_lr_factor", number(factor), "--debug.seed", str(training.seed))
    if training.compile:
        yield "--compile.enable"


def _decay(optimizer: OptimizerSpec, steps: int) -> Iterator[str]:
    """The part of the run in which the rate decays. Always written, because some configurations have their own."""
    decay = optimizer.decay_or_default
    if decay in DECAYS:
        ratio = (steps - optimizer.decay_start(steps)) / steps
        yield from ("--lr_scheduler.decay_type", DECAYS[decay], "--lr_scheduler.decay_ratio", number(ratio))
    elif decay is RateDecay.CONSTANT:
        yield from ("--lr_scheduler.decay_ratio", "0")


def _checkpoint(run: FrameworkRun) -> Iterator[str]:
    checkpoint = run.spec.checkpoint
    if checkpoint is not None:
        yield from ("--checkpoint.enable", "--checkpoint.folder", CHECKPOINT_DIRECTORY)
        yield from ("--checkpoint.interval", str(checkpoint.interval))
        yield from ("--checkpoint.keep_latest_k", str(max(2, checkpoint.retained)))


TORCHTITAN = Target(
    name="torchtitan",
    account="torchtitan",
    techniques=Techniques(
        schedules=(PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED, PipelineSchedule.ZB_V),
        context=(ContextMethod.RING_ZIG_ZAG,),
        zero_stages=(0, 2, 3),
        checkpointing=(
            ActivationCheckpointing.NONE,
            ActivationCheckpointing.SELECTIVE,
            ActivationCheckpointing.FULL,
        ),
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
    | {"training.precision", "training.seed", "training.compile", "training.activationCheckpointing"}
    | {"checkpoint.keep"},
    stages_outermost=True,
)
