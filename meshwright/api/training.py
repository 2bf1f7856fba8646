"""`spec.training`: how long and how to train."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel
from meshwright.api.lora import LoraSpec
from meshwright.api.precision import Fp8Spec, LossScaleSpec, Precision, ShardedMastersSpec
from meshwright.api.tracking import TrackingSpec


class OptimizerName(StrEnum):
    """The update rule."""

    ADAMW = "AdamW"
    MUON = "Muon"


class OptimizerOffload(StrEnum):
    """Where optimizer state is stored instead of on the GPU."""

    NONE = "None"
    CPU = "CPU"
    FILE = "File"


class RateDecay(StrEnum):
    """How the learning rate decays after the warm-up."""

    COSINE = "Cosine"
    LINEAR = "Linear"
    SQUARE_ROOT = "SquareRoot"
    INVERSE_SQUARE_ROOT = "InverseSquareRoot"
    CONSTANT = "Constant"

    @property
    def has_end(self) -> bool:
        """Whether the rate reaches its minimum in the last step of the run, whenever the decay begins."""
        return self not in (RateDecay.INVERSE_SQUARE_ROOT, RateDecay.CONSTANT)


class OptimizerSpec(ApiModel):
    """The optimizer and the learning-rate schedule, with linear warm-up."""

    name: OptimizerName = OptimizerName.ADAMW
    """`AdamW` (arXiv 1711.05101), or `Muon` (arXiv 2502.16982) for the matrices of layers and AdamW for the rest."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the momentum of `name: Muon`."""
    offload: OptimizerOffload = OptimizerOffload.NONE
    """Where AdamW's moments are stored. `None`: on the GPU. `CPU`: in main memory, where the update then runs too
    (arXiv 2101.06840). `File`: in files below `offloadPath`, with a few buckets in main memory (arXiv 2104.07857)."""
    offload_path: Annotated[str, Field(min_length=2, max_length=1024, pattern="^/")] | None = None
    """Directory in the worker container for `offload: File`, ideally on a local disk (`workers.volumes`)."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 3e-4
    """Peak learning rate."""
    min_learning_rate: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: Annotated[int, Field(ge=0, le=1000000000)] = 0
    """Steps of linear warm-up from 0 to the peak."""
    decay: RateDecay | None = None
    """How the rate decays, by default `Cosine`. `SquareRoot`: 1 - sqrt(progress). `InverseSquareRoot`: in proportion to
    sqrt(`warmupSteps` / step), over all steps."""
    decay_steps: Annotated[int, Field(ge=1, le=1000000000)] | None = None
    """Number of last steps in which the rate decays. Before, it is the peak (warmup-stable-decay, arXiv 2404.06395).
    By default it decays in all steps after the warm-up."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1
    """Decoupled weight decay. It applies to matrices, not to norms."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    gradient_clip: Annotated[float, Field(ge=0, le=1000000)] = 1.0
    """Largest global gradient norm, over all dimensions of the mesh. 0 turns clipping off."""
    early_launch: bool | None = None
    """Off by default. Whether the update is launched before the host has read the step's loss. The GPU
    drops it if loss or gradient norm is not finite."""

    @property
    def decay_or_default(self) -> RateDecay:
        """The decay; `Cosine` if the field is left out."""
        return self.decay or RateDecay.COSINE

    def decay_start(self, steps: int) -> int:
        """The last step with the peak rate in a run of `steps` steps, if the decay has an end."""
        return self.warmup_steps if self.decay_steps is None else steps - self.decay_steps


class ActivationCheckpointing(StrEnum):
    """What the backward pass recomputes instead of storing it in the forward pass."""

    NONE = "None"
    FULL = "Full"
    SELECTIVE = "Selective"
    EVERY_K = "EveryK"
    SQRT = "Sqrt"


class OuterMethod(StrEnum):
    """How islands of replicas synchronize."""

    LOCAL_SGD = "LocalSGD"
    DILOCO = "DiLoCo"
    FED_AVG = "FedAvg"
    ASYNC_SGD = "AsyncSGD"


class OuterSpec(ApiModel):
    """Islands of replicas that train separately and synchronize once per round, for slow links."""

    method: OuterMethod
    """`LocalSGD`: parameters are averaged every round. `DiLoCo`: the mean change of a round is the gradient of a
    Nesterov step. `FedAvg`: each island trains only on its own files, `island-0`, `island-1`, ... of the data volume,
    and is weighted by its number of samples. `AsyncSGD`: islands send gradients to a parameter server, which applies
    each at once. docs/data-parallelism.md names the papers."""
    islands: Annotated[int, Field(ge=2, le=4096)] | None = None
    """Number of islands. Must divide `replicas`. By default every replica is an island."""
    every_steps: Annotated[int, Field(ge=1, le=1000000)] = 50
    """Steps of a round. Islands synchronize, save checkpoints and stop only after a round. Must divide
    `checkpoint.everySteps`."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.7
    """Learning rate of the outer step of `DiLoCo`."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Nesterov momentum of the outer step of `DiLoCo`."""
    staleness: Annotated[int, Field(ge=0, le=65536)] = 8
    """Largest number of updates between reading parameters and applying their gradient, with `AsyncSGD`. With 0,
    islands take turns."""


