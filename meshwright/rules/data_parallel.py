"""Rules on how replicas are kept equal."""

from __future__ import annotations

from meshwright.api.data_parallel import DataParallelStrategy, GradientCompression
from meshwright.rules.facts import Facts
from meshwright.rules.rule import Rule, divides

_DATA = "self.parallelism.dataParallel"
_STAGE = "self.parallelism.zeroStage"


def _stage_of_strategy(facts: Facts) -> bool:
    strategy = facts.parallelism.data_parallel.strategy
    return strategy is None or facts.parallelism.zero_stage in strategy.zero_stages


def _stage_of_strategy_cel() -> str:
    stages: dict[tuple[int, ...], list[str]] = {}
    for strategy in DataParallelStrategy:
        stages.setdefault(strategy.zero_stages, []).append(f"'{strategy}'")
    cases = " || ".join(
        f"({_DATA}.strategy in [{', '.join(names)}] && {_STAGE} in {list(allowed)})"
        for allowed, names in stages.items()
    )
    return f"!has({_DATA}.strategy) || {cases}"


def _hybrid(facts: Facts) -> bool:
    data = facts.parallelism.data_parallel
    hybrid = data.strategy in (DataParallelStrategy.HYBRID_SHARD, DataParallelStrategy.HYBRID_SHARD_ZERO2)
    return not hybrid or data.shard_size is not None


def _sharded(facts: Facts) -> bool:
    return facts.parallelism.data_parallel.shard_size is None or facts.parallelism.zero_stage > 0


def _resharded(facts: Facts) -> bool:
    size = facts.parallelism.data_parallel.reshard_size
    return size is None or (facts.parallelism.zero_stage == 3 and divides(size, facts.replicas))


def _compressed(facts: Facts) -> bool:
    compression = facts.parallelism.data_parallel.compression
    return compression is GradientCompression.NONE or facts.parallelism.zero_stage == 0


def _command_owns_replicas(facts: Facts) -> bool:
    data = facts.parallelism.data_parallel
    set_here = data.strategy or data.shard_size or data.reshard_size
    return facts.runtime.command is None or (not set_here and data.compression is GradientCompression.NONE)


def _islands_split(facts: Facts) -> bool:
    outer = facts.training.outer if facts.training is not None else None
    return outer is None or outer.islands is None or divides(outer.islands, facts.replicas)


def _rounds_fit_checkpoints(facts: Facts) -> bool:
    outer = facts.training.outer if facts.training is not None else None
    return outer is None or facts.checkpoint is None or facts.checkpoint.interval % outer.every_steps == 0


REPLICA_RULES: tuple[Rule[Facts], ...] = (
    Rule(
        "parallelism.dataParallel.strategy",
        "does not go with `parallelism.zeroStage`: DDP and NO_SHARD need 0, ZeRO 1 or 2, FSDP 2 or 3, SHARD_GRAD_OP "
        "and HYBRID_SHARD_ZERO2 2, FULL_SHARD and HYBRID_SHARD 3",
        _stage_of_strategy_cel(),
        _stage_of_strategy,
    ),
    Rule(
        "parallelism.dataParallel.shardSize",
        "must be set for `strategy: HYBRID_SHARD` and `HYBRID_SHARD_ZERO2`: how many replicas share one set of shards",
        f"!has({_DATA}.strategy) || !{_DATA}.strategy.startsWith('HYBRID') || has({_DATA}.shardSize)",
        _hybrid,
    ),
    Rule(
        "parallelism.dataParallel.shardSize",
        "needs `parallelism.zeroStage` 1, 2 or 3: without shards there is nothing to share",
        f"!has({_DATA}.shardSize) || {_STAGE} > 0",
        _sharded,
    ),
    Rule(
        "parallelism.dataParallel.shardSize",
        "must divide `replicas`",
        f"!has({_DATA}.shardSize) || self.replicas % {_DATA}.shardSize == 0",
        lambda facts: divides(facts.parallelism.data_parallel.shard_size, facts.replicas),
    ),
    Rule(
        "parallelism.dataParallel.reshardSize",
        "needs `parallelism.zeroStage: 3` and must divide `replicas`",
        f"!has({_DATA}.reshardSize) || ({_STAGE} == 3 && self.replicas % {_DATA}.reshardSize == 0)",
        _resharded,
    ),
    Rule(
        "parallelism.dataParallel.compression",
        "needs `parallelism.zeroStage: 0`: only whole gradients are compressed",
        f"{_DATA}.compression == 'None' || {_STAGE} == 0",
        _compressed,
    ),
    Rule(
        "parallelism.dataParallel",
        "may not be set with `runtime.command`, which keeps replicas equal itself: remove it",
        f"!has(self.runtime.command) || (!has({_DATA}.strategy) && !has({_DATA}.shardSize)"
        f" && !has({_DATA}.reshardSize) && {_DATA}.compression == 'None')",
        _command_owns_replicas,
    ),
    Rule(
        "training.outer.islands",
        "must divide `replicas`: every island has the same number of them",
        "!has(self.training) || !has(self.training.outer) || !has(self.training.outer.islands)"
        " || self.replicas % self.training.outer.islands == 0",
        _islands_split,
    ),
    Rule(
        "training.outer.everySteps",
        "must divide `checkpoint.everySteps`, 100 when that is left out: islands are equal after a round alone",
        "!has(self.training) || !has(self.training.outer) || !has(self.checkpoint)"
        " || (has(self.checkpoint.everySteps) ? self.checkpoint.everySteps : 100)"
        " % self.training.outer.everySteps == 0",
        _rounds_fit_checkpoints,
    ),
)
