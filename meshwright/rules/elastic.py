"""Rules on `elastic`, on what does not go with it, and the sizes that a job may have."""

from __future__ import annotations

from math import sqrt

from meshwright.api.elastic import LossAction, RateScaling, ScaledBatch
from meshwright.api.parallelism import StageBalance
from meshwright.api.spec import ParallelTrainingJobSpec as Spec
from meshwright.api.spec import ReplicaLossAction
from meshwright.api.status import PlanStatus
from meshwright.api.training import TrainingSpec
from meshwright.rules.replan import REPLAN_RULES, replanned_spec
from meshwright.rules.rule import Rule, schedule_is_not, schedule_names
from meshwright.schedules.registry import kind_of
from meshwright.schedules.schedule import PipelineScheduleKind

MAX_SIZES = 16
"""How many sizes are tried at once. Each needs a plan, and maybe a placement."""


def _min_within(spec: Spec) -> bool:
    return spec.elastic is None or spec.elastic.min_replicas <= spec.replicas


def _max_within(spec: Spec) -> bool:
    limit = spec.elastic.max_replicas if spec.elastic is not None else None
    return limit is None or spec.replicas <= limit


def _fills_up_to(spec: Spec) -> bool:
    return spec.elastic is None or not spec.elastic.fill or spec.elastic.max_replicas is not None


def _has_checkpoints(spec: Spec) -> bool:
    return spec.elastic is None or spec.checkpoint is not None or spec.runtime.command is not None


def _own_scheduler(spec: Spec) -> bool:
    return spec.elastic is None or spec.workers.scheduler_name is None


def _one_island(spec: Spec) -> bool:
    return spec.elastic is None or spec.training is None or spec.training.outer is None


def _scaled(spec: Spec) -> ScaledBatch | None:
    return spec.elastic.scaled_batch if spec.elastic is not None else None


def _continues(spec: Spec) -> bool:
    return spec.recovery.on_replica_loss is ReplicaLossAction.CONTINUE


def continues_on_loss(spec: Spec) -> bool:
    """Whether an elastic job goes on at once with the replicas that are left when others are lost."""
    shrinks = spec.elastic is not None and spec.elastic.on_loss is LossAction.SHRINK
    return shrinks or (spec.elastic is not None and _continues(spec))


def _can_continue(spec: Spec) -> bool:
    asked = spec.parallelism
    return not _continues(spec) or not (asked.zero_stage or (asked.expert or 1) > 1)


def _runs_stages_twice(kind: PipelineScheduleKind) -> bool:
    return kind.bidirectional


def _can_measure_stages(spec: Spec) -> bool:
    asked = spec.parallelism
    if asked.stage_balance is not StageBalance.MEASURED:
        return True
    fixed = asked.layer_split is not None or kind_of(asked.order).bidirectional
    return spec.checkpoint is not None and spec.elastic is None and not fixed


_CONTINUES = "!has(self.recovery.onReplicaLoss) || self.recovery.onReplicaLoss != 'Continue'"

