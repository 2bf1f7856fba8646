"""`spec` of a ParallelTrainingJob. A field stands here only when its behaviour does."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from meshwright.api.base import ApiModel
from meshwright.api.data import DataSpec
from meshwright.api.failures import ExitCodeRule
from meshwright.api.labels import GPU_RESOURCE
from meshwright.api.lora import LoraSpec
from meshwright.api.model import ModelSpec
from meshwright.api.values import Quantity, ShortText
from meshwright.api.volumes import VolumeSpec

MANAGER_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
Degree = Annotated[int, Field(ge=1, le=65536)]


class Precision(StrEnum):
    """The number format of compute; parameters, gradients' reduction and optimizer state are fp32, or all fp64."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP64 = "fp64"


class LossScaleSpec(ApiModel):
    """Dynamic loss scaling of `precision: fp16` (arXiv 1710.03740)."""

    initial: Annotated[int, Field(ge=1, le=4294967296)] = 65536
    """What gradients are multiplied by at first. A step whose gradients overflow is skipped and halves it."""
    growth_interval: Annotated[int, Field(ge=1, le=1000000000)] = 2000
    """Steps without an overflow after which the scale doubles."""


class Fp8Scaling(StrEnum):
    """What shares a scale in fp8."""

    TENSORWISE = "Tensorwise"
    ROWWISE = "Rowwise"


class Fp8Update(StrEnum):
    """What a scale in fp8 is taken from."""

    DYNAMIC = "Dynamic"
    DELAYED = "Delayed"
    STATIC = "Static"


class Fp8Spec(ApiModel):
    """Matrix products of the layers in fp8 (arXiv 2209.05433): e4m3 for inputs and weights, e5m2 for gradients."""

    scaling: Fp8Scaling = Fp8Scaling.TENSORWISE
    """`Tensorwise`: one scale a tensor. `Rowwise`: one for each row of either factor; needs `update: Dynamic`."""
    update: Fp8Update = Fp8Update.DYNAMIC
    """`Dynamic`: scales of the micro-batch at hand. `Delayed`: of the largest values of the last `history` steps.
    `Static`: of `inputAmax`, `weightAmax` and `gradientAmax`; what is larger is clamped."""
    history: Annotated[int, Field(ge=1, le=1024)] = 16
    """Steps that `update: Delayed` looks back."""
    input_amax: Annotated[float, Field(gt=0, le=1e30)] = 16.0
    """Largest input that `update: Static` represents."""
    weight_amax: Annotated[float, Field(gt=0, le=1e30)] = 4.0
    """Largest weight that `update: Static` represents."""
    gradient_amax: Annotated[float, Field(gt=0, le=1e30)] = 1.0
    """Largest gradient of an output that `update: Static` represents."""


class OptimizerName(StrEnum):
    """The rule of the update."""

    ADAMW = "AdamW"
    MUON = "Muon"


class OptimizerOffload(StrEnum):
    """Where optimizer state is kept instead of on the GPU."""

    NONE = "None"
    CPU = "CPU"
    FILE = "File"


class OptimizerSpec(ApiModel):
    """The optimizer, with linear warm-up and cosine decay."""

    name: OptimizerName = OptimizerName.ADAMW
    """`AdamW` (arXiv 1711.05101), or `Muon` (arXiv 2502.16982) for the matrices of layers and AdamW for the rest."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the momentum of `name: Muon`."""
    offload: OptimizerOffload = OptimizerOffload.NONE
    """Where AdamW's moments are kept: `None`: on the GPU. `CPU`: in main memory, where the update then runs too (arXiv
    2101.06840). `File`: in files of `offloadPath`, a few buckets of them in main memory (arXiv 2104.07857)."""
    offload_path: Annotated[str, Field(min_length=2, max_length=1024, pattern="^/")] | None = None
    """Directory in the worker container for `offload: File`, best on a volume of `workers.volumes` on a local disk."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 3e-4
    """Peak learning rate."""
    min_learning_rate: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Learning rate at the end of the cosine decay."""
    warmup_steps: Annotated[int, Field(ge=0, le=1000000000)] = 0
    """Steps of linear warm-up from 0 to the peak."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1
    """Decoupled weight decay; applied to matrices, not to norms."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    gradient_clip: Annotated[float, Field(ge=0, le=1000000)] = 1.0
    """Largest global gradient norm, over all dimensions of the mesh; 0 clips nothing."""


