"""A job's spec in the cost model's terms: the one translation that memory, price and search rest on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.api.lora import LoraSpec
from meshwright.api.parallelism import ParallelismSpec, PipelineSchedule, StageBalance
from meshwright.api.precision import Fp8Scaling, Precision
from meshwright.api.replicas import DataParallelStrategy, GradientCompression
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.training import ActivationCheckpointing, OptimizerName, OptimizerOffload, OuterMethod, TrainingSpec
from meshwright.layout import Layout
from meshwright.models.adapters import layer_adapters
from meshwright.models.architecture import Architecture
from meshwright.models.transformer import Transformer
from meshwright.planner.cost.choices import Choices, Numbers, Offload, Recompute, Schedule, Work
from meshwright.planner.cost.memory import Memory, worst_stage
from meshwright.planner.cost.runtime import RUNTIMES, Runtime
from meshwright.planner.cost.settings import Settings
from meshwright.schedules.division import GENERATED, layers_of_stages, stages_of_rank

_NUMBERS = {
    Precision.FP32: Numbers.FP32,
    Precision.BF16: Numbers.BF16,
    Precision.FP16: Numbers.FP16,
    Precision.FP64: Numbers.FP64,
}
SCHEDULES = {
    **{schedule: Schedule(name) for schedule, name in GENERATED.items()},
    PipelineSchedule.AUTOMATIC: Schedule.AUTOMATIC,
    PipelineSchedule.PIPEDREAM: Schedule.PIPEDREAM,
    PipelineSchedule.PIPEDREAM_2BW: Schedule.PIPEDREAM_2BW,
}
"""The API's names in the cost model's."""
CHECKPOINTING = {
    ActivationCheckpointing.NONE: Recompute.NONE,
    ActivationCheckpointing.SELECTIVE: Recompute.SELECTIVE,
    ActivationCheckpointing.FULL: Recompute.FULL,
    ActivationCheckpointing.EVERY_K: Recompute.FULL,
    ActivationCheckpointing.SQRT: Recompute.SQRT,
}
OFFLOAD = {
    OptimizerOffload.NONE: Offload.NONE,
    OptimizerOffload.CPU: Offload.CPU,
    OptimizerOffload.FILE: Offload.NVME,
}
_FEEDBACK = (GradientCompression.INT8, GradientCompression.TOP_K, GradientCompression.POWER_SGD)
"""Compressions that keep what they left out."""
_OUTER = {OuterMethod.DILOCO: 2.0, OuterMethod.ASYNC_SGD: 1.0}
"""Numbers a parameter: where a round began, and momentum; or what is sent to the server and read from it."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a spec asks of memory and time, whatever degrees it gets."""

    architecture: Architecture
    work: Work
    training: TrainingSpec
    parallelism: ParallelismSpec
    numbers: Numbers
    settings: Settings
    runtime: Runtime

    @classmethod
    def of(cls, spec: ParallelTrainingJobSpec, architecture: Architecture) -> Job:
        """The job of a spec that trains a model with this repository's worker.

        Raises:
            ValueError: the spec has no `training`.
        """
        if spec.training is None:
            raise ValueError("`training` is required")
        return cls.made(architecture, spec.training, spec.parallelism, spec.replicas)

    @classmethod
    def made(
        cls, architecture: Architecture, training: TrainingSpec, parallelism: ParallelismSpec, replicas: int
    ) -> Job:
        """The job of the parts of a spec that matter here."""
        return cls(
            architecture,
            Work(Transformer.of(architecture), training.sequence_length, training.global_batch_size),
            training,
            parallelism,
            _numbers(training),
            _settings(training, parallelism, architecture, replicas),
            _runtime(training),
        )

    def decided(self, schedule: PipelineSchedule, checkpointing: ActivationCheckpointing) -> Job:
        """The job with what a plan decided, as if its spec had said it."""
        return replace(
            self,
            parallelism=self.parallelism.model_copy(update={"schedule": schedule}),
            training=self.training.model_copy(update={"activation_checkpointing": checkpointing}),
        )

    def choices(self, layout: Layout, micro_batches: int) -> Choices:
        """The job in a layout.

        Raises:
            ValueError: there are more stages than layers.
        """
        asked, training = self.parallelism, self.training
        pipelined = layout.pipeline > 1
        return Choices(
            tensor=layout.tensor,
            sequence_parallel=asked.sequence and layout.tensor > 1,
            tensor_overlap=asked.tensor_overlap,
            expert_tensor=asked.expert_tensor,
            context=layout.context,
            context_method=asked.context_method,
            ulysses=asked.ulysses or 1,
            pipeline=layout.pipeline,
            schedule=SCHEDULES[asked.order] if pipelined else Schedule.ONE_F_ONE_B,
            virtual_stages=stages_of_rank(asked, layout.pipeline),
            layer_split=layer_split(asked, layout.pipeline, self.architecture, training.sequence_length),
            expert=layout.expert,
            data=layout.data,
            zero_stage=asked.zero_stage if layout.replicas > 1 else 0,
            micro_batch_size=max(1, self.work.global_batch // (layout.data * micro_batches)),
            micro_batches=micro_batches,
            recompute=CHECKPOINTING[training.checkpointing],
            recompute_every=(
                training.checkpoint_every if training.checkpointing is ActivationCheckpointing.EVERY_K else 1
            ),
            offload_optimizer=OFFLOAD[training.optimizer.offload],
            offload_activations=Offload.CPU if training.activation_offload else Offload.NONE,
            numbers=self.numbers,
            settings=self.settings,
        )

    def memory(self, layout: Layout, micro_batches: int) -> Memory:
        """Bytes of the fullest stage's ranks, with everything the spec says.

        Raises:
            ValueError: there are more stages than layers.
        """
        return worst_stage(self.work, self.choices(layout, micro_batches), self.runtime)


def layer_split(parallelism: ParallelismSpec, ranks: int, model: Architecture, length: int) -> tuple[int, ...] | None:
    """Layers of each stage, in the model's order; None for as even as can be.

    Raises:
        ValueError: there are more stages than layers, or `layerSplit` does not add up.
    """
    even = parallelism.layer_split is None and parallelism.stage_balance is StageBalance.LAYERS
    if ranks == 1 or (even and ranks * stages_of_rank(parallelism, ranks) <= model.layers):
        return None
    return tuple(len(layers) for layers in layers_of_stages(parallelism, ranks, model, length))


def _numbers(training: TrainingSpec) -> Numbers:
    # Between fp32 activations fp8 saves hardly any memory, and too much is the safer side.
    if training.fp8 is not None and training.precision is Precision.BF16:
        return Numbers.FP8
    return _NUMBERS[training.precision]


@lru_cache(maxsize=8)
def _variant(*, scores: bool, keeps_fp8: bool) -> Runtime:
    return replace(RUNTIMES["meshwright"], flash=not scores, keeps_fp8=keeps_fp8)


def _runtime(training: TrainingSpec) -> Runtime:
    """The worker as the job uses it."""
    rowwise = training.fp8 is not None and training.fp8.scaling is Fp8Scaling.ROWWISE
    return _variant(scores=training.attention_dropout > 0, keeps_fp8=not rowwise)


def _settings(
    training: TrainingSpec, parallelism: ParallelismSpec, architecture: Architecture, replicas: int
) -> Settings:
    data, outer = parallelism.data_parallel, training.outer
    return Settings(
        master_weights=training.master_weights,
        muon=training.optimizer.name is OptimizerName.MUON,
        flat=data.strategy is DataParallelStrategy.ZERO,
        shard_size=data.shard_size,
        reshard_size=data.reshard_size,
        bucket=data.bucket_elements,
        # A step whose gradients overflow leaves what was there before it.
        feedback=(1 + (training.precision is Precision.FP16)) * (data.compression in _FEEDBACK),
        islands=1 if outer is None else outer.islands or replicas,
        outer=0.0 if outer is None else _OUTER.get(outer.method, 0.0),
        loss_chunk=training.loss_chunk_tokens,
        rematerialize=parallelism.rematerialize,
        activation_limit=parallelism.activation_limit,
        parameter_offload=training.parameter_offload,
        adapters=_adapters(training.lora, architecture),
    )


def _adapters(lora: LoraSpec | None, model: Architecture) -> tuple[int, int] | None:
    if lora is None:
        return None
    return layer_adapters(lora, model, mixture=False), layer_adapters(lora, model, mixture=True)
