"""Rules on number formats, optimizer and offload."""

from __future__ import annotations

from meshwright.api.precision import Fp8Scaling, Fp8Update, Precision
from meshwright.api.training import OptimizerName, OptimizerOffload
from meshwright.rules.facts import Facts
from meshwright.rules.rule import Rule


def _masters_unless_bf16(facts: Facts) -> bool:
    training = facts.training
    return training is None or training.master_weights or training.precision is Precision.BF16


def _masters_for_muon(facts: Facts) -> bool:
    training = facts.training
    return training is None or training.master_weights or training.optimizer.name is OptimizerName.ADAMW


def _offload_needs_adamw(facts: Facts) -> bool:
    training = facts.training
    if training is None or training.optimizer.offload is OptimizerOffload.NONE:
        return True
    return training.master_weights and training.optimizer.name is OptimizerName.ADAMW


def _path_for_file(facts: Facts) -> bool:
    optimizer = facts.training.optimizer if facts.training is not None else None
    if optimizer is None:
        return True
    return (optimizer.offload is OptimizerOffload.FILE) == (optimizer.offload_path is not None)


def _path_for_parameters(facts: Facts) -> bool:
    training = facts.training
    return training is None or training.parameter_offload_path is None or training.parameter_offload


def _fp8_precision(facts: Facts) -> bool:
    training = facts.training
    return training is None or training.fp8 is None or training.precision in (Precision.BF16, Precision.FP32)


def _fp8_without_lora(facts: Facts) -> bool:
    training = facts.training
    return training is None or training.fp8 is None or training.lora is None


def _rowwise_is_dynamic(facts: Facts) -> bool:
    fp8 = facts.training.fp8 if facts.training is not None else None
    return fp8 is None or fp8.scaling is Fp8Scaling.TENSORWISE or fp8.update is Fp8Update.DYNAMIC


MEMORY_RULES: tuple[Rule[Facts], ...] = (
    Rule(
        "training.masterWeights",
        "may only be false with `training.precision: bf16`, which has the range of fp32",
        "!has(self.training) || self.training.masterWeights || self.training.precision == 'bf16'",
        _masters_unless_bf16,
    ),
    Rule(
        "training.masterWeights",
        "must be true with `training.optimizer.name: Muon`: only AdamW's updates are rounded stochastically",
        "!has(self.training) || self.training.masterWeights || self.training.optimizer.name == 'AdamW'",
        _masters_for_muon,
    ),
    Rule(
        "training.optimizer.offload",
        "needs `training.optimizer.name: AdamW` and `training.masterWeights: true`",
        "!has(self.training) || self.training.optimizer.offload == 'None'"
        " || (self.training.masterWeights && self.training.optimizer.name == 'AdamW')",
        _offload_needs_adamw,
    ),
    Rule(
        "training.optimizer.offloadPath",
        "must be set with `training.optimizer.offload: File`, and only then",
        "!has(self.training) || (self.training.optimizer.offload == 'File') == "
        "has(self.training.optimizer.offloadPath)",
        _path_for_file,
    ),
    Rule(
        "training.parameterOffloadPath",
        "needs `training.parameterOffload: true`: set it, or remove the path",
        "!has(self.training) || !has(self.training.parameterOffloadPath) || self.training.parameterOffload",
        _path_for_parameters,
    ),
    Rule(
        "training.fp8",
        "needs `training.precision: bf16` or `fp32`",
        "!has(self.training) || !has(self.training.fp8) || self.training.precision in ['bf16', 'fp32']",
        _fp8_precision,
    ),
    Rule(
        "training.fp8",
        "must be left out with `training.lora`: adapters are narrow matrices, which gain nothing from it",
        "!has(self.training) || !has(self.training.fp8) || !has(self.training.lora)",
        _fp8_without_lora,
    ),
    Rule(
        "training.fp8.update",
        "must be `Dynamic` with `training.fp8.scaling: Rowwise`: rows are other tokens in every step",
        "!has(self.training) || !has(self.training.fp8) || self.training.fp8.scaling == 'Tensorwise'"
        " || self.training.fp8.update == 'Dynamic'",
        _rowwise_is_dynamic,
    ),
)