class ActivationCheckpointing(StrEnum):
    """What the backward pass computes again instead of keeping it from the forward pass."""

    NONE = "None"
    FULL = "Full"
    SELECTIVE = "Selective"
    EVERY_K = "EveryK"
    SQRT = "Sqrt"


class OuterMethod(StrEnum):
    """How islands of replicas that train apart come together."""

    LOCAL_SGD = "LocalSGD"
    DILOCO = "DiLoCo"
    FED_AVG = "FedAvg"
    ASYNC_SGD = "AsyncSGD"


class OuterSpec(ApiModel):
    """Islands of replicas that train on their own and meet rarely, for links too slow for a sum every step."""

    method: OuterMethod
    """`LocalSGD`: parameters are averaged every round (arXiv 1805.09767). `DiLoCo`: the mean change of a round is the
    gradient of a Nesterov step (arXiv 2311.08105). `FedAvg`: each island trains on its own files alone, `island-0`,
    `island-1`, ... of the data volume, and counts by its number of samples (arXiv 1602.05629). `AsyncSGD`: islands send
    gradients to a parameter server, which applies each as it comes (arXiv 1106.5730 with a bound on staleness)."""
    islands: Annotated[int, Field(ge=2, le=4096)] | None = None
    """Number of islands; must divide `replicas`. When left out every replica is one."""
    every_steps: Annotated[int, Field(ge=1, le=1000000)] = 50
    """Steps of a round. Islands meet after each, checkpoints are taken then and a stop waits for it: must divide
    `checkpoint.everySteps`."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.7
    """Learning rate of the outer step of `DiLoCo`."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Nesterov momentum of the outer step of `DiLoCo`."""
    staleness: Annotated[int, Field(ge=0, le=65536)] = 8
    """With `AsyncSGD`, the most updates that a gradient may be behind when it is applied; 0 lets islands take turns."""


class EvaluationSpec(ApiModel):
    """A loss on documents that are never trained on (`data.heldOut`)."""

    every_steps: Annotated[int, Field(ge=1, le=1000000000)] = 100
    """Steps between evaluations; the last step is followed by one too."""
    samples: Annotated[int, Field(ge=1, le=16777216)] = 64
    """Sequences of an evaluation, the same ones each time; rounded up to whole batches."""


