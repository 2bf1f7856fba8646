"""Rules on `training.optimizer.earlyLaunch`: with which settings a GPU can decide about the update of a step."""

from __future__ import annotations

from meshwright.api.precision import Precision
from meshwright.api.training import OptimizerName, OptimizerOffload, TrainingSpec
from meshwright.rules.facts import Facts
from meshwright.rules.rule import Rule, is_asynchronous, schedule_names
from meshwright.schedules.registry import kind_of

_FIELD = "training.optimizer.earlyLaunch"


def _early(facts: Facts) -> TrainingSpec | None:
    return facts.training if facts.training is not None and facts.training.optimizer.early_launch else None


def _gpu_can_decide(facts: Facts) -> bool:
    training = _early(facts)
    if training is None:
        return True
    optimizer, anomalies = training.optimizer, training.anomalies
    on_gpu = optimizer.offload is OptimizerOffload.NONE and not training.parameter_offload and training.master_weights
    scales_gradients = training.compile or training.sharded_masters is not None
    host_decides = training.precision is Precision.FP16 or (anomalies is not None and anomalies.spike is not None)
    return (
        optimizer.name is OptimizerName.ADAMW
        and on_gpu
        and scales_gradients
        and not host_decides
        and training.outer is None
    )


def _one_update_a_step(facts: Facts) -> bool:
    return _early(facts) is None or not kind_of(facts.parallelism.order).asynchronous


EARLY_UPDATE_RULES: tuple[Rule[Facts], ...] = (
    Rule(
        _FIELD,
        "needs `optimizer.name: AdamW`, `masterWeights: true`, and `compile: true` or `shardedMasters`, without "
        "offload of optimizer or parameters, `precision: fp16`, `anomalies.spike` and `outer`: change those, or remove "
        "this field",
        "!has(self.training) || !has(self.training.optimizer.earlyLaunch) || !self.training.optimizer.earlyLaunch || "
        "(self.training.optimizer.name == 'AdamW' && self.training.optimizer.offload == 'None'"
        " && !self.training.parameterOffload && self.training.masterWeights"
        " && (self.training.compile || has(self.training.shardedMasters)) && self.training.precision != 'fp16'"
        " && (!has(self.training.anomalies) || !has(self.training.anomalies.spike)) && !has(self.training.outer))",
        _gpu_can_decide,
    ),
    Rule(
        _FIELD,
        lambda: (
            f"is not supported with the schedule {schedule_names(is_asynchronous, 'or')}, which update parameters in "
            "their own way: change it, or remove this field"
        ),
        None,
        _one_update_a_step,
    ),
)