class EvaluationSpec(ApiModel):
    """The loss on documents that are excluded from training (`data.heldOut`)."""

    every_steps: Annotated[int, Field(ge=1, le=1000000000)] = 100
    """Steps between evaluations. The last step is evaluated too."""
    samples: Annotated[int, Field(ge=1, le=16777216)] = 64
    """Number of sequences of an evaluation, the same ones each time and at each size of the job."""


class AnomalyAction(StrEnum):
    """What to do with an anomalous step."""

    FAIL = "Fail"
    SKIP = "Skip"
    GO_BACK = "GoBack"


class AnomaliesSpec(ApiModel):
    """What to do with steps whose loss or gradient norm is not a finite number, or far above those of the steps before.
    All ranks decide alike. Samples of a skipped or abandoned step are not trained on again.
    """

    non_finite: AnomalyAction = AnomalyAction.FAIL
    """What to do if loss or gradient norm is not a finite number (with `precision: fp16`, at any loss scale). `Fail`:
    ranks fail, and restart from the latest checkpoint with the same samples. `Skip`: update nothing in this step.
    `GoBack`: restart from an older checkpoint, with the samples that follow this step."""
    spike: AnomalyAction | None = None
    """The same for a spike: a loss or gradient norm above the mean of the window by more than `spikeSigmas` standard
    deviations; the norm also at least five times the mean. By default spikes are not looked for."""
    spike_sigmas: Annotated[float, Field(ge=1, le=1000)] = 6.0
    """Standard deviations from which on a step is a spike. A standard deviation counts as at least 1% of the mean."""
    window: Annotated[int, Field(ge=8, le=1024)] = 128
    """Number of updates before a step that it is compared with. No step is a spike before half as many."""
    go_back_steps: Annotated[int, Field(ge=1, le=1000000)] = 100
    """Steps between a `GoBack` and the checkpoint that training continues from, at least. The oldest checkpoint if none
    is that old: retain enough of them (`checkpoint.keep`)."""
    max_skipped: Annotated[int, Field(ge=1, le=1000000)] = 10
    """Skipped steps in a row after which ranks fail."""
    repeat_every_steps: Annotated[int, Field(ge=1, le=1000000000)] | None = None
    """Experimental, off by default. Steps after which the gradients of a replica's samples are computed again on
    another replica. If they differ in a bit, ranks fail, and a third replica shows whose node is at fault."""


