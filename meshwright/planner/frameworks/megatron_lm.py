"""Plans in the flags of Megatron-LM's `pretrain_gpt.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.api.mixture import Balancing, Router
from meshwright.api.model_parts import Activation, Norm, RopeScaling
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
    number,
)
from meshwright.planner.search.request import Techniques
from meshwright.rules.command_degrees import MEGATRON_ORDER

SCRIPT = "pretrain_gpt.py"
CONTEXT_COMMUNICATION = {
    ContextMethod.RING_ZIG_ZAG: "p2p",
    ContextMethod.ULYSSES: "a2a",
    ContextMethod.ALL_GATHER: "all_gather",
}
ROPE_LIMITS = {(RopeScaling.LLAMA3, False): (1.0, 4.0, 8192), (RopeScaling.YARN, True): (1.0, 32.0, 4096)}
"""Kind of the rescaling and whether attention is latent -> the limits that are constants of Megatron-LM."""
_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
DECAYS = {
    RateDecay.COSINE: "cosine",
    RateDecay.LINEAR: "linear",
    RateDecay.INVERSE_SQUARE_ROOT: "inverse-square-root",
    RateDecay.CONSTANT: "constant",
}
"""`--lr-decay-style` of decays that begin at the end of the warm-up."""
LAST_DECAYS = {RateDecay.COSINE: "cosine", RateDecay.LINEAR: "linear", RateDecay.SQUARE_ROOT: "minus_sqrt"}
"""`--lr-wsd-decay-style` of decays over the last steps."""


def _model_problem(model: Architecture) -> str:
    if model.gated and model.activation is not Activation.SILU:
        return f"a gated feed-forward layer with `{model.activation}` has no flag: only SiLU has one"
    if not model.gated and model.activation not in (Activation.GELU, Activation.GELU_TANH):
        return f"a feed-forward layer with `{model.activation}` without a gate has no flag"
    if model.output_norms or model.window_rope_theta or model.embedding_factor != 1:
        return "`model.outputNorms`, `windowRopeTheta` and `embeddingFactor` have no flags"
    if not _has_rope_flags(model):
        return "`model.ropeScaling` has no flags for these limits, and YaRN has flags only with `model.latent`"
    if model.mixture is not None and model.mixture.every != 1:
        return "`model.mixture.every` above 1 is not written"
    if model.mixture is not None and model.mixture.router is Router.SIGMOID and not model.mixture.renormalize:
        return "`model.mixture.renormalize: false` has no flag with `router: Sigmoid`"
    if model.value_size != model.head_size and model.latent is None:
        return "`model.valueSize` has no flag without `model.latent`"
    return ""


def _has_rope_flags(model: Architecture) -> bool:
    """Whether flags say how rotary positions are rescaled."""
    scaling = model.rope_scaling
    if scaling is None:
        return True
    limits = scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_length
    scales_scores = scaling.kind is RopeScaling.YARN and scaling.factor > 1
    if scaling.score_factor != 1 and not scales_scores:
        return False
    return limits == ROPE_LIMITS.get((scaling.kind, model.latent is not None))


def _strategy_problem(model: Architecture, strategy: Strategy) -> str:
    if strategy.pipeline > 1 and strategy.schedule not in (
        PipelineSchedule.ONE_F_ONE_B,
        PipelineSchedule.INTERLEAVED,
    ):
        return f"`parallelism.schedule: {strategy.schedule}` has no flag: use 1F1B or Interleaved1F1B"
    if strategy.schedule is PipelineSchedule.INTERLEAVED and strategy.micro_batches % strategy.pipeline:
        return "Interleaved1F1B needs a multiple of `parallelism.pipeline` micro-batches"
    if strategy.context > 1 and strategy.context_method not in CONTEXT_COMMUNICATION:
        return f"`parallelism.contextMethod: {strategy.context_method}` has no flag"
    if strategy.context > 1 and strategy.context_method is ContextMethod.ULYSSES and model.latent is not None:
        return "Ulysses is not supported with `model.latent`"
    if strategy.zero_stage >= 2 and strategy.pipeline > 1:
        return "Megatron's FSDP (`parallelism.zeroStage` 2 and 3) does not split layers over a pipeline"
    if strategy.zero_stage and strategy.settings.shard_size not in (None, strategy.data):
        return "`parallelism.dataParallel.shardSize` is not written"
    if strategy.expert > 1 and strategy.tensor > 1 and not strategy.sequence_parallel:
        return "experts on a tensor-parallel group need `parallelism.sequence`"
    if strategy.precision is Precision.FP64:
        return "`training.precision: fp64` has no flag"
    if strategy.optimizer_offload is OptimizerOffload.FILE:
        return "`training.optimizer.offload: File` has no flag"
    if strategy.activation_offload or strategy.settings.parameter_offload:
        return "offload of activations and parameters is not written"
    return ""


def _launch(run: FrameworkRun) -> Launch:
    flags = (*_layout(run), *_model(run.architecture), *_training(run), *_recomputation(run), *_checkpoint(run))
    data = _data(run.architecture)
    notes = ["--mock-data: replace it with --data-path and the tokenizer of your data"]
    if run.strategy.checkpointing is ActivationCheckpointing.SELECTIVE:
        notes.append("selective recomputation is Megatron's: it recomputes attention, not everything but products")
    # Megatron's FSDP rejects the variable, and everything else with overlap needs it.
    environment = {} if run.strategy.zero_stage >= 2 else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return Launch(("python", SCRIPT, *flags, *data), flags, environment=environment, notes=tuple(notes))


def _layout(run: FrameworkRun) -> Iterator[str]:
    used, batch = run.strategy, run.training.global_batch_size
    yield from ("--tensor-model-parallel-size", str(used.tensor))
    yield from ("--pipeline-model-parallel-size", str(used.pipeline))
    yield from ("--context-parallel-size", str(used.context))
    # The order of ranks of a mesh: replicas are outermost.
    yield MEGATRON_ORDER
    if used.sequence_parallel and used.tensor > 1:
        yield "--sequence-parallel"
    if used.context > 1:
        yield from ("--cp-comm-type", CONTEXT_COMMUNICATION[used.context_method])
    if used.pipeline > 1 and not run.has_even_stages:
        yield from ("--pipeline-model-parallel-layout", _stages(run.stage_layers))
    elif used.pipeline > 1 and used.virtual_stages > 1:
        yield from ("--num-virtual-stages-per-pipeline-rank", str(used.virtual_stages))
    if run.architecture.mixture is not None:
        yield from ("--expert-model-parallel-size", str(used.expert))
        yield from ("--expert-tensor-parallel-size", str(used.tensor if used.expert_tensor else 1))
    if used.zero_stage == 1:
        yield from ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
    elif used.zero_stage >= 2:
        yield from ("--use-megatron-fsdp", "--use-distributed-optimizer", "--no-gradient-accumulation-fusion")
        yield from ("--data-parallel-sharding-strategy", _SHARDING[used.zero_stage])
        yield from ("--ckpt-format", "fsdp_dtensor")
    if used.optimizer_offload is OptimizerOffload.CPU:
        yield from ("--optimizer-cpu-offload", "--use-precision-aware-optimizer")
    yield from ("--micro-batch-size", str(used.micro_batch_size), "--global-batch-size", str(batch))


def _stages(layers: list[int]) -> str:
    """A layout as `Et|tt|L`: embedding, decoder layers and loss of each stage."""
    stages = ["t" * count for count in layers]
    return "|".join(["E" + stages[0], *stages[1:-1], stages[-1] + "L"])


def _model(model: Architecture) -> Iterator[str]:
    yield from ("--num-layers", str(model.layers), "--hidden-size", str(model.hidden_size))
    yield from ("--ffn-hidden-size", str(model.intermediate_size), "--num-attention-heads", str(model.heads))
    if model.latent is not None:
        yield from _latent(model)
    else:
        yield from ("--kv-channels", str(model.head_size))
        if model.kv_heads != model.heads:
            yield from ("--group-query-attention", "--num-query-groups", str(model.kv_heads))
    if model.gated:
        yield "--swiglu"
    yield from ("--normalization", "LayerNorm" if model.norm is Norm.LAYER_NORM else "RMSNorm")
    yield from ("--norm-epsilon", number(model.norm_epsilon))
    if not model.biases:
        yield "--disable-bias-linear"
    elif model.activation is Activation.GELU:
        yield "--no-bias-gelu-fusion"  # which approximates it
    if model.attention_biases and not model.biases:
        yield "--add-qkv-bias"
    if model.query_key_norms or model.latent is not None:  # there it means the norms of the latents
        yield "--qk-layernorm"
    yield from _windows(model)
    if not model.tie_embeddings:
        yield "--untie-embeddings-and-output-weights"
    if model.positions:
        yield from ("--position-embedding-type", "learned_absolute")
    else:
        yield from ("--position-embedding-type", "rope", "--rotary-base", str(int(model.rope_theta)))
    if model.rope_scaling is not None and model.latent is None:
        yield from ("--use-rope-scaling", "--rope-scaling-factor", number(model.rope_scaling.factor))
    yield from _mixture(model)


def _windows(model: Architecture) -> Iterator[str]:
    if not model.sliding_window:
        return
    yield from ("--window-size", f"{model.sliding_window - 1},0")  # keys before a token's own, and after it
    if model.full_attention_every:
        yield from ("--window-attn-skip-freq", str(model.full_attention_every))


def _data(model: Architecture) -> Iterator[str]:
    # The tokenizer adds one token.
    yield from ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(model.vocab_size - 1), "--mock-data")
    yield from ("--make-vocab-size-divisible-by", "1")


def _latent(model: Architecture) -> Iterator[str]:
    latent = model.latent
    assert latent is not None
    yield from ("--multi-latent-attention", "--kv-lora-rank", str(latent.kv_rank))
    if latent.query_rank:
        yield from ("--q-lora-rank", str(latent.query_rank))
    yield from ("--qk-head-dim", str(model.head_size), "--qk-pos-emb-head-dim", str(latent.rope_size))
    yield from ("--v-head-dim", str(model.value_size))
    scaling = model.rope_scaling
    if scaling is not None and scaling.factor > 1:
        # Rotary positions of latent attention are YaRN's, by default with a factor of 1.
        scale = number((math.sqrt(scaling.score_factor) - 1) / (0.1 * math.log(scaling.factor)))
        yield from ("--rotary-scaling-factor", number(scaling.factor), "--mscale", scale, "--mscale-all-dim", scale)


def _mixture(model: Architecture) -> Iterator[str]:
    mixture = model.mixture
    if mixture is None:
        return
    yield from ("--num-experts", str(mixture.experts), "--moe-router-topk", str(mixture.per_token))
    yield from ("--moe-ffn-hidden-size", str(mixture.intermediate_size), "--moe-token-dispatcher-type", "alltoall")
    if mixture.dense_layers:
        sparse = model.layers - mixture.dense_layers
        yield from ("--moe-layer-freq", f"([0]*{mixture.dense_layers}+[1]*{sparse})")
    if mixture.shared_intermediate_size:
        yield from ("--moe-shared-expert-intermediate-size", str(mixture.shared_intermediate_size))
    yield from ("--moe-router-score-function", "sigmoid" if mixture.router is Router.SIGMOID else "softmax")
    if mixture.router is Router.SOFTMAX and not mixture.renormalize:
        # Otherwise the softmax is that over the chosen experts.
        yield "--moe-router-pre-softmax"
    if mixture.scaling != 1:
        yield from ("--moe-router-topk-scaling-factor", number(mixture.scaling))
    if mixture.groups > 1:
        yield from ("--moe-router-num-groups", str(mixture.groups))
        yield from ("--moe-router-group-topk", str(mixture.groups_per_token))
    if mixture.balancing is Balancing.BIAS:
        yield from ("--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", number(mixture.bias_rate))
    balances = mixture.balance_weight > 0
    yield from ("--moe-router-load-balancing-type", "seq_aux_loss" if balances else "none")
    if balances:
        yield from ("--moe-aux-loss-coeff", number(mixture.balance_weight))
    if mixture.z_loss_weight:
        yield from ("--moe-z-loss-coeff", number(mixture.z_loss_weight))
    if mixture.capacity_factor is not None:
        yield from ("--moe-expert-capacity-factor", number(mixture.capacity_factor))


def _training(run: FrameworkRun) -> Iterator[str]:
    training, optimizer = run.training, run.training.optimizer
    length = max(training.sequence_length, run.architecture.positions)
    yield from ("--seq-length", str(training.sequence_length), "--max-position-embeddings", str(length))
    yield from ("--train-iters", str(training.steps), "--seed", str(training.seed))
    yield from ("--lr", number(optimizer.learning_rate), "--min-lr", number(optimizer.min_learning_rate))
    yield from (*_decay(optimizer, training.steps), "--lr-warmup-iters", str(optimizer.warmup_steps))
    yield from ("--weight-decay", number(optimizer.weight_decay))
    yield from ("--adam-beta1", number(optimizer.beta1), "--adam-beta2", number(optimizer.beta2))
    yield from ("--clip-grad", number(optimizer.gradient_clip))
    yield from ("--hidden-dropout", number(training.dropout))
    yield from ("--attention-dropout", number(training.attention_dropout))
    yield from {Precision.BF16: ("--bf16",), Precision.FP16: ("--fp16",)}.get(training.precision, ())
    if run.strategy.fp8:
        yield from ("--fp8-format", "hybrid")
    yield from ("--log-interval", "1")


def _decay(optimizer: OptimizerSpec, steps: int) -> Iterator[str]:
    decay = optimizer.decay_or_default
    if decay in DECAYS and optimizer.decay_steps is None:
        yield from ("--lr-decay-style", DECAYS[decay])
        return
    length = steps - optimizer.decay_start(steps)
    yield from ("--lr-decay-style", "WSD", "--lr-wsd-decay-style", LAST_DECAYS[decay])
    yield from ("--lr-wsd-decay-iters", str(length))


def _recomputation(run: FrameworkRun) -> Iterator[str]:
    used = run.strategy
    if used.checkpointing is ActivationCheckpointing.NONE:
        return
    if used.checkpointing is ActivationCheckpointing.SELECTIVE:
        yield from ("--recompute-granularity", "selective")
        return
    yield from ("--recompute-granularity", "full")
    if used.checkpointing is ActivationCheckpointing.FULL and used.checkpoint_layers is not None:
        yield from ("--recompute-method", "block", "--recompute-num-layers", str(used.checkpoint_layers))
    else:
        group = used.recompute_group(max(run.stage_layers))
        yield from ("--recompute-method", "uniform", "--recompute-num-layers", str(group))


def _checkpoint(run: FrameworkRun) -> Iterator[str]:
    if run.spec.checkpoint is not None:
        yield from ("--save", CHECKPOINT_DIRECTORY, "--load", CHECKPOINT_DIRECTORY)
        yield from ("--save-interval", str(run.spec.checkpoint.interval))


MEGATRON_LM = Target(
    name="megatron-lm",
    account="megatron-core",
    techniques=Techniques(
        schedules=(PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED),
        context=tuple(CONTEXT_COMMUNICATION),
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
    | {"training.precision", "training.seed", "training.dropout", "training.attentionDropout", "training.fp8"}
    | {"training.activationCheckpointing", "training.checkpointEvery", "training.optimizer.offload"},
)
