"""Rules on `training.optimizer.earlyLaunch`: what the update of a step must not depend on if a GPU decides about it."""

from __future__ import annotations

from meshwright.api.precision import Precision
from meshwright.api.training import OptimizerName, OptimizerOffload, TrainingSpec
from meshwright.rules.facts import Facts
from meshwright.rules.rule import Rule, is_asynchronous, schedule_is_not, schedule_names
from meshwright.schedules.registry import kind_of

_FIELD = "training.optimizer.earlyLaunch"
_OFF_OR = "!has(self.training) || !has(self.training.optimizer.earlyLaunch) || !self.training.optimizer.earlyLaunch || "


def _early(facts: Facts) -> TrainingSpec | None:
    return facts.training if facts.training is not None and facts.training.optimizer.early_launch else None


def _updates_on_the_gpu(facts: Facts) -> bool:
    training = _early(facts)
    if training is None:
        return True
    optimizer = training.optimizer
    on_gpu = optimizer.offload is OptimizerOffload.NONE and not training.parameter_offload
    return optimizer.name is OptimizerName.ADAMW and on_gpu and training.master_weights


def _one_kernel(facts: Facts) -> bool:
    training = _early(facts)
    return training is None or training.compile or training.sharded_masters is not None


def _host_is_not_asked(facts: Facts) -> bool:
    training = _early(facts)
    spikes = training is not None and training.anomalies is not None and training.anomalies.spike is not None
    return training is None or (training.precision is not Precision.FP16 and not spikes)


def _one_update_a_step(facts: Facts) -> bool:
    training = _early(facts)
    return training is None or (training.outer is None and not kind_of(facts.parallelism.order).asynchronous)


EARLY_UPDATE_RULES: tuple[Rule[Facts], ...] = (
    Rule(
        _FIELD,
        "needs `training.optimizer.name: AdamW`, `training.masterWeights: true`, `training.optimizer.offload: None` "
        "and `training.parameterOffload: false`: set them, or remove this field",
        f"{_OFF_OR}(self.training.optimizer.name == 'AdamW' && self.training.masterWeights"
        " && self.training.optimizer.offload == 'None' && !self.training.parameterOffload)",
        _updates_on_the_gpu,
    ),
    Rule(
        _FIELD,
        "needs `training.compile: true` or `training.shardedMasters`, whose update includes the scaling of gradients: "
        "set one of them, or remove this field",
        f"{_OFF_OR}self.training.compile || has(self.training.shardedMasters)",
        _one_kernel,
    ),
    Rule(
        _FIELD,
        "is not supported with `training.precision: fp16` or `training.anomalies.spike`, with which the host decides "
        "about an update: change that, or remove this field",
        f"{_OFF_OR}(self.training.precision != 'fp16'"
        " && (!has(self.training.anomalies) || !has(self.training.anomalies.spike)))",
        _host_is_not_asked,
    ),
    Rule(
        _FIELD,
        lambda: (
            f"is not supported with `training.outer` or the schedule {schedule_names(is_asynchronous, 'or')}, which "
            "update parameters in their own way: change that, or remove this field"
        ),
        lambda: f"{_OFF_OR}(!has(self.training.outer) && {schedule_is_not(is_asynchronous)})",
        _one_update_a_step,
    ),
)