class TrainingSpec(ApiModel):
    """How long and how to train."""

    steps: Annotated[int, Field(ge=1, le=1000000000)]
    """Optimizer steps of the whole run."""
    global_batch_size: Annotated[int, Field(ge=1, le=16777216)]
    """Sequences per optimizer step, over all replicas. Must be divisible by `replicas`."""
    sequence_length: Annotated[int, Field(ge=8, le=16777216)]
    """Tokens per sequence. Must be divisible by `parallelism.tensor` when `parallelism.sequence` is true."""
    seed: Annotated[int, Field(ge=0, le=2147483647)] = 0
    """Seed of initial weights and of the data order: the same seed gives the same run in every layout."""
    precision: Precision = Precision.FP32
    """Number format of compute. `fp16` scales the loss. `fp64` computes and keeps everything in it: slow, for comparing
    layouts."""
    master_weights: bool = True
    """Whether parameters are fp32 where compute is not. False, with `precision: bf16`: parameters, gradients and
    AdamW's moments are bf16, and updates are rounded stochastically (arXiv 2010.06192)."""
    fp8: Fp8Spec | None = None
    """Matrix products of the layers in fp8, between activations in `precision` (bf16 or fp32); off when left out. Where
    the GPU has no such products they are emulated with the same numbers."""
    loss_scale: LossScaleSpec = LossScaleSpec()
    """Loss scaling of `precision: fp16`."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Optimizer and learning-rate schedule."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Rate of dropout behind the embedding and behind each attention and feed-forward layer. A token's mask follows
    from `seed`, the token's place in the run and the layer: it is the same in every layout."""
    attention_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Rate of dropout of attention's probabilities, which are then kept in memory; needs whole sequences on a rank."""
    loss_chunk_tokens: Annotated[int, Field(ge=1, le=16777216)] | None = None
    """Tokens whose logits exist at a time: output projection and loss are then computed in chunks, and gradients of the
    loss with them (arXiv 2410.10989). Whole logits of a micro-batch when left out."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    """What the backward pass computes again, layer by layer, to save memory; gradients are the same. `Full`: each
    layer from its input. `Selective`: all but matrix products and attention. `EveryK`: groups of `checkpointEvery`
    layers from their input. `Sqrt`: groups of the square root of a stage's layers (arXiv 1604.06174)."""
    checkpoint_every: Annotated[int, Field(ge=1, le=1024)] = 2
    """Layers of a group with `activationCheckpointing: EveryK`."""
    activation_offload: bool = False
    """Whether what layers keep for the backward pass waits in main memory, copied beside the computation."""
    parameter_offload: bool = False
    """Whether each rank's shards of parameters, gradients and optimizer state are in main memory, and the update runs
    there; the GPU gathers a layer at a time. Needs `parallelism.zeroStage` 2 or 3."""
    compile: bool = False
    """Whether layers are compiled by torch.compile: faster steps after a first step of minutes. Needs a C++ compiler in
    the image."""
    outer: OuterSpec | None = None
    """Islands of replicas that meet once a round; when left out all replicas take every step together."""
    initial_weights: Annotated[str, Field(min_length=2, max_length=1024, pattern="^/")] | None = None
    """Directory to begin from, as worker containers see it (a volume of `workers.volumes`): a Hugging Face
    `config.json` of the same shape as `model`, and safetensors files. Random weights by `seed` when left out."""
    lora: LoraSpec | None = None
    """Train low-rank adapters alone; every parameter when left out."""
    evaluation: EvaluationSpec | None = None
    """Evaluate while training; needs `data.heldOut`. Not at all when left out."""


class PipelineSchedule(StrEnum):
    """The order in which a pipeline runs its micro-batches."""

    NAIVE = "Naive"
    GPIPE = "GPipe"
    ONE_F_ONE_B = "1F1B"
    INTERLEAVED = "Interleaved1F1B"
    LOOPED_BFS = "LoopedBFS"
    ZB_H1 = "ZBH1"
    ZB_H2 = "ZBH2"
    ZB_V = "ZBV"
    AUTOMATIC = "Automatic"
    DUAL_PIPE = "DualPipe"
    DUAL_PIPE_V = "DualPipeV"
    PIPEDREAM = "PipeDream"
    PIPEDREAM_2BW = "PipeDream2BW"


class StageBalance(StrEnum):
    """What is dealt evenly to the stages of a pipeline."""

    LAYERS = "Layers"
    FLOPS = "Flops"


class ContextMethod(StrEnum):
    """How attention goes over the ranks that share a sequence."""

    RING = "Ring"
    """Keys and values go round (arXiv 2310.01889); each rank has consecutive tokens."""
    RING_ZIG_ZAG = "RingZigZag"
    """The same; each rank has an early and a late part, so that causal attention costs all alike."""
    ULYSSES = "Ulysses"
    """All-to-all from tokens to heads and back (arXiv 2309.14509)."""
    ALL_GATHER = "AllGather"
    """Keys and values are gathered (Llama 3, arXiv 2407.21783, section 3.3.2)."""
    RING_ULYSSES = "RingUlysses"
    """All-to-all inside groups of neighbours, a ring across them (USP, arXiv 2405.07719)."""


class DataParallelStrategy(StrEnum):
    """How replicas keep their parameters equal; the names in capitals with underscores are those of torch's FSDP1."""

    DDP = "DDP"
    ZERO = "ZeRO"
    FSDP = "FSDP"
    NO_SHARD = "NO_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    FULL_SHARD = "FULL_SHARD"
    HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2"
    HYBRID_SHARD = "HYBRID_SHARD"

    @property
    def zero_stages(self) -> tuple[int, ...]:
        """The values of `zeroStage` that it goes with."""
        return _ZERO_STAGES[self]


