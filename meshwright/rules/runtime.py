"""Rules on `runtime`: ranks run either Meshwright's runtime or the user's command."""

from __future__ import annotations

from meshwright.api.parallelism import ContextMethod
from meshwright.rules.facts import Facts
from meshwright.rules.parallelism import PLANNED, RANKS_OF_REPLICA, ranks_of_replica
from meshwright.rules.rule import Rule, divides

REPLICA_GROUPS = "(has(self.runtime.framework) && self.runtime.framework == 'TorchFT')"
"""In CEL, whether ranks form replica groups of torchft."""


def _command_excludes_model(facts: Facts) -> bool:
    return facts.runtime.command is None or facts.runtime.planned or not _states_model(facts)


def _states_model(facts: Facts) -> bool:
    return facts.model is not None or facts.data is not None or facts.training is not None


def _framework_has_all(facts: Facts) -> bool:
    is_complete = facts.runtime.command is not None and facts.model is not None and facts.training is not None
    return not facts.runtime.planned or (is_complete and facts.data is None)


def _groups_are_whole_workers(facts: Facts) -> bool:
    ranks, gpus = ranks_of_replica(facts), facts.workers.gpus_per_worker if facts.workers is not None else None
    return not facts.runtime.has_replica_groups or divides(gpus, ranks) or divides(ranks, gpus)


def _can_inject(facts: Facts) -> bool:
    is_free = (
        all(volume.name != AGENT_VOLUME for volume in facts.workers.volumes) if facts.workers is not None else True
    )
    return not facts.runtime.injects_agent or (facts.runtime.command is not None and is_free)


def _command_or_model(facts: Facts) -> bool:
    is_complete = facts.model is not None and facts.data is not None and facts.training is not None
    return facts.runtime.command is not None or is_complete


def _command_owns_checkpoints(facts: Facts) -> bool:
    checkpoint = facts.checkpoint
    is_set = checkpoint is not None and checkpoint.every_steps is not None
    return facts.runtime.command is None or facts.runtime.planned or not is_set


def _can_delete(facts: Facts) -> bool:
    checkpoint = facts.checkpoint
    is_set = checkpoint is not None and checkpoint.keep is not None
    has_volume = checkpoint is not None and checkpoint.claim_name is not None
    return facts.runtime.command is None or not is_set or has_volume


def _command_owns_schedule(facts: Facts) -> bool:
    p = facts.parallelism
    defaults_kept = p.context_method_or_default is ContextMethod.RING_ZIG_ZAG and p.ulysses is None
    defaults_kept = defaults_kept and p.sequence and p.expert_tensor and not p.tensor_overlap
    defaults_kept = defaults_kept and p.micro_batches is None and p.zero_stage_or_default == 0
    return facts.runtime.command is None or facts.runtime.planned or defaults_kept


AGENT_VOLUME = "meshwright-agent"
"""The volume of an injected agent, and its init container."""

RUNTIME_RULES: tuple[Rule[Facts], ...] = (
    Rule(
        "runtime.command",
        "is not supported with `model`, `data` and `training`: remove them, or remove the command",
        f"!has(self.runtime.command) || {PLANNED} || !(has(self.model) || has(self.data) || has(self.training))",
        _command_excludes_model,
    ),
    Rule(
        "runtime.command",
        "is required unless `model`, `data` and `training` are all set: add the missing ones, or a command",
        "has(self.runtime.command) || (has(self.model) && has(self.data) && has(self.training))",
        _command_or_model,
    ),
    Rule(
        "runtime.framework",
        "needs `runtime.command`, `model` and `training`, and no `data`, which the command names: add what is missing, "
        "and remove `data`",
        f"!{PLANNED} || (has(self.runtime.command) && has(self.model) && has(self.training) && !has(self.data))",
        _framework_has_all,
    ),
    Rule(
        "runtime.framework",
        "`TorchFT` needs `runtime.command`, which it starts: add a command",
        f"!{REPLICA_GROUPS} || has(self.runtime.command)",
        lambda facts: not facts.runtime.has_replica_groups or facts.runtime.command is not None,
    ),
    Rule(
        "runtime.framework",
        "with `TorchFT`, `parallelism.tensor` times `pipeline` and `context` must be a multiple or divisor of "
        "`workers.gpusPerWorker`",
        f"!{REPLICA_GROUPS} || [{RANKS_OF_REPLICA}].exists(r, r % self.workers.gpusPerWorker == 0"
        " || self.workers.gpusPerWorker % r == 0)",
        _groups_are_whole_workers,
    ),
    Rule(
        "runtime.scripts",
        "needs `runtime.command`, which runs them: remove it, or add a command",
        "!has(self.runtime.scripts) || has(self.runtime.command)",
        lambda facts: facts.runtime.scripts is None or facts.runtime.command is not None,
    ),
    Rule(
        "runtime.agent",
        f"`Injected` needs `runtime.command`, and no volume named `{AGENT_VOLUME}`: add a command, or rename it",
        "!has(self.runtime.agent) || self.runtime.agent != 'Injected'"
        f" || (has(self.runtime.command) && !self.workers.volumes.exists(v, v.name == '{AGENT_VOLUME}'))",
        _can_inject,
    ),
    Rule(
        "runtime.progress",
        "needs `runtime.command`, whose log it is about: remove it, or add a command",
        "!has(self.runtime.progress) || has(self.runtime.command)",
        lambda facts: facts.runtime.progress is None or facts.runtime.command is not None,
    ),
    Rule(
        "checkpoint",
        "`checkpoint.everySteps` is not supported with `runtime.command`, which saves checkpoints itself: remove it",
        f"!has(self.runtime.command) || {PLANNED} || !has(self.checkpoint) || !has(self.checkpoint.everySteps)",
        _command_owns_checkpoints,
    ),
    Rule(
        "checkpoint.keep",
        "needs `checkpoint.claimName` with `runtime.command`: set it, or remove this field",
        "!has(self.runtime.command) || !has(self.checkpoint) || !has(self.checkpoint.keep)"
        " || has(self.checkpoint.claimName)",
        _can_delete,
    ),
    Rule(
        "checkpoint.verify",
        "needs `runtime.command`, whose checkpoints it checks: remove it, or add a command",
        "!has(self.checkpoint) || !has(self.checkpoint.verify) || has(self.runtime.command)",
        lambda facts: facts.checkpoint is None or facts.checkpoint.verify is None or facts.runtime.command is not None,
    ),
    Rule(
        "parallelism",
        "`parallelism.microBatches`, `zeroStage`, `sequence`, `expertTensor`, `tensorOverlap`, `contextMethod` and "
        "`ulysses` are not supported with `runtime.command`, which implements these itself: remove them",
        f"!has(self.runtime.command) || {PLANNED} || (!has(self.parallelism.microBatches)"
        " && self.parallelism.zeroStage == 0 && self.parallelism.sequence && self.parallelism.expertTensor"
        " && !self.parallelism.tensorOverlap"
        " && self.parallelism.contextMethod == 'RingZigZag' && !has(self.parallelism.ulysses))",
        _command_owns_schedule,
    ),
)
