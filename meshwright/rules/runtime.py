"""Rules on what the ranks run: Meshwright's runtime, or the user's command."""

from __future__ import annotations

from meshwright.api.parallelism import ContextMethod
from meshwright.api.spec import ParallelTrainingJobSpec as Spec
from meshwright.rules.rule import Rule


def _command_excludes_model(spec: Spec) -> bool:
    return spec.runtime.command is None or (spec.model is None and spec.data is None and spec.training is None)


def _command_or_model(spec: Spec) -> bool:
    is_complete = spec.model is not None and spec.data is not None and spec.training is not None
    return spec.runtime.command is not None or is_complete


def _command_owns_checkpoints(spec: Spec) -> bool:
    checkpoint = spec.checkpoint
    is_set = checkpoint is not None and (checkpoint.every_steps is not None or checkpoint.keep is not None)
    return spec.runtime.command is None or not is_set


def _command_owns_schedule(spec: Spec) -> bool:
    p = spec.parallelism
    defaults_kept = p.context_method is ContextMethod.RING_ZIG_ZAG and p.ulysses is None
    defaults_kept = defaults_kept and p.sequence and p.expert_tensor and not p.tensor_overlap
    return spec.runtime.command is None or (p.micro_batches is None and p.zero_stage == 0 and defaults_kept)


RUNTIME_RULES = (
    Rule(
        "runtime.command",
        "`runtime.command` excludes `model`, `data` and `training`: remove them, or remove the command",
        "!has(self.runtime.command) || !(has(self.model) || has(self.data) || has(self.training))",
        _command_excludes_model,
    ),
    Rule(
        "runtime.command",
        "must be set unless `model`, `data` and `training` are all given: add what is missing of the three, "
        "or a command",
        "has(self.runtime.command) || (has(self.model) && has(self.data) && has(self.training))",
        _command_or_model,
    ),
    Rule(
        "runtime.scripts",
        "may only be set with `runtime.command`, which runs them: remove it, or add a command",
        "!has(self.runtime.scripts) || has(self.runtime.command)",
        lambda spec: spec.runtime.scripts is None or spec.runtime.command is not None,
    ),
    Rule(
        "checkpoint",
        "`checkpoint.everySteps` and `checkpoint.keep` may not be set with `runtime.command`, which saves its own "
        "checkpoints: remove them",
        "!has(self.runtime.command) || !has(self.checkpoint)"
        " || !(has(self.checkpoint.everySteps) || has(self.checkpoint.keep))",
        _command_owns_checkpoints,
    ),
    Rule(
        "parallelism",
        "`parallelism.microBatches`, `zeroStage`, `sequence`, `expertTensor`, `tensorOverlap`, `contextMethod` and "
        "`ulysses` may not be set with `runtime.command`, which does these itself: remove them",
        "!has(self.runtime.command) || (!has(self.parallelism.microBatches)"
        " && self.parallelism.zeroStage == 0 && self.parallelism.sequence && self.parallelism.expertTensor"
        " && !self.parallelism.tensorOverlap"
        " && self.parallelism.contextMethod == 'RingZigZag' && !has(self.parallelism.ulysses))",
        _command_owns_schedule,
    ),
)
