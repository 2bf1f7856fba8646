"""Converts a job's spec to the cost model's terms. Memory, time and search all use this conversion."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.api.data_parallel import DataParallelStrategy, GradientCompression
from meshwright.api.lora import LoraSpec
from meshwright.api.parallelism import ContextMethod, ExpertDispatch, ParallelismSpec, PipelineSchedule, StageBalance
from meshwright.api.precision import Fp8Scaling, Fp8Update, Precision
from meshwright.api.spec import Framework, ParallelTrainingJobSpec
from meshwright.api.training import ActivationCheckpointing, OptimizerName, OuterMethod, TrainingSpec
from meshwright.layout import Layout
from meshwright.models.architecture import Architecture
from meshwright.models.lora import adapter_parameters_per_layer
from meshwright.planner.cost.frameworks import FRAMEWORKS
from meshwright.planner.cost.frameworks import Framework as FrameworkAccount
from meshwright.planner.cost.memory import Memory, worst_stage
from meshwright.planner.cost.strategy import MemoryOptions, Strategy, Workload
from meshwright.schedules.pipeline_layout import layers_of_stages, stages_per_rank

_ERROR_FEEDBACK = (GradientCompression.INT8, GradientCompression.TOP_K, GradientCompression.POWER_SGD)
"""Compressions with error feedback: they store what they did not send."""
_OUTER_STATE = {OuterMethod.DILOCO: 2.0, OuterMethod.ASYNC_SGD: 1.0}
"""Values per parameter: parameters at the start of a round, and momentum; or those sent to and read from the server."""


ACCOUNTS = {
    Framework.MEGATRON_LM: "megatron-core",
    Framework.TORCH_TITAN: "torchtitan",
    Framework.DEEP_SPEED: "megatron-deepspeed",
}
"""The properties in the cost model of each value of `runtime.framework`."""


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """The part of a spec that determines memory and time, independent of the degrees."""

    architecture: Architecture
    work: Workload
    training: TrainingSpec
    parallelism: ParallelismSpec
    fixed: Strategy
    """The fields that the spec determines, except degrees, micro-batches, the pipeline and activation checkpointing."""
    runtime: FrameworkAccount

    @classmethod
    def of(cls, spec: ParallelTrainingJobSpec, architecture: Architecture) -> TrainingJob:
        """Return the job of a spec that trains a model with Meshwright's runtime.

        Raises:
            ValueError: the spec has no `training`.
        """
        if spec.training is None:
            raise ValueError("`training` is required")
        job = cls.from_parts(architecture, spec.training, spec.parallelism, spec.replicas)
        framework = spec.runtime.framework
        return replace(job, runtime=FRAMEWORKS[ACCOUNTS[framework]]) if framework in ACCOUNTS else job

    @classmethod
    def from_parts(
        cls, architecture: Architecture, training: TrainingSpec, parallelism: ParallelismSpec, replicas: int
    ) -> TrainingJob:
        """Return the job from the relevant parts of a spec."""
        fixed = Strategy(
            tensor_overlap=parallelism.tensor_overlap,
            expert_tensor=parallelism.expert_tensor,
            context_method=parallelism.context_method_or_default,
            ulysses=parallelism.ulysses or 1,
            checkpoint_every=training.checkpoint_every,
            optimizer_offload=training.optimizer.offload,
            activation_offload=training.activation_offload,
            precision=training.precision,
            # With fp32 activations fp8 saves hardly any memory, and an estimate that is too high is safer.
            fp8=training.fp8 is not None and training.precision is Precision.BF16,
            settings=_settings(training, parallelism, architecture, replicas),
        )
        work = Workload(architecture, training.sequence_length, training.global_batch_size)
        return cls(architecture, work, training, parallelism, fixed, _framework(training, parallelism))

    def strategy(
        self,
        layout: Layout,
        micro_batches: int,
        schedule: PipelineSchedule | None = None,
        checkpointing: ActivationCheckpointing | None = None,
        *,
        virtual_stages: int | None = None,
        context_method: ContextMethod | None = None,
        zero_stage: int | None = None,
    ) -> Strategy:
        """Return the strategy for a layout. What is None is as in the spec, or as rules assume if that leaves it out.

        Raises:
            ValueError: there are more stages than layers.
        """
        parallelism, has_pipeline = self.parallelism, layout.pipeline > 1
        if schedule is not None and schedule is not parallelism.order:
            parallelism = parallelism.model_copy(update={"schedule": schedule})
        if virtual_stages is not None and virtual_stages != parallelism.virtual_stages:
            parallelism = parallelism.model_copy(update={"virtual_stages": virtual_stages})
        stage = parallelism.zero_stage_or_default if zero_stage is None else zero_stage
        return replace(
            self.fixed,
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            data=layout.data,
            context=layout.context,
            expert=layout.expert,
            sequence_parallel=parallelism.sequence and layout.tensor > 1,
            schedule=parallelism.order if has_pipeline else PipelineSchedule.ONE_F_ONE_B,
            virtual_stages=stages_per_rank(parallelism, layout.pipeline),
            layer_split=layer_split(parallelism, layout.pipeline, self.architecture, self.work.sequence_length),
            # Without context parallelism, no method is used: strategies that differ in nothing else are equal.
            context_method=(
                context_method or self.fixed.context_method if layout.context > 1 else ContextMethod.RING_ZIG_ZAG
            ),
            zero_stage=stage if layout.shard_ranks > 1 else 0,
            micro_batch_size=max(1, self.work.global_batch // (layout.data * micro_batches)),
            micro_batches=micro_batches,
            checkpointing=self.training.checkpointing if checkpointing is None else checkpointing,
        )

    def memory(self, strategy: Strategy) -> Memory:
        """Bytes on each rank of the fullest stage.

        Raises:
            ValueError: there are more stages than layers.
        """
        return worst_stage(self.work, strategy, self.runtime)


def layer_split(parallelism: ParallelismSpec, ranks: int, model: Architecture, length: int) -> tuple[int, ...] | None:
    """Number of layers of each stage, in the model's order. None for an even split.

    Raises:
        ValueError: there are more stages than layers, or `layerSplit` does not add up.
    """
    even = parallelism.layer_split is None and parallelism.stage_balance is StageBalance.LAYERS
    if ranks == 1 or (even and ranks * stages_per_rank(parallelism, ranks) <= model.layers):
        return None
    return tuple(len(layers) for layers in layers_of_stages(parallelism, ranks, model, length))


@lru_cache(maxsize=16)
def _framework_variant(
    *, scores: bool, keeps_fp8: bool, once_per_node: bool, compiled: bool, fp8_in_graph: bool, nvlink_sums: bool
) -> FrameworkAccount:
    return replace(
        FRAMEWORKS["meshwright"],
        flash=not scores,
        keeps_fp8=keeps_fp8,
        sends_once_per_node=once_per_node,
        compiled=compiled,
        fp8_in_graph=fp8_in_graph,
        sums_in_nvlink_switches=nvlink_sums,
    )


def _framework(training: TrainingSpec, parallelism: ParallelismSpec) -> FrameworkAccount:
    """The properties of Meshwright's runtime with the job's options."""
    fp8 = training.fp8
    rowwise = fp8 is not None and fp8.scaling is Fp8Scaling.ROWWISE
    delayed = fp8 is not None and fp8.update is Fp8Update.DELAYED
    once = parallelism.expert_dispatch is ExpertDispatch.ONCE_PER_NODE
    return _framework_variant(
        scores=training.attention_dropout > 0,
        keeps_fp8=not rowwise,
        once_per_node=once,
        compiled=training.compile,
        # Compiled code cannot store the maxima of delayed scaling.
        fp8_in_graph=training.compile and fp8 is not None and not delayed,
        nvlink_sums=not training.deterministic,
    )


def _settings(
    training: TrainingSpec, parallelism: ParallelismSpec, architecture: Architecture, replicas: int
) -> MemoryOptions:
    data, outer = parallelism.data_parallel, training.outer
    return MemoryOptions(
        master_weights=training.master_weights,
        master_gradient=None if training.sharded_masters is None else training.sharded_masters.gradients.bytes,
        muon=training.optimizer.name is OptimizerName.MUON,
        flat=data.strategy is DataParallelStrategy.ZERO,
        shard_size=data.shard_size,
        reshard_size=data.reshard_size,
        gathers_fp8=training.fp8 is not None and bool(training.fp8.all_gather) and training.precision is Precision.BF16,
        reduces_each=bool(data.reduce_every_micro_batch),
        bucket=data.bucket_elements,
        # If a step is skipped, the previous error feedback is restored: a second copy.
        feedback=(1 + training.may_skip_updates) * (data.compression in _ERROR_FEEDBACK),
        islands=1 if outer is None else outer.islands or replicas,
        outer=0.0 if outer is None else _OUTER_STATE.get(outer.method, 0.0),
        loss_chunk=training.loss_chunk_tokens,
        rematerialize=parallelism.rematerialize,
        activation_limit=parallelism.activation_limit,
        parameter_offload=training.parameter_offload,
        adapters=_adapters(training.lora, architecture),
    )


def _adapters(lora: LoraSpec | None, model: Architecture) -> tuple[int, int] | None:
    if lora is None:
        return None
    return adapter_parameters_per_layer(lora, model, mixture=False), adapter_parameters_per_layer(
        lora, model, mixture=True
    )
