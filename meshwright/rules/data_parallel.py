"""Rules on data parallelism: how replicas stay equal, and islands of replicas."""

from __future__ import annotations

from meshwright.api.checkpoint import DEFAULT_CHECKPOINT_INTERVAL
from meshwright.api.data_parallel import DataParallelEngine, DataParallelStrategy, GradientCompression
from meshwright.api.precision import Precision
from meshwright.api.training import OptimizerName, OptimizerOffload, OuterMethod, OuterSpec
from meshwright.rules.facts import Facts, islands, shard_ranks
from meshwright.rules.parallelism import HAS_PIPELINE
from meshwright.rules.rule import Rule, divides, schedule_is_not, schedule_names
from meshwright.schedules.registry import kind_of
from meshwright.schedules.schedule import PipelineScheduleKind

_DATA = "self.parallelism.dataParallel"
_STAGE = "self.parallelism.zeroStage"
_ALL_STAGES = (0, 1, 2, 3)
_REPLICAS_OPEN = "has(self.gpus)"
_NO_OUTER_OR = "!has(self.training) || !has(self.training.outer) || "
_ISLANDS = (
    "(!has(self.training) || !has(self.training.outer) ? 1"
    " : has(self.training.outer.islands) ? self.training.outer.islands : self.replicas)"
)
_IS_ZERO = f"(has({_DATA}.strategy) && {_DATA}.strategy == 'ZeRO')"
_FLAT_SHARDS = f"(({_STAGE} == 1 || {_IS_ZERO}) && self.replicas * self.parallelism.context > 1)"
_NOT_EACH = f"!has({_DATA}.reduceEveryMicroBatch) || !{_DATA}.reduceEveryMicroBatch"


def possible_zero_stages(facts: Facts) -> tuple[int, ...]:
    """The ZeRO stage, or those that `dataParallel.strategy` leaves to choose from if it is left out."""
    stage, strategy = facts.parallelism.zero_stage, facts.parallelism.data_parallel.strategy
    if stage is not None:
        return (stage,)
    return _ALL_STAGES if strategy is None else strategy.zero_stages


def zero_stage_may_be(*stages: int) -> str:
    """In CEL, that the ZeRO stage is one of these, or may be chosen to be one."""
    names = [f"'{strategy}'" for strategy in DataParallelStrategy if not {*strategy.zero_stages} & {*stages}]
    chosen = f"!has({_DATA}.strategy) || !({_DATA}.strategy in [{', '.join(names)}])"
    return f"(has({_STAGE}) ? {_STAGE} in {list(stages)} : ({chosen}))"


def _may_be(facts: Facts, *stages: int) -> bool:
    return any(stage in stages for stage in possible_zero_stages(facts))


def _bidirectional(kind: PipelineScheduleKind) -> bool:
    return kind.bidirectional


def _stage_of_strategy(facts: Facts) -> bool:
    strategy = facts.parallelism.data_parallel.strategy
    return strategy is None or any(stage in strategy.zero_stages for stage in possible_zero_stages(facts))


def _stage_of_strategy_cel() -> str:
    stages: dict[tuple[int, ...], list[str]] = {}
    for strategy in DataParallelStrategy:
        stages.setdefault(strategy.zero_stages, []).append(f"'{strategy}'")
    cases = " || ".join(
        f"({_DATA}.strategy in [{', '.join(names)}] && {_STAGE} in {list(allowed)})"
        for allowed, names in stages.items()
    )
    return f"!has({_DATA}.strategy) || !has({_STAGE}) || {cases}"


def _hybrid(facts: Facts) -> bool:
    data = facts.parallelism.data_parallel
    hybrid = data.strategy in (DataParallelStrategy.HYBRID_SHARD, DataParallelStrategy.HYBRID_SHARD_ZERO2)
    return not hybrid or data.shard_size is not None


def _sharded(facts: Facts) -> bool:
    return facts.parallelism.data_parallel.shard_size is None or _may_be(facts, 1, 2, 3)


