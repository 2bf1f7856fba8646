"""Checks a job against the administrator's policy and settings before a decision is made about it.

The policy bounds what starts. A job that is about to start with a spec that exceeds a bound is rejected; an edit that
exceeds a bound is blocked, and the job keeps running. What runs already is never stopped.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.api.conditions import SUSPENDED, is_true
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright_operator.controller.observe import JobRejectedError
from meshwright_operator.decide import lifecycle
from meshwright_operator.decide.applied_spec import running_spec
from meshwright_operator.decide.conditions import BlockedEdit
from meshwright_operator.decide.observed import Observed, has_started
from meshwright_operator.scheduling.policy import Bounds
from meshwright_operator.scheduling.policy_admission import (
    POLICY_EXCEEDED,
    live_excess,
    size_excess,
    spec_excess,
    without_live_edits,
)

NO_AGENT_IMAGE = "NoAgentImage"
"""Reason of a job that wants an agent of which the operator has no image."""


def check_agent_image(observed: Observed, image: str) -> None:
    """Check that the operator has the image of the agent that the job wants.

    Raises:
        JobRejectedError: It has none, and the job is about to start.
    """
    if image or not observed.spec.runtime.injects_agent or has_started(observed.status):
        return
    if not lifecycle.finished(observed.status) and not observed.spec.suspend:
        raise JobRejectedError(
            NO_AGENT_IMAGE,
            "`spec.runtime.agent` is Injected, and the operator has no image of the agent: have the administrator set "
            "`agentImage.repository` of the chart, or use an image with the agent and remove the field",
        )


def check_policy(observed: Observed, namespace: str, bounds: Bounds) -> Observed:
    """The job as it is, or with its applied spec if the policy does not allow its edit.

    A finished job gets the policy's time to live.

    Raises:
        JobRejectedError: The policy does not allow the job to start.
    """
    if lifecycle.finished(observed.status):
        return replace(observed, default_ttl=bounds.ttl_seconds_after_finished)
    suspended = is_true(observed.status.conditions, SUSPENDED)
    if observed.spec.suspend and (suspended or not has_started(observed.status)):
        return observed  # checked when it resumes
    limits = [limit for limit in (bounds.max_gpus_per_job, bounds.max_gpus_in_use) if limit is not None]
    most, running = min(limits, default=None), observed.fallback
    fallback = replace(running, max_gpus=most) if running is not None else None
    observed = replace(observed, max_gpus=most, fallback=fallback)
    excess = spec_excess(observed.elastic or observed.spec, observed.plan, namespace, bounds)
    if not excess:
        return _bounded_growth(observed, namespace, bounds)
    if observed.fallback is not None:
        text = f"The edit cannot be applied: {excess}"
        blocked = replace(observed.fallback, blocked_edit=BlockedEdit(POLICY_EXCEEDED, text, retryable=False))
        return _bounded_edit(_bounded_growth(blocked, namespace, bounds), namespace, bounds)
    if has_started(observed.status) and not suspended:
        # Also while it is being suspended: an edit that is taken over now would count as running if the job resumes.
        return _bounded_edit(_bounded_growth(observed, namespace, bounds), namespace, bounds)
    raise JobRejectedError(POLICY_EXCEEDED, excess)


def _bounded_edit(observed: Observed, namespace: str, bounds: Bounds) -> Observed:
    """The job without an edit of its priority or spare nodes that exceeds a bound. Such an edit restarts nothing."""
    applied = running_spec(observed.status)
    excess = live_excess(applied.spec, observed.spec, namespace, bounds) if applied is not None else ""
    if applied is None or not excess:
        return observed
    blocked = BlockedEdit(POLICY_EXCEEDED, f"The edit cannot be applied: {excess}", retryable=False)
    elastic = without_live_edits(applied.spec, observed.elastic) if observed.elastic is not None else None
    spec = without_live_edits(applied.spec, observed.spec)
    return replace(observed, spec=spec, elastic=elastic, blocked_edit=observed.blocked_edit or blocked)


def _bounded_growth(observed: Observed, namespace: str, bounds: Bounds) -> Observed:
    """The job without sizes that an edit of its number of replicas wants, and that exceed a bound.

    Sizes up to the number that it wanted before are those of lost workers, which are replaced whatever the policy says.
    """
    elastic = observed.status.elastic
    if elastic is None or not elastic.wanted_replicas or not has_started(observed.status):
        return observed
    known = max(elastic.wanted_replicas, observed.plan.layout.data)
    larger = [plan for plan in observed.size_plans if plan.layout.data > known and not plan.replanned]
    if not larger:
        return observed
    largest = max(larger, key=lambda plan: plan.layout.data)
    excess = size_excess(observed.elastic or observed.spec, largest, namespace, bounds)
    if not excess:
        return observed
    blocked = BlockedEdit(POLICY_EXCEEDED, f"The edit cannot be applied: {excess}", retryable=False)
    left = [plan for plan in observed.size_plans if plan not in larger]
    elastic_spec = _wanting(observed.elastic, known) if observed.elastic is not None else None
    return replace(observed, size_plans=left, elastic=elastic_spec, blocked_edit=observed.blocked_edit or blocked)


def _wanting(spec: ParallelTrainingJobSpec, replicas: int) -> ParallelTrainingJobSpec:
    """The spec of an elastic job that wants no more replicas: status records what it wants when it grows."""
    elastic = spec.elastic
    if elastic is not None and elastic.max_replicas is not None:
        elastic = elastic.model_copy(update={"max_replicas": min(elastic.max_replicas, replicas)})
    return spec.model_copy(update={"replicas": min(spec.replicas, replicas), "elastic": elastic})
