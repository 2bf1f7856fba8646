"""Rules on `training.shardedMasters`. Those on flat shards (`meshwright.rules.data_parallel`) apply too."""

from __future__ import annotations

from meshwright.api.data_parallel import DataParallelStrategy
from meshwright.api.precision import Precision
from meshwright.api.training import OptimizerName, OptimizerOffload
from meshwright.rules.facts import Facts
from meshwright.rules.rule import Rule

_FIELD = "training.shardedMasters"
_UNSET_OR = "!has(self.training) || !has(self.training.shardedMasters) || "


def _unset(facts: Facts) -> bool:
    return facts.training is None or facts.training.sharded_masters is None


def _bf16_with_masters(facts: Facts) -> bool:
    training = facts.training
    if training is None or training.sharded_masters is None:
        return True
    return training.precision is Precision.BF16 and training.master_weights


def _flat_shards(facts: Facts) -> bool:
    return _unset(facts) or facts.parallelism.data_parallel.strategy is DataParallelStrategy.ZERO


def _adamw_on_the_gpu(facts: Facts) -> bool:
    training = facts.training
    if training is None or training.sharded_masters is None:
        return True
    optimizer = training.optimizer
    return optimizer.name is OptimizerName.ADAMW and optimizer.offload is OptimizerOffload.NONE


def _no_islands(facts: Facts) -> bool:
    return _unset(facts) or facts.training is None or facts.training.outer is None


MASTER_RULES: tuple[Rule[Facts], ...] = (
    Rule(
        _FIELD,
        "needs `training.precision: bf16` and `training.masterWeights: true`: set them, or remove this field",
        f"{_UNSET_OR}(self.training.precision == 'bf16' && self.training.masterWeights)",
        _bf16_with_masters,
    ),
    Rule(
        _FIELD,
        "needs `parallelism.dataParallel.strategy: ZeRO` (`zeroStage` 1 or 2), because FSDP and DDP store their own "
        "parameters: set it, or remove this field",
        f"{_UNSET_OR}(has(self.parallelism.dataParallel.strategy) && self.parallelism.dataParallel.strategy == 'ZeRO')",
        _flat_shards,
    ),
    Rule(
        _FIELD,
        "needs `training.optimizer.name: AdamW` and `training.optimizer.offload: None`: set them, or remove this field",
        f"{_UNSET_OR}(self.training.optimizer.name == 'AdamW' && self.training.optimizer.offload == 'None')",
        _adamw_on_the_gpu,
    ),
    Rule(
        _FIELD,
        "is not supported with `training.outer`, whose islands exchange fp32 parameters: remove one of the two",
        f"{_UNSET_OR}!has(self.training.outer)",
        _no_islands,
    ),
)