ELASTIC_RULES: tuple[Rule[Spec], ...] = (
    Rule(
        "recovery.onReplicaLoss",
        "`Continue` needs `recovery.inMemory: true` and `elastic`: set them, without `elastic.replan` and "
        "`recovery.copyEverySteps`",
        f"{_CONTINUES} || has(self.recovery.inMemory) && self.recovery.inMemory && has(self.elastic)"
        " && !self.elastic.replan && !has(self.recovery.copyEverySteps)",
        lambda spec: (
            not _continues(spec)
            or (
                bool(spec.recovery.in_memory)
                and spec.elastic is not None
                and not spec.elastic.replan
                and spec.recovery.copy_every_steps is None
            )
        ),
    ),
    Rule(
        "recovery.onReplicaLoss",
        "`Continue` needs the whole state in each replica: set `parallelism.zeroStage: 0`, and `parallelism.expert: 1`",
        f"{_CONTINUES} || (!has(self.parallelism.zeroStage) || self.parallelism.zeroStage == 0)"
        " && (!has(self.parallelism.expert) || self.parallelism.expert == 1)",
        _can_continue,
    ),
    Rule(
        "elastic.minReplicas",
        "must not be above `replicas`: lower it, or raise `replicas`",
        "!has(self.elastic) || self.elastic.minReplicas <= self.replicas",
        _min_within,
    ),
    Rule(
        "elastic.maxReplicas",
        "must not be below `replicas`: raise it, or lower `replicas`",
        "!has(self.elastic) || !has(self.elastic.maxReplicas) || self.replicas <= self.elastic.maxReplicas",
        _max_within,
    ),
    Rule(
        "elastic.maxReplicas",
        "is required with `elastic.fill`, which grows the job up to it: add it",
        "!has(self.elastic) || !self.elastic.fill || has(self.elastic.maxReplicas)",
        _fills_up_to,
    ),
    Rule(
        "elastic",
        "needs `checkpoint`, because ranks save a checkpoint before a resize: add it, or remove `elastic`",
        "!has(self.elastic) || has(self.checkpoint) || has(self.runtime.command)",
        _has_checkpoints,
    ),
    Rule(
        "elastic",
        "is not supported with `workers.schedulerName`, because another scheduler places the pods: remove one of them",
        "!has(self.elastic) || !has(self.workers.schedulerName)",
        _own_scheduler,
    ),
    Rule(
        "elastic",
        "is not supported with `training.outer`, whose islands are replicas: remove one of them",
        "!has(self.elastic) || !has(self.training) || !has(self.training.outer)",
        _one_island,
    ),
    Rule(
        "elastic.scaledBatch",
        "needs `training`, whose batch it scales: remove it",
        "!has(self.elastic) || !has(self.elastic.scaledBatch) || has(self.training)",
        lambda spec: _scaled(spec) is None or spec.training is not None,
    ),
    Rule(
        "elastic.scaledBatch",
        "is not supported with `elastic.replan`, whose layouts have another number of sequences per replica: remove "
        "one of them",
        "!has(self.elastic) || !has(self.elastic.scaledBatch) || !self.elastic.replan",
        lambda spec: spec.elastic is None or _scaled(spec) is None or not spec.elastic.replan,
    ),
    Rule(
        "elastic.scaledBatch.replicas",
        "times `parallelism.microBatches` must divide `training.globalBatchSize`, because every replica keeps its "
        "micro-batches: change one of them",
        "!has(self.elastic) || !has(self.elastic.scaledBatch) || !has(self.training)"
        " || self.training.globalBatchSize % (self.elastic.scaledBatch.replicas"
        " * (has(self.parallelism.microBatches) ? self.parallelism.microBatches : 1)) == 0",
        lambda spec: (
            (scaled := _scaled(spec)) is None
            or spec.training is None
            or spec.training.global_batch_size % (scaled.replicas * (spec.parallelism.micro_batches or 1)) == 0
        ),
    ),
    Rule(
        "parallelism.stageBalance",
        lambda: (
            "can be `Measured` only with `checkpoint`, from which ranks continue with other layers, and without "
            f"`elastic`, `parallelism.layerSplit` and the schedule {schedule_names(_runs_stages_twice, 'or')}: use "
            "`Flops`, or change those"
        ),
        lambda: (
            "self.parallelism.stageBalance != 'Measured' || (has(self.checkpoint) && !has(self.elastic)"
            f" && !has(self.parallelism.layerSplit) && {schedule_is_not(_runs_stages_twice)})"
        ),
        _can_measure_stages,
    ),
    *REPLAN_RULES,
)


def wanted_replicas(spec: Spec) -> int:
    """The number of replicas with which a job runs if there are enough nodes."""
    if spec.elastic is not None and spec.elastic.fill and spec.elastic.max_replicas is not None:
        return spec.elastic.max_replicas
    return spec.replicas


def smallest_size(spec: Spec) -> int:
    """The number of replicas below which a job does not run."""
    return spec.elastic.min_replicas if spec.elastic is not None else spec.replicas


