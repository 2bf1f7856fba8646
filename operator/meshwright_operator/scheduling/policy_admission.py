"""Which bound of the administrator's policy a job exceeds. Pure functions; messages name the bound and the value."""

from __future__ import annotations

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.plan import Plan
from meshwright_operator.scheduling.policy import Bounds
from meshwright_operator.text import counted, sentences

POLICY_EXCEEDED = "PolicyExceeded"


def spec_excess(spec: ParallelTrainingJobSpec, plan: Plan, namespace: str, bounds: Bounds) -> str:
    """Why the policy does not allow a job with this spec in the namespace, whatever else runs. Empty if it does."""
    gpus, replicas = plan.layout.world_size, plan.layout.data
    problems = [
        *_over("spec.priority", spec.priority, bounds.priority.max),
        *_under("spec.priority", spec.priority, bounds.priority.min),
        *_over("spec.recovery.spareNodes", spec.recovery.spare_nodes, bounds.max_spare_nodes),
        *_over(_size_field(spec), replicas, bounds.max_replicas),
        *_outside(spec, namespace, bounds.checkpoint_prefixes),
    ]
    if bounds.max_gpus_per_job is not None and gpus > bounds.max_gpus_per_job:
        problems.append(f"the job needs {counted(gpus, 'GPU')}: use at most {bounds.max_gpus_per_job}")
    elif bounds.max_gpus_in_use is not None and gpus > bounds.max_gpus_in_use:
        problems.append(
            f"the job needs {counted(gpus, 'GPU')}: all jobs of the namespace may use at most {bounds.max_gpus_in_use}"
        )
    return _not_allowed(namespace, problems)


def size_excess(spec: ParallelTrainingJobSpec, plan: Plan, namespace: str, bounds: Bounds) -> str:
    """Why the policy does not allow a job of the namespace to have this size, whatever else runs. Empty if it does."""
    gpus, limit = plan.layout.world_size, bounds.max_gpus_per_job
    problems = _over(_size_field(spec), plan.layout.data, bounds.max_replicas)
    if limit is not None and gpus > limit:
        problems.append(f"the job needs {counted(gpus, 'GPU')}: use at most {limit}")
    return _not_allowed(namespace, problems)


def live_excess(
    running: ParallelTrainingJobSpec, wanted: ParallelTrainingJobSpec, namespace: str, bounds: Bounds
) -> str:
    """Why the policy does not allow an edit of fields that take effect at once. Empty if it does.

    What the job had before it was edited is allowed: the policy may have changed since.
    """
    spares, problems = wanted.recovery.spare_nodes, []
    if wanted.priority != running.priority:
        problems += _over("spec.priority", wanted.priority, bounds.priority.max)
        problems += _under("spec.priority", wanted.priority, bounds.priority.min)
    if spares != running.recovery.spare_nodes:
        problems += _over("spec.recovery.spareNodes", spares, bounds.max_spare_nodes)
    return _not_allowed(namespace, problems)


def without_live_edits(running: ParallelTrainingJobSpec, wanted: ParallelTrainingJobSpec) -> ParallelTrainingJobSpec:
    """`wanted` with the values of `running` in the fields that `live_excess` checks."""
    recovery = wanted.recovery.model_copy(update={"spare_nodes": running.recovery.spare_nodes})
    return wanted.model_copy(update={"priority": running.priority, "recovery": recovery})


def _size_field(spec: ParallelTrainingJobSpec) -> str:
    """The field that says how many replicas the job has if there are enough nodes."""
    return "spec.elastic.maxReplicas" if spec.elastic is not None and spec.elastic.fill else "spec.replicas"


def _not_allowed(namespace: str, problems: list[str]) -> str:
    if not problems:
        return ""
    return f"The administrator's policy for namespace {namespace} does not allow the job: {'; '.join(problems)}"


def quota_excess(plan: Plan, namespace: str, in_use: int, bounds: Bounds) -> str:
    """Why a job cannot start until other jobs of its namespace end. Empty if it can."""
    limit, gpus = bounds.max_gpus_in_use, plan.layout.world_size
    if limit is None or in_use + gpus <= limit:
        return ""
    return sentences(
        f"The administrator's policy allows the jobs of namespace {namespace} to use {counted(limit, 'GPU')}"
        f" (`maxGpusInUse`): {in_use} are in use, and the job needs {gpus}",
        "It starts when enough of them are free",
    )


def waiting_excess(namespace: str, bounds: Bounds) -> str:
    """Why a job that is behind too many others of its namespace is not considered yet."""
    limit = bounds.max_waiting_jobs or 0
    return sentences(
        f"The administrator's policy allows {counted(limit, 'job')} of namespace {namespace} to wait for nodes"
        f" (`maxWaitingJobs`), and {'as many are' if limit else 'none is'} ahead",
        "The job is considered when one of them starts or is deleted"
        if limit
        else "Only a job that fits at once starts",
    )


def _over(field: str, value: int, limit: int | None) -> list[str]:
    return [] if limit is None or value <= limit else [f"`{field}` is {value}: use at most {limit}"]


def _outside(spec: ParallelTrainingJobSpec, namespace: str, allowed: list[str] | None) -> list[str]:
    """Whether checkpoints are saved under a prefix of another tenant, or read from one."""
    checkpoint = spec.checkpoint
    if allowed is None or checkpoint is None:
        return []
    prefixes = [prefix.replace("{namespace}", namespace).rstrip("/") + "/" for prefix in allowed]
    below = f"use one below {', '.join(prefixes)}"
    named = (
        ("spec.checkpoint.uri", checkpoint.uri, "use `checkpoint.claimName`"),
        ("spec.checkpoint.resumeFrom", checkpoint.resume_uri, "use a directory on `checkpoint.claimName`"),
    )
    return [
        f"`{field}` is {uri}: {below if prefixes else instead}"
        for field, uri, instead in named
        if uri is not None and not _is_inside(uri, prefixes)
    ]


def _is_inside(uri: str, prefixes: list[str]) -> bool:
    inside = any((uri.rstrip("/") + "/").startswith(prefix) for prefix in prefixes)
    return inside and not any(part in (".", "..") for part in uri.split("/"))


def _under(field: str, value: int, limit: int) -> list[str]:
    return [] if value >= limit else [f"`{field}` is {value}: use at least {limit}"]