class TrainingSpec(ApiModel):
    """How long and how to train."""

    steps: Annotated[int, Field(ge=1, le=1000000000)]
    """Optimizer steps of the run."""
    global_batch_size: Annotated[int, Field(ge=1, le=16777216)]
    """Sequences per optimizer step, over all replicas. Must be divisible by `replicas`."""
    sequence_length: Annotated[int, Field(ge=8, le=16777216)]
    """Tokens per sequence. Must be divisible by `parallelism.tensor` when `parallelism.sequence` is true."""
    seed: Annotated[int, Field(ge=0, le=2147483647)] = 0
    """Seed of initial weights and of the data order: the same seed gives the same run in every layout."""
    precision: Precision = Precision.FP32
    """Number format of compute. `fp16` scales the loss. `fp64` computes and stores everything in fp64: slow, for
    comparing layouts."""
    master_weights: bool = True
    """Whether parameters are fp32 if compute is not. False, with `precision: bf16`: parameters, gradients and
    AdamW's moments are bf16, and updates are rounded stochastically (arXiv 2010.06192)."""
    sharded_masters: ShardedMastersSpec | None = None
    """Experimental: store parameters in bf16 and shard their fp32 master weights over replicas. Needs `precision: bf16`
    and `dataParallel.strategy: ZeRO`. By default every rank has all parameters in fp32."""
    fp8: Fp8Spec | None = None
    """Matrix products of the layers in fp8, the rest in `precision` (bf16 or fp32). GPUs without fp8 are rejected; a
    CPU emulates the same numbers."""
    loss_scale: LossScaleSpec = LossScaleSpec()
    """Loss scaling of `precision: fp16`."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Optimizer and learning-rate schedule."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout rate after the embedding and after each attention and feed-forward layer. A token's mask is the same in
    every layout."""
    attention_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout rate of the attention probabilities, which are then stored in memory. Needs `parallelism.context: 1`."""
    varlen_attention: bool | None = None
    """Experimental. Whether one kernel computes attention of all documents of a micro-batch. Needs `data.packing:
    Documents`. Defaults to false."""
    loss_chunk_tokens: Annotated[int, Field(ge=1, le=16777216)] | None = None
    """Number of tokens whose logits exist at a time (arXiv 2410.10989). Defaults to the entire micro-batch."""
    activation_checkpointing: ActivationCheckpointing | None = None
    """What the backward pass recomputes to save memory; gradients are the same. By default the planner chooses among
    `None`, `Selective`, `Full` and `Sqrt`. `Full`: each layer from its input. `Selective`: all except matrix products
    and attention. `EveryK`: groups of `checkpointEvery` layers from their input. `Sqrt`: groups of the square root of a
    stage's layers (arXiv 1604.06174)."""
    checkpoint_every: Annotated[int, Field(ge=1, le=1024)] = 2
    """Number of layers of a group with `activationCheckpointing: EveryK`."""
    activation_offload: bool = False
    """Whether activations for the backward pass are in main memory. Copies overlap with computation."""
    parameter_offload: bool = False
    """Whether shards of parameters, gradients and optimizer state are in main memory, and the update runs there. Needs
    `parallelism.zeroStage` 2 or 3."""
    parameter_offload_path: Annotated[str, Field(min_length=2, max_length=1024, pattern="^/")] | None = None
    """Directory in the worker container for files with the parameter shards of `parameterOffload: true`, ideally on a
    local disk (`workers.volumes`). By default the shards are in main memory."""
    compile: bool = False
    """Whether torch.compile compiles the layers: faster steps, after a first step that takes minutes. Needs a C++
    compiler in the image."""
    garbage_collection_steps: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Experimental. Number of steps after which all ranks collect Python's garbage, and at no other time. By default
    each rank does when Python chooses, and others wait for it."""
    deterministic: bool = True
    """Whether GPUs use deterministic kernels, so that a resumed run repeats an uninterrupted one bit by bit.
    Attention's backward pass is then slower. CPU kernels always are."""
    outer: OuterSpec | None = None
    """Islands of replicas that synchronize once per round. By default all replicas synchronize in every step."""
    initial_weights: Annotated[str, Field(min_length=2, max_length=1024, pattern="^/")] | None = None
    """Directory with initial weights in the worker container (a volume of `workers.volumes`): a Hugging Face
    `config.json` of the same shape as `model`, and safetensors files. Defaults to random weights from `seed`."""
    lora: LoraSpec | None = None
    """Train only low-rank adapters. By default every parameter is trained."""
    evaluation: EvaluationSpec | None = None
    """Evaluate during training. Needs `data.heldOut`. Off by default."""
    tracking: TrackingSpec | None = None
    """Experiment trackers. Off by default."""
    anomalies: AnomaliesSpec | None = None
    """Steps that are skipped, or after which training goes back. By default ranks fail if loss or gradient norm is not
    a finite number, and spikes are not looked for."""

    @property
    def may_skip_updates(self) -> bool:
        """Whether a step may update nothing, although its gradients were reduced."""
        anomalies = self.anomalies
        skips = anomalies is not None and AnomalyAction.SKIP in (anomalies.non_finite, anomalies.spike)
        return skips or self.precision is Precision.FP16

    @property
    def checkpointing(self) -> ActivationCheckpointing:
        """What is recomputed; `None` if the field is left out."""
        return self.activation_checkpointing or ActivationCheckpointing.NONE
