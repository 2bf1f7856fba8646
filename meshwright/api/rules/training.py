"""Rules on data, batch and learning-rate schedule."""

from __future__ import annotations

from meshwright.api.rules.rule import Rule
from meshwright.api.spec import DataSource, Fp8Scaling, Fp8Update, OptimizerName, OptimizerOffload, Precision
from meshwright.api.spec import ParallelTrainingJobSpec as Spec


def _batch_splits(spec: Spec) -> bool:
    return spec.training is None or spec.training.global_batch_size % spec.replicas == 0


def _micro_batches_split(spec: Spec) -> bool:
    micro_batches = spec.parallelism.micro_batches
    if spec.training is None or micro_batches is None:
        return True
    return spec.training.global_batch_size % (spec.replicas * micro_batches) == 0


def _claim_for_files(spec: Spec) -> bool:
    return spec.data is None or (spec.data.source is DataSource.FILES) == (spec.data.claim_name is not None)


def _pattern_for_files(spec: Spec) -> bool:
    return spec.data is None or spec.data.source is DataSource.FILES or spec.data.pattern == "**/*"


def _warm_up_ends(spec: Spec) -> bool:
    return spec.training is None or spec.training.optimizer.warmup_steps <= spec.training.steps


def _rate_decays(spec: Spec) -> bool:
    optimizer = spec.training.optimizer if spec.training is not None else None
    return optimizer is None or optimizer.min_learning_rate <= optimizer.learning_rate


def _masters_for_all_but_bf16(spec: Spec) -> bool:
    training = spec.training
    return training is None or training.master_weights or training.precision is Precision.BF16


def _masters_for_muon(spec: Spec) -> bool:
    training = spec.training
    return training is None or training.master_weights or training.optimizer.name is OptimizerName.ADAMW


def _offloads_adamw(spec: Spec) -> bool:
    training = spec.training
    if training is None or training.optimizer.offload is OptimizerOffload.NONE:
        return True
    return training.master_weights and training.optimizer.name is OptimizerName.ADAMW


def _path_for_file(spec: Spec) -> bool:
    optimizer = spec.training.optimizer if spec.training is not None else None
    if optimizer is None:
        return True
    return (optimizer.offload is OptimizerOffload.FILE) == (optimizer.offload_path is not None)


def _fp8_between_wide_numbers(spec: Spec) -> bool:
    training = spec.training
    return training is None or training.fp8 is None or training.precision in (Precision.BF16, Precision.FP32)


def _rows_scale_dynamically(spec: Spec) -> bool:
    fp8 = spec.training.fp8 if spec.training is not None else None
    return fp8 is None or fp8.scaling is Fp8Scaling.TENSORWISE or fp8.update is Fp8Update.DYNAMIC


TRAINING_RULES = (
    Rule(
        "training.globalBatchSize",
        "must be divisible by `replicas`: each replica takes the same number of sequences",
        "!has(self.training) || self.training.globalBatchSize % self.replicas == 0",
        _batch_splits,
    ),
    Rule(
        "parallelism.microBatches",
        "times `replicas` must divide `training.globalBatchSize`: every micro-batch has the same number of sequences",
        "!has(self.training) || !has(self.parallelism.microBatches)"
        " || self.training.globalBatchSize % (self.replicas * self.parallelism.microBatches) == 0",
        _micro_batches_split,
    ),
    Rule(
        "data.claimName",
        "must be set with `data.source: Files`, and only then: name the PersistentVolumeClaim that holds the files",
        "!has(self.data) || (self.data.source == 'Files') == has(self.data.claimName)",
        _claim_for_files,
    ),
    Rule(
        "data.pattern",
        "may only be set with `data.source: Files`: remove it",
        "!has(self.data) || self.data.source == 'Files' || self.data.pattern == '**/*'",
        _pattern_for_files,
    ),
    Rule(
        "training.optimizer.warmupSteps",
        "must be at most `training.steps`",
        "!has(self.training) || self.training.optimizer.warmupSteps <= self.training.steps",
        _warm_up_ends,
    ),
    Rule(
        "training.optimizer.minLearningRate",
        "must be at most `training.optimizer.learningRate`: the rate decays towards it",
        "!has(self.training) || self.training.optimizer.minLearningRate <= self.training.optimizer.learningRate",
        _rate_decays,
    ),
    Rule(
        "training.masterWeights",
        "may only be false with `training.precision: bf16`, which has the range of fp32",
        "!has(self.training) || self.training.masterWeights || self.training.precision == 'bf16'",
        _masters_for_all_but_bf16,
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
        _offloads_adamw,
    ),
    Rule(
        "training.optimizer.offloadPath",
        "must be set with `training.optimizer.offload: File`, and only then",
        "!has(self.training) || (self.training.optimizer.offload == 'File') == "
        "has(self.training.optimizer.offloadPath)",
        _path_for_file,
    ),
    Rule(
        "training.fp8",
        "needs `training.precision: bf16` or `fp32`",
        "!has(self.training) || !has(self.training.fp8) || self.training.precision in ['bf16', 'fp32']",
        _fp8_between_wide_numbers,
    ),
    Rule(
        "training.fp8.update",
        "must be `Dynamic` with `training.fp8.scaling: Rowwise`: rows are other tokens in every step",
        "!has(self.training) || !has(self.training.fp8) || self.training.fp8.scaling == 'Tensorwise'"
        " || self.training.fp8.update == 'Dynamic'",
        _rows_scale_dynamically,
    ),
)
