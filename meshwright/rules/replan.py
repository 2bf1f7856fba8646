"""`elastic.replan`: the rules on it, and what an elastic job is planned anew for when too few nodes are left."""

from __future__ import annotations

from meshwright.api.data_parallel import DataParallelStrategy
from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.spec import ParallelTrainingJobSpec as Spec
from meshwright.rules.rule import Rule, is_asynchronous, schedule_is_not, schedule_names
from meshwright.schedules.registry import kind_of

MAX_BUDGETS = 8
"""For how many numbers of GPUs a job is planned anew at once. Each is a search."""

_HYBRID = (DataParallelStrategy.HYBRID_SHARD, DataParallelStrategy.HYBRID_SHARD_ZERO2)
_NO_REPLAN_OR = "!has(self.elastic) || !self.elastic.replan || "


def _replans(spec: Spec) -> bool:
    return spec.elastic is not None and spec.elastic.replan


def _min_gpus(spec: Spec) -> int | None:
    return spec.elastic.min_gpus if spec.elastic is not None else None


REPLAN_RULES: tuple[Rule[Spec], ...] = (
    Rule(
        "elastic",
        "needs `elastic.replan: true` with `gpus`, which leaves all degrees to the planner: set it, or remove one of "
        "`elastic` and `gpus`",
        "!has(self.elastic) || !has(self.gpus) || self.elastic.replan",
        lambda spec: spec.elastic is None or spec.gpus is None or spec.elastic.replan,
    ),
    Rule(
        "elastic.maxReplicas",
        "is not supported with `gpus`, which limits the replicas: remove it, and `elastic.fill`",
        "!has(self.elastic) || !has(self.gpus) || !has(self.elastic.maxReplicas)",
        lambda spec: spec.elastic is None or spec.gpus is None or spec.elastic.max_replicas is None,
    ),
    Rule(
        "elastic.replan",
        "is not supported with `runtime.command`, whose checkpoints Meshwright cannot reshard: remove it",
        f"{_NO_REPLAN_OR}!has(self.runtime.command)",
        lambda spec: not _replans(spec) or spec.runtime.command is None,
    ),
    Rule(
        "elastic.replan",
        lambda: (
            "is not supported with `parallelism.schedule` "
            f"{schedule_names(is_asynchronous, 'or')}, whose stale weights depend on the pipeline: use another "
            "schedule, or remove it"
        ),
        lambda: f"{_NO_REPLAN_OR}{schedule_is_not(is_asynchronous)}",
        lambda spec: not _replans(spec) or not kind_of(spec.parallelism.order).asynchronous,
    ),
    Rule(
        "elastic.minGpus",
        "needs `elastic.replan: true`: set it, or remove this field",
        "!has(self.elastic) || !has(self.elastic.minGpus) || self.elastic.replan",
        lambda spec: _min_gpus(spec) is None or _replans(spec),
    ),
    Rule(
        "elastic.minGpus",
        "must not be above `gpus`: lower it, or raise `gpus`",
        "!has(self.elastic) || !has(self.elastic.minGpus) || !has(self.gpus) || self.elastic.minGpus <= self.gpus",
        lambda spec: spec.gpus is None or (_min_gpus(spec) or 0) <= spec.gpus,
    ),
)


def budgets(spec: Spec, least_world_size: int, gpus_left: int) -> list[int]:
    """The numbers of GPUs to plan an elastic job for, the largest first. At most `MAX_BUDGETS`, in entire workers.

    Args:
        spec: The spec.
        least_world_size: GPUs of the smallest size in the full layout. Every budget is below it.
        gpus_left: GPUs of the workers that are left. They are one of the budgets if possible.
    """
    each = spec.workers.gpus_per_worker
    least = -(-max(_min_gpus(spec) or 1, 1) // each)
    most = (least_world_size - 1) // each
    if most - least < MAX_BUDGETS:
        return [workers * each for workers in range(most, least - 1, -1)]
    # The fewer GPUs are left, the more steps are between two budgets: the workers that are left are what is known.
    steps = MAX_BUDGETS - 1
    chosen = {round(most * (least / most) ** (step / (steps - 1))) for step in range(steps)}
    left = gpus_left // each
    if least <= left <= most:
        chosen.add(left)
    return [workers * each for workers in sorted(chosen, reverse=True)]


def open_specs(spec: Spec, gpus: int) -> list[Spec]:
    """The specs with which to plan a job anew for at most this many GPUs, the preferred one first.

    A tensor-parallel degree that the spec states is kept if that is possible: it fits the NVLink domains. All other
    degrees, micro-batches and the ZeRO stage are left to the planner, as with a budget of GPUs.
    """
    tensor = spec.parallelism.tensor
    free = _with_budget(spec, gpus, None)
    kept = tensor is not None and tensor <= gpus
    return [_with_budget(spec, gpus, tensor), free] if kept else [free]


def replanned_spec(spec: Spec, replicas: int, micro_batches: int) -> Spec:
    """The spec of a job that runs in a layout that it was planned anew for. The degrees are those of the plan."""
    parallelism = _opened(spec.parallelism, None).model_copy(update={"micro_batches": micro_batches})
    return spec.model_copy(
        update={"elastic": None, "gpus": None, "replicas": replicas, "parallelism": parallelism},
    )


def _with_budget(spec: Spec, gpus: int, tensor: int | None) -> Spec:
    parallelism = _opened(spec.parallelism, tensor)
    return spec.model_copy(update={"elastic": None, "replicas": 1, "gpus": gpus, "parallelism": parallelism})


def _opened(stated: ParallelismSpec, tensor: int | None) -> ParallelismSpec:
    """`parallelism` without what depends on degrees, except this tensor-parallel degree."""
    replicas = stated.data_parallel.model_copy(update={"shard_size": None, "reshard_size": None})
    if replicas.strategy in _HYBRID:
        replicas = replicas.model_copy(update={"strategy": None})
    names = ("pipeline", "context", "context_method", "ulysses", "expert", "zero_stage", "micro_batches")
    pipeline = ("schedule", "virtual_stages", "layer_split", "activation_limit")
    return stated.model_copy(
        update={
            **dict.fromkeys((*names, *pipeline)),
            "tensor": tensor,
            "tensor_overlap": stated.tensor_overlap and tensor is not None and tensor > 1,
            "data_parallel": replicas,
        }
    )