_ZERO_STAGES = {
    DataParallelStrategy.DDP: (0,),
    DataParallelStrategy.ZERO: (1, 2),
    DataParallelStrategy.FSDP: (2, 3),
    DataParallelStrategy.NO_SHARD: (0,),
    DataParallelStrategy.SHARD_GRAD_OP: (2,),
    DataParallelStrategy.FULL_SHARD: (3,),
    DataParallelStrategy.HYBRID_SHARD_ZERO2: (2,),
    DataParallelStrategy.HYBRID_SHARD: (3,),
}


class GradientCompression(StrEnum):
    """What gradients are reduced to before they are summed over replicas."""

    NONE = "None"
    FP16 = "FP16"
    BF16 = "BF16"
    INT8 = "Int8"
    TOP_K = "TopK"
    POWER_SGD = "PowerSGD"


class DataParallelSpec(ApiModel):
    """How replicas of the model are kept equal."""

    strategy: DataParallelStrategy | None = None
    """`DDP` (`zeroStage` 0): gradients are summed in buckets while backward runs. `ZeRO` (1, 2): flat shards, a
    reduce-scatter of gradients and an all-gather of updated parameters. `FSDP` (2, 3): FSDP2, layer by layer. Or a
    name of FSDP1: `NO_SHARD` (0), `SHARD_GRAD_OP` (2), `FULL_SHARD` (3), and with `shardSize` `HYBRID_SHARD` (3) and
    `HYBRID_SHARD_ZERO2` (2). When left out: `DDP`, `ZeRO`, `FSDP`, `FSDP` for `zeroStage` 0 to 3."""
    bucket_elements: Annotated[int, Field(ge=1, le=4294967296)] = 16777216
    """Gradients that one collective of `DDP` and `ZeRO` sums; a tensor is never cut, so a larger one goes alone."""
    overlap: bool = True
    """Whether `DDP` and `ZeRO` stage 1 sum a bucket as soon as the last backward pass is done with it; after all
    backward passes otherwise. `ZeRO` stage 2 always does after each micro-batch, `FSDP` layer by layer."""
    shard_size: Degree | None = None
    """Replicas that share one set of shards, each set a copy of the others (HSDP): neighbours, so that gathering
    stays on fast links. Must divide `replicas`; all of them when left out. Needs `zeroStage` 1 or more."""
    reshard_size: Annotated[int, Field(ge=2, le=65536)] | None = None
    """With `zeroStage: 3`, keep a layer's parameters between forward and backward on every so many neighbours, a
    secondary copy that backward gathers from (hpZ of ZeRO++, arXiv 2306.10209). Must divide `replicas`; needs
    `tensor: 1` and `pipeline: 1`."""
    compression: GradientCompression = GradientCompression.NONE
    """What `DDP` sends for a gradient. `FP16`, `BF16`: that format. `Int8`: 8 bits an element with a scale a bucket.
    `TopK`: the largest elements alone. `PowerSGD`: two thin factors of each matrix (arXiv 1905.13727). The last three
    add what was left out to the next step's gradient (error feedback)."""
    compression_rank: Annotated[int, Field(ge=1, le=1024)] = 4
    """Columns of the factors of `compression: PowerSGD`."""
    compression_density: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Share of the elements that `compression: TopK` sends."""


class ParallelismSpec(ApiModel):
    """How one replica of the model is split. What is left out the planner chooses."""

    tensor: Degree | None = None
    """Tensor-parallel degree: every layer split over this many GPUs of one NVLink domain."""
    pipeline: Degree | None = None
    """Pipeline-parallel degree: number of stages the layers are split into."""
    expert: Degree | None = None
    """Expert-parallel degree: the experts of a mixture are spread over this many of the ranks that hold the same dense
    parameters. Must divide `replicas` and `model.mixture.experts`; 1 without a mixture."""
    sequence: bool = True
    """Megatron sequence parallelism: norms and residuals split along the sequence inside a tensor-parallel group."""
    context: Annotated[int, Field(ge=1, le=1024)] = 1
    """Context-parallel degree: GPUs that share the tokens of each sequence. A replica has this many times as many.
    `training.sequenceLength` must be at least twice `context` times `tensor`."""
    context_method: ContextMethod = ContextMethod.RING_ZIG_ZAG
    """How attention goes over the GPUs of `context`. `RingZigZag`: keys and values go round them, causal work is even.
    `Ring`: the same with consecutive tokens. `Ulysses`: heads are exchanged for tokens; `context` times `tensor` must
    divide `model.heads`. `AllGather`: keys and values are gathered. `RingUlysses`: heads inside groups of `ulysses`,
    a ring across them."""
    ulysses: Degree | None = None
    """With `contextMethod: RingUlysses`, and only then: how many neighbours exchange heads; it divides `context`, and
    times `tensor` it divides `model.heads`."""
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    """Order in which a pipeline runs its micro-batches. `Naive`: one at a time. `GPipe` (arXiv 1811.06965), `1F1B`
    (PipeDream-Flush, arXiv 2006.09503), `Interleaved1F1B` (arXiv 2104.04473), `LoopedBFS` (arXiv 2211.05953). Backward
    in halves: `ZBH1`, `ZBH2`, `Automatic` (arXiv 2401.10241), `ZBV` (arXiv 2405.15362). Forward and backward
    overlapped: `DualPipe`, `DualPipeV` (arXiv 2412.19437). Without a flush, and so with stale weights: `PipeDream`
    (arXiv 1806.03377), `PipeDream2BW` (arXiv 2006.09503)."""
    virtual_stages: Annotated[int, Field(ge=2, le=64)] | None = None
    """Stages of one rank with `Interleaved1F1B` and `LoopedBFS`, the only schedules that allow it; 2 when left out."""
    layer_split: Annotated[list[Annotated[int, Field(ge=1, le=1024)]], Field(min_length=1, max_length=1024)] | None = (
        None
    )
    """Layers of each stage, in the model's order; must add up to `model.layers`. As `stageBalance` says when left
    out. There are `pipeline` stages, times `virtualStages`, or times 2 with `ZBV` and `DualPipeV`."""
    stage_balance: StageBalance = StageBalance.LAYERS
    """What stages have the same of. `Layers`: their number, the first stages taking what is left over. `Flops`: the
    work, the last stage's output projection counted."""
    rematerialize: bool = False
    """Keep only the input of each stage for a micro-batch and compute the stage again before its backward pass (GPipe,
    arXiv 1811.06965, section 2.3)."""
    activation_limit: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Micro-batches whose activations a rank may hold with the schedule `Automatic`; `pipeline`, which is what 1F1B
    holds, when left out."""
    micro_batches: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Micro-batches per replica and step: at least one for every stage. `training.globalBatchSize` must be divisible by
    `replicas` times this."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """Sharding over replicas (ZeRO, arXiv 1910.02054): 0 none, 1 optimizer state, 2 gradients too, 3 parameters too."""
    data_parallel: DataParallelSpec = DataParallelSpec()
    """How replicas are kept equal."""


class Toleration(ApiModel):
    """A taint the worker pods tolerate."""

    key: Annotated[str, Field(min_length=1, max_length=316)] | None = None
    """Taint key; empty with operator `Exists` matches every taint."""
    operator: Annotated[str, Field(pattern="^(Exists|Equal)$", max_length=6)] = "Equal"
    """`Exists` or `Equal`."""
    value: Annotated[str, Field(max_length=63)] | None = None
    """Taint value to match when the operator is `Equal`."""
    effect: Annotated[str, Field(pattern="^(NoSchedule|PreferNoSchedule|NoExecute)$", max_length=16)] | None = None
    """Taint effect to match; all effects when left out."""
    toleration_seconds: Annotated[int, Field(ge=0, le=2147483647)] | None = None
    """How long a `NoExecute` taint is tolerated."""


class KeyReference(ApiModel):
    """One key of a Secret or ConfigMap in the job's namespace."""

    name: ShortText
    """Name of the object."""
    key: ShortText
    """Key in it."""