def resized(spec: Spec, replicas: int, total_micro_batches: int | None = None) -> Spec | None:
    """The spec of the job with this fixed number of replicas, or None if the batch does not divide.

    The global batch stays the same. It is divided into at least as many micro-batches as at the full size, so that none
    is larger. With `elastic.scaledBatch`, each replica keeps its micro-batches instead.

    Args:
        spec: The spec.
        replicas: The number of replicas.
        total_micro_batches: Micro-batches of all replicas in one step at the full size with which the job started. If
            the spec has more, those count.
    """
    if spec.training is None or _scaled(spec) is not None:
        return fixed_size(spec, replicas)
    given = spec.parallelism.micro_batches
    full = (spec.elastic.max_replicas or spec.replicas) if spec.elastic is not None else spec.replicas
    total = max(given * full if given is not None else 0, total_micro_batches or 0)
    batch = spec.training.global_batch_size
    if batch % replicas:
        return None
    if not total:
        return fixed_size(spec, replicas)
    count = next((n for n in range(-(-total // replicas), batch // replicas + 1) if batch % (n * replicas) == 0), None)
    return None if count is None else fixed_size(spec, replicas, count)


def fixed_size(spec: Spec, replicas: int, micro_batches: int | None = None) -> Spec:
    """The spec of the job with this fixed number of replicas, and with its batch and learning rates at that number.

    Args:
        spec: The spec.
        replicas: The number of replicas.
        micro_batches: Micro-batches of a replica in one step. By default those of the spec.
    """
    changes: dict[str, object] = {"replicas": replicas, "elastic": None}
    if _continues(spec):  # which only a job with `elastic` may say
        changes["recovery"] = spec.recovery.model_copy(update={"on_replica_loss": None})
    if (scaled := _scaled(spec)) is not None and spec.training is not None:
        changes["training"] = _scaled_training(spec.training, scaled, replicas)
    if micro_batches is not None:
        changes["parallelism"] = spec.parallelism.model_copy(update={"micro_batches": micro_batches})
    return spec.model_copy(update=changes)


def with_own_batch(spec: Spec) -> Spec:
    """The spec of a job whose batch follows its replicas, with the batch of `replicas`. Other specs stay the same."""
    return spec if _scaled(spec) is None else fixed_size(spec, spec.replicas)


def _scaled_training(training: TrainingSpec, scaled: ScaledBatch, replicas: int) -> TrainingSpec:
    """The batch in proportion to the replicas, and the learning rates by the rule (arXiv 1706.02677, 1404.5997)."""
    ratio = replicas / scaled.replicas
    factor = {RateScaling.CONSTANT: 1.0, RateScaling.LINEAR: ratio, RateScaling.SQUARE_ROOT: sqrt(ratio)}
    scale, optimizer = factor[scaled.learning_rate], training.optimizer
    rates = {name: min(_MAX_RATE, getattr(optimizer, name) * scale) for name in ("learning_rate", "min_learning_rate")}
    batch = training.global_batch_size * replicas // scaled.replicas
    return training.model_copy(update={"global_batch_size": batch, "optimizer": optimizer.model_copy(update=rates)})


_MAX_RATE = 10.0
"""Largest learning rate of the API."""


def spec_of_plan(spec: Spec, plan: PlanStatus) -> Spec:
    """The spec of an elastic job that runs with this plan: without `elastic`, and with the replicas of the plan."""
    if plan.replanned:
        return replanned_spec(spec, plan.data, plan.micro_batches)
    counted = spec.model_copy(update={"gpus": None})
    # An edit may change how other sizes divide the batch, but not what runs now.
    return fixed_size(counted, plan.data, plan.micro_batches if spec.training is not None else None)


def sizes(spec: Spec, largest: int, smallest: int | None = None) -> list[int]:
    """At most `MAX_SIZES` numbers of replicas by which the batch divides, or any with `scaledBatch`, largest first.

    Args:
        spec: The spec.
        largest: The largest number.
        smallest: The smallest number. By default `minReplicas`.
    """
    least = smallest_size(spec) if smallest is None else smallest
    batch = spec.training.global_batch_size if spec.training is not None and _scaled(spec) is None else 0
    found = [count for count in range(largest, least - 1, -1) if batch % count == 0]
    if len(found) <= MAX_SIZES:
        return found
    half = MAX_SIZES // 2
    rest, last = found[half:], found[-1]
    # The largest ones, and then ever wider steps down to the smallest.
    picked = {rest[round(len(rest) ** (step / half)) - 1] for step in range(half)} - {last}
    return found[:half] + sorted(picked, reverse=True)[: MAX_SIZES - half - 1] + [last]
