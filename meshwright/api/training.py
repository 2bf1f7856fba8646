"""`spec.training`: how long and how to train."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel
from meshwright.api.lora import LoraSpec
from meshwright.api.precision import Fp8Spec, LossScaleSpec, Precision


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
    """Matrix products of the layers in fp8, between activations in `precision` (bf16 or fp32); off when left out. A
    GPU without such products refuses it; a CPU emulates them with the same numbers."""
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
    activation_checkpointing: ActivationCheckpointing | None = None
    """What the backward pass computes again, layer by layer, to save memory; gradients are the same. When left out:
    `None`, or where no layout fits the first of `Selective`, `Full` and `Sqrt` with which one does. `Full`: each
    layer from its input. `Selective`: all but matrix products and attention. `EveryK`: groups of `checkpointEvery`
    layers from their input. `Sqrt`: groups of the square root of a stage's layers (arXiv 1604.06174)."""
    checkpoint_every: Annotated[int, Field(ge=1, le=1024)] = 2
    """Layers of a group with `activationCheckpointing: EveryK`."""
    activation_offload: bool = False
    """Whether what layers keep for the backward pass waits in main memory, copied beside the computation."""
    parameter_offload: bool = False
    """Whether each rank's shards of parameters, gradients and optimizer state are in main memory, and the update runs
    there; the GPU gathers a layer at a time. Needs `parallelism.zeroStage` 2 or 3."""
    parameter_offload_path: Annotated[str, Field(min_length=2, max_length=1024, pattern="^/")] | None = None
    """Directory in the worker container for the shards of parameters with `parameterOffload: true`, best on a volume of
    `workers.volumes` on a local disk: they are in files there, and main memory holds those that are in use. In main
    memory alone when left out."""
    compile: bool = False
    """Whether layers are compiled by torch.compile: faster steps after a first step of minutes. Needs a C++ compiler in
    the image."""
    deterministic: bool = True
    """Whether GPUs use no kernels but those whose sums have one order, so that a resumed run repeats an uninterrupted
    one bit by bit. That costs some of attention's backward pass. On CPUs sums have one order anyway."""
    outer: OuterSpec | None = None
    """Islands of replicas that meet once a round; when left out all replicas take every step together."""
    initial_weights: Annotated[str, Field(min_length=2, max_length=1024, pattern="^/")] | None = None
    """Directory to begin from, as worker containers see it (a volume of `workers.volumes`): a Hugging Face
    `config.json` of the same shape as `model`, and safetensors files. Random weights by `seed` when left out."""
    lora: LoraSpec | None = None
    """Train low-rank adapters alone; every parameter when left out."""
    evaluation: EvaluationSpec | None = None
    """Evaluate while training; needs `data.heldOut`. Not at all when left out."""

    @property
    def checkpointing(self) -> ActivationCheckpointing:
        """What is computed again; nothing where that is left out."""
        return self.activation_checkpointing or ActivationCheckpointing.NONE