class EnvSource(ApiModel):
    """Where an environment variable's value comes from: exactly one of the two."""

    secret_key_ref: KeyReference | None = None
    """A key of a Secret. The operator never reads it: the kubelet does."""
    config_map_key_ref: KeyReference | None = None
    """A key of a ConfigMap."""


class EnvVar(ApiModel):
    """An environment variable of the worker container."""

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Name. Names that begin with `MESHWRIGHT_` are reserved."""
    value: Annotated[str, Field(max_length=4096)] = ""
    """Value. Excludes `valueFrom`."""
    value_from: EnvSource | None = None
    """Where the value comes from, for what must not stand in the job: a token, a key. Excludes `value`."""


class ImagePullPolicy(StrEnum):
    """When the image is pulled."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class ImagePullSecret(ApiModel):
    """A secret with the credentials of an image registry."""

    name: ShortText
    """Name of a secret in the job's namespace."""


class ResourcesSpec(ApiModel):
    """CPU and memory of one worker pod."""

    cpu: Quantity | None = None
    """CPU request of the pod, such as `16` or `500m`."""
    memory: Quantity | None = None
    """Memory request and limit of the pod, such as `64Gi`."""


class WorkersSpec(ApiModel):
    """The worker pods. One pod holds the consecutive ranks of `gpusPerWorker` GPUs on one node."""

    image: Annotated[str, Field(min_length=1, max_length=1024)]
    """Container image with the worker runtime, or with the command of `runtime.command`."""
    image_pull_policy: ImagePullPolicy | None = None
    """When the image is pulled; when left out, `Always` for the tag `latest` and `IfNotPresent` for others."""
    image_pull_secrets: Annotated[
        list[ImagePullSecret], Field(max_length=16, json_schema_extra={"x-list-map-key": "name"})
    ] = []
    """Secrets with the credentials of the image's registry."""
    gpus_per_worker: Annotated[int, Field(ge=1, le=1024)] = 8
    """GPUs, and so ranks, of one pod. Must divide the world size, and be a multiple or a divisor of
    `parallelism.tensor`."""
    gpu_resource: Annotated[str, Field(min_length=3, max_length=253, pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")] = (
        GPU_RESOURCE
    )
    """Extended resource that stands for one GPU."""
    resources: ResourcesSpec = ResourcesSpec()
    """CPU and memory of each pod."""
    env: Annotated[list[EnvVar], Field(max_length=64, json_schema_extra={"x-list-map-key": "name"})] = []
    """Further environment variables of the worker container."""
    volumes: Annotated[list[VolumeSpec], Field(max_length=16, json_schema_extra={"x-list-map-key": "name"})] = []
    """Further volumes of the worker container: claims, ConfigMaps, Secrets and scratch space."""
    node_selector: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)] = {}
    """Labels that a node must carry."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = []
    """Taints that the pods tolerate."""
    service_account_name: ShortText | None = None
    """Service account of the pods; its token is not mounted."""
    termination_grace_period_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    """Time to write a checkpoint after SIGTERM before the pod is killed."""


class RuntimeSpec(ApiModel):
    """What the ranks run: Meshwright's own runtime, or the user's command."""

    command: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(min_length=1, max_length=64)] | None = None
    """A torchrun-style command, started once per rank with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and
    the rank's mesh coordinates in its environment. Exit code 0 ends the run, 143 after SIGTERM asks to be run again,
    any other is a failure. Excludes `model`, `data` and `training`."""
    scripts: ShortText | None = None
    """ConfigMap whose keys are mounted as files under `/meshwright/scripts`; `command` may name them there."""


class CheckpointSpec(ApiModel):
    """Where and how often the state of training is saved."""

    claim_name: ShortText
    """PersistentVolumeClaim, writable from every node that runs workers (ReadWriteMany), for this job's checkpoints."""
    every_steps: Annotated[int, Field(ge=1, le=1000000000)] | None = None
    """Steps between checkpoints of Meshwright's own runtime; 100 when left out. Not allowed with `runtime.command`."""
    keep: Annotated[int, Field(ge=1, le=10000)] | None = None
    """Newest complete checkpoints to keep; 2 when left out. Not allowed with `runtime.command`."""

    @property
    def interval(self) -> int:
        """Steps between checkpoints. No default stands in the schema: with a command the field must be absent."""
        return 100 if self.every_steps is None else self.every_steps

    @property
    def retained(self) -> int:
        """How many complete checkpoints are kept."""
        return 2 if self.keep is None else self.keep