def _shard_size_divides(facts: Facts) -> bool:
    shard_size = facts.parallelism.data_parallel.shard_size
    return facts.gpus is not None or divides(shard_size, facts.replicas // islands(facts))


def _reshards_parameters(facts: Facts) -> bool:
    return facts.parallelism.data_parallel.reshard_size is None or _may_be(facts, 3)


def _reshard_size_divides(facts: Facts) -> bool:
    data = facts.parallelism.data_parallel
    if facts.gpus is not None and data.shard_size is None:
        return True
    return divides(data.reshard_size, data.shard_size or facts.replicas)


def _reshards_alone(facts: Facts) -> bool:
    # torch creates a group for every layer, only within its own replica group. Names of two groups would collide.
    p = facts.parallelism
    alone = all((degree or 1) == 1 for degree in (p.tensor, p.pipeline, p.context)) and _outer(facts) is None
    return p.data_parallel.reshard_size is None or alone


def _compressed(facts: Facts) -> bool:
    compression = facts.parallelism.data_parallel.compression
    return compression is GradientCompression.NONE or _may_be(facts, 0)


def _reduces_shards(facts: Facts) -> bool:
    data = facts.parallelism.data_parallel
    fsdp = data.strategy is not DataParallelStrategy.ZERO and _may_be(facts, 2, 3)
    return not data.reduce_every_micro_batch or fsdp


def _gathers_fp8_by_fsdp(facts: Facts) -> bool:
    training, data = facts.training, facts.parallelism.data_parallel
    if training is None or training.fp8 is None or not training.fp8.all_gather:
        return True
    fsdp = data.strategy is not DataParallelStrategy.ZERO and _may_be(facts, 2, 3)
    return fsdp and data.reshard_size is None and not training.parameter_offload


def _mixes_backward(kind: PipelineScheduleKind) -> bool:
    return kind.mixes_backward


def _reduces_as_hooks_run(facts: Facts) -> bool:
    p = facts.parallelism
    mixes = (p.pipeline or 1) > 1 and _mixes_backward(kind_of(p.order))
    return not p.data_parallel.reduce_every_micro_batch or not mixes


def _reduces_masters(facts: Facts) -> bool:
    rounds = facts.training is not None and not facts.training.master_weights
    return not facts.parallelism.data_parallel.reduce_every_micro_batch or not rounds


def _command_owns_replicas(facts: Facts) -> bool:
    data = facts.parallelism.data_parallel
    set_here = data.strategy or data.shard_size or data.reshard_size or data.reduce_every_micro_batch
    return facts.runtime.command is None or (not set_here and data.compression is GradientCompression.NONE)


def _has_flat_shards(facts: Facts) -> bool:
    return facts.parallelism.data_parallel_engine is DataParallelEngine.FLAT and shard_ranks(facts) > 1


def _flat_shards_of_whole_experts(facts: Facts) -> bool:
    p, mixed = facts.parallelism, facts.model is not None and facts.model.mixture is not None
    split = mixed and ((p.expert or 1) > 1 or (p.tensor or 1) > 1)
    return not split or not _has_flat_shards(facts)


def _flat_shards_of_one_table(facts: Facts) -> bool:
    tied = facts.model is not None and bool(facts.model.tie_embeddings) and (facts.parallelism.pipeline or 1) > 1
    return not tied or not _has_flat_shards(facts)


def _flat_shards_in_one_direction(facts: Facts) -> bool:
    p = facts.parallelism
    both_ways = (p.pipeline or 1) > 1 and kind_of(p.order).bidirectional
    return not both_ways or not _has_flat_shards(facts)


def _flat_shards_of_adamw(facts: Facts) -> bool:
    muon = facts.training is not None and facts.training.optimizer.name is OptimizerName.MUON
    return not muon or not _has_flat_shards(facts)


def _flat_shards_of_masters(facts: Facts) -> bool:
    return facts.training is None or facts.training.master_weights or not _has_flat_shards(facts)


def _parameters_are_sharded(facts: Facts) -> bool:
    if facts.training is None or not facts.training.parameter_offload:
        return True
    # Islands do not share shards, so each island needs at least two ranks.
    open_ranks = facts.gpus is not None or facts.parallelism.context is None
    company = open_ranks or shard_ranks(facts) > islands(facts)
    zero = facts.parallelism.data_parallel.strategy is DataParallelStrategy.ZERO
    return company and not zero and _may_be(facts, 2, 3)


def _outer(facts: Facts) -> OuterSpec | None:
    return facts.training.outer if facts.training is not None else None


def _islands_split(facts: Facts) -> bool:
    return _outer(facts) is None or (islands(facts) > 1 and facts.replicas % islands(facts) == 0)


def _rounds_fit_checkpoints(facts: Facts) -> bool:
    outer = _outer(facts)
    checkpoint = facts.checkpoint
    timed = checkpoint is None or checkpoint.every is not None
    return outer is None or timed or (checkpoint is not None and checkpoint.interval % outer.every_steps == 0)


def _islands_round_alike(facts: Facts) -> bool:
    training = facts.training
    if training is None or training.outer is None:
        return True
    return training.precision is not Precision.FP16 and training.fp8 is None and training.master_weights


def _islands_use_adamw(facts: Facts) -> bool:
    training = facts.training
    if training is None or training.outer is None:
        return True
    optimizer = training.optimizer
    return optimizer.name is OptimizerName.ADAMW and optimizer.offload is OptimizerOffload.NONE


def _islands_have_files(facts: Facts) -> bool:
    outer, data = _outer(facts), facts.data
    if outer is None or outer.method is not OuterMethod.FED_AVG or data is None:
        return True
    return data.claim_name is not None and not data.mixture


_FLAT = "with flat shards (stage 1, or `dataParallel.strategy: ZeRO`) is not supported with"
_FSDP_INSTEAD = "use `dataParallel.strategy: FSDP` with stage 2 or 3"

REPLICA_RULES: tuple[Rule[Facts], ...] = (
    Rule(
        "parallelism.dataParallel.strategy",
        "must match `parallelism.zeroStage`: DDP and NO_SHARD need 0, ZeRO 1 or 2, FSDP 2 or 3, SHARD_GRAD_OP and "
        "HYBRID_SHARD_ZERO2 2, FULL_SHARD and HYBRID_SHARD 3",
        _stage_of_strategy_cel(),
        _stage_of_strategy,
    ),
    Rule(
        "parallelism.dataParallel.shardSize",
        "is required with `strategy: HYBRID_SHARD` and `HYBRID_SHARD_ZERO2`: set it to the number of replicas that "
        "share one set of shards",
        f"!has({_DATA}.strategy) || !{_DATA}.strategy.startsWith('HYBRID') || has({_DATA}.shardSize)",
        _hybrid,
    ),
    Rule(
        "parallelism.dataParallel.shardSize",
        "needs `zeroStage` 1, 2 or 3, because stage 0 has no shards: raise the stage, or remove this field",
        f"!has({_DATA}.shardSize) || {zero_stage_may_be(1, 2, 3)}",
        _sharded,
    ),
    Rule(
        "parallelism.dataParallel.shardSize",
        "must divide `replicas`, or the number of replicas of an island with `training.outer`",
        f"!has({_DATA}.shardSize) || {_REPLICAS_OPEN} || (self.replicas / {_ISLANDS}) % {_DATA}.shardSize == 0",
        _shard_size_divides,
    ),
    Rule(
        "parallelism.dataParallel.reshardSize",
        "needs `parallelism.zeroStage: 3`, the only stage that reshards: set the stage to 3, or remove this field",
        f"!has({_DATA}.reshardSize) || {zero_stage_may_be(3)}",
        _reshards_parameters,
    ),
    Rule(
        "parallelism.dataParallel.reshardSize",
        "must divide `replicas`, or `parallelism.dataParallel.shardSize` if that is set",
        f"!has({_DATA}.reshardSize) || ({_REPLICAS_OPEN} && !has({_DATA}.shardSize))"
        f" || (has({_DATA}.shardSize) ? {_DATA}.shardSize : self.replicas) % {_DATA}.reshardSize == 0",
        _reshard_size_divides,
    ),
    Rule(
        "parallelism.dataParallel.reshardSize",
        "needs `parallelism.tensor: 1`, `parallelism.pipeline: 1`, `parallelism.context: 1` and no "
        "`training.outer`, because torch names its process groups only by layer: remove this field, or set the "
        "degrees to 1",
        f"!has({_DATA}.reshardSize) || ((!has(self.parallelism.tensor) || self.parallelism.tensor == 1)"
        " && (!has(self.parallelism.pipeline) || self.parallelism.pipeline == 1) && self.parallelism.context == 1"
        " && (!has(self.training) || !has(self.training.outer)))",
        _reshards_alone,
    ),
    Rule(
        "parallelism.dataParallel.compression",
        "needs `parallelism.zeroStage: 0`, because only full gradients can be compressed: set the stage to 0, or "
        "remove this field",
        f"{_DATA}.compression == 'None' || {zero_stage_may_be(0)}",
        _compressed,
    ),
    Rule(
        "parallelism.dataParallel.reduceEveryMicroBatch",
        "needs FSDP, because other strategies have their own way: set `parallelism.zeroStage: 3`, or `2` without "
        "`dataParallel.strategy: ZeRO`, or remove this field",
        f"{_NOT_EACH} || ({zero_stage_may_be(2, 3)} && !{_IS_ZERO})",
        _reduces_shards,
    ),
    Rule(
        "parallelism.dataParallel.reduceEveryMicroBatch",
        lambda: (
            f"is not supported with the schedule {schedule_names(_mixes_backward, 'or')}, whose whole backward passes "
            "run between the halves of others: use another schedule, or remove this field"
        ),
        None,
        _reduces_as_hooks_run,
    ),
    Rule(
        "parallelism.dataParallel.reduceEveryMicroBatch",
        "needs `training.masterWeights: true`, because sums of micro-batches would be rounded: set it, or remove this "
        "field",
        None,
        _reduces_masters,
    ),
    Rule(
        "training.fp8.allGather",
        "needs FSDP without `dataParallel.reshardSize` and `parameterOffload`: set `parallelism.zeroStage: 3` "
        "and remove those, or remove this field",
        "!has(self.training) || !has(self.training.fp8) || !has(self.training.fp8.allGather)"
        f" || !self.training.fp8.allGather || ({zero_stage_may_be(2, 3)} && !{_IS_ZERO}"
        f" && !has({_DATA}.reshardSize) && !self.training.parameterOffload)",
        _gathers_fp8_by_fsdp,
    ),
    Rule(
        "parallelism.dataParallel",
        "is not supported with `runtime.command`, which keeps replicas equal itself: remove `strategy`, "
        "`shardSize`, `reshardSize`, `reduceEveryMicroBatch` and `compression`",
        f"!has(self.runtime.command) || (!has({_DATA}.strategy) && !has({_DATA}.shardSize)"
        f" && !has({_DATA}.reshardSize) && {_DATA}.compression == 'None' && ({_NOT_EACH}))",
        _command_owns_replicas,
    ),
    Rule(
        "parallelism.zeroStage",
        f"{_FLAT} a `model.mixture` whose experts are split over ranks: {_FSDP_INSTEAD}",
        f"!{_FLAT_SHARDS} || !has(self.model) || !has(self.model.mixture)"
        " || ((!has(self.parallelism.expert) || self.parallelism.expert == 1)"
        " && (!has(self.parallelism.tensor) || self.parallelism.tensor == 1))",
        _flat_shards_of_whole_experts,
    ),
    Rule(
        "parallelism.zeroStage",
        f"{_FLAT} `model.tieEmbeddings` in a pipeline: {_FSDP_INSTEAD}",
        f"!{_FLAT_SHARDS} || !has(self.model) || !has(self.model.tieEmbeddings) || !self.model.tieEmbeddings"
        f" || !({HAS_PIPELINE})",
        _flat_shards_of_one_table,
    ),
    Rule(
        "parallelism.zeroStage",
        lambda: f"{_FLAT} the schedule {schedule_names(_bidirectional, 'or')}: {_FSDP_INSTEAD}",
        lambda: f"!{_FLAT_SHARDS} || !({HAS_PIPELINE}) || {schedule_is_not(_bidirectional)}",
        _flat_shards_in_one_direction,
    ),
    Rule(
        "parallelism.zeroStage",
        f"{_FLAT} `training.optimizer.name: Muon`, because Muon needs full matrices: {_FSDP_INSTEAD}",
        f"!{_FLAT_SHARDS} || !has(self.training) || self.training.optimizer.name != 'Muon'",
        _flat_shards_of_adamw,
    ),
    Rule(
        "parallelism.zeroStage",
        f"{_FLAT} `training.masterWeights: false`, because flat shards change how elements are rounded: "
        f"{_FSDP_INSTEAD}",
        f"!{_FLAT_SHARDS} || !has(self.training) || self.training.masterWeights",
        _flat_shards_of_masters,
    ),
    Rule(
        "training.parameterOffload",
        "needs FSDP over at least two ranks, which gathers one layer at a time: set `zeroStage: 3`, or `2` without "
        "`dataParallel.strategy: ZeRO`, and raise `replicas` or `parallelism.context` so that at least two ranks "
        "(of each island with `training.outer`) share the parameters",
        f"!has(self.training) || !self.training.parameterOffload || ({zero_stage_may_be(2, 3)} && !{_IS_ZERO}"
        f" && ({_REPLICAS_OPEN} || !has(self.parallelism.context)"
        f" || self.replicas * self.parallelism.context > {_ISLANDS}))",
        _parameters_are_sharded,
    ),
    Rule(
        "training.outer.islands",
        "must be at least 2 and divide `replicas`, its default, because every island has the same number of replicas",
        f"{_NO_OUTER_OR}({_ISLANDS} > 1 && self.replicas % {_ISLANDS} == 0)",
        _islands_split,
    ),
    Rule(
        "training.outer.everySteps",
        f"must divide `checkpoint.everySteps` (default: {DEFAULT_CHECKPOINT_INTERVAL}), because islands are only "
        "equal after a round",
        f"{_NO_OUTER_OR}!has(self.checkpoint) || has(self.checkpoint.every)"
        f" || (has(self.checkpoint.everySteps) ? self.checkpoint.everySteps : {DEFAULT_CHECKPOINT_INTERVAL})"
        " % self.training.outer.everySteps == 0",
        _rounds_fit_checkpoints,
    ),
    Rule(
        "training.outer",
        "needs `precision: fp32`, `bf16` or `fp64`, `masterWeights: true` and no `fp8`, because loss scales and "
        "rounding would differ between islands",
        f"{_NO_OUTER_OR}(self.training.precision != 'fp16' && !has(self.training.fp8) && self.training.masterWeights)",
        _islands_round_alike,
    ),
    Rule(
        "training.outer",
        "needs `training.optimizer.name: AdamW` and `training.optimizer.offload: None`",
        None,
        _islands_use_adamw,
    ),
    Rule(
        "training.outer.method",
        "needs `data.claimName` and no `data.mixture` for `FedAvg`, because each island reads its files from the "
        "directory `island-0`, `island-1`, ... of the volume",
        None,
        _islands_have_files,
    ),
)