class CordonedNodes(StrEnum):
    """What workers do when their node takes nothing new."""

    MOVE = "Move"
    STAY = "Stay"


class RecoverySpec(ApiModel):
    """What to do when ranks fail."""

    max_restarts: Annotated[int, Field(ge=0, le=1000000)] = 10
    """Restarts after failures of the job's own processes before the job fails. Lost or deleted pods do not count."""
    hang_timeout_seconds: Annotated[int, Field(ge=1, le=604800)] | None = None
    """How long a rank of Meshwright's own runtime may live without finishing a step before all ranks are killed and
    started again. When left out: ten times the recent time of a step, and at least 300 seconds. Until the first step
    of a generation it is never less than 900 seconds."""
    cordoned_nodes: CordonedNodes = CordonedNodes.MOVE
    """What becomes of workers on a node that is cordoned or got a taint that they do not tolerate. `Move`: they save a
    checkpoint and move, once there is room for them elsewhere. `Stay`: they run on until somebody evicts them."""
    restart_window_seconds: Annotated[int, Field(ge=60, le=2592000)] | None = None
    """Only restarts of the last so many seconds count toward `maxRestarts`, which may then be at most 100; all of them
    when left out."""
    exit_codes: Annotated[list[ExitCodeRule], Field(max_length=20)] = []
    """What an exit code of a rank or worker means; the first rule that names the code decides. A code that no rule
    names counts toward `maxRestarts`."""


class SuccessPolicy(StrEnum):
    """When a run is over and well."""

    ALL_WORKERS = "AllWorkers"
    FIRST_WORKER = "FirstWorker"


class ParallelTrainingJobSpec(ApiModel):
    """What to train, how to split it and what it runs on."""

    replicas: Degree = 1
    """Data-parallel replicas of the model."""
    model: ModelSpec | None = None
    """The model. Required unless `runtime.command` is set."""
    data: DataSpec | None = None
    """The training data. Required unless `runtime.command` is set."""
    training: TrainingSpec | None = None
    """Length, batch, precision and optimizer. Required unless `runtime.command` is set."""
    parallelism: ParallelismSpec = ParallelismSpec()
    """How one replica is split over GPUs."""
    workers: WorkersSpec
    """The worker pods."""
    runtime: RuntimeSpec = RuntimeSpec()
    """What the ranks run."""
    checkpoint: CheckpointSpec | None = None
    """Checkpoints; without it a restarted run begins at step 0."""
    recovery: RecoverySpec = RecoverySpec()
    """What to do when ranks fail."""
    success_policy: SuccessPolicy = SuccessPolicy.ALL_WORKERS
    """`AllWorkers`: the job is complete when every worker has ended well. `FirstWorker`: when the one of rank 0
    has, and the others are then stopped; it needs `runtime.command`."""
    priority: Annotated[int, Field(ge=-1000000000, le=1000000000)] = 0
    """Place in the line of jobs that wait for room: higher first, then older. A running job is never stopped for it."""
    suspend: bool = False
    """Whether the job gives its pods back and waits; when false again it goes on from the last checkpoint."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=2147483647)] | None = None
    """Longest time from the first start to the end, suspended time not counted; then the job fails."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2147483647)] | None = None
    """How long a finished job is kept before it is deleted; for ever when left out."""
    priority_class_name: ShortText | None = None
    """PriorityClass of the pods; the cluster's default when left out."""
    managed_by: Annotated[str, Field(min_length=3, max_length=63, pattern=MANAGER_PATTERN)] | None = None
    """The controller that acts on this job, as `domain/name`; another one than `meshwright.dev/operator` and this
    operator leaves the job alone entirely. It may not be changed."""
