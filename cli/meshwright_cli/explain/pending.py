"""Why a job waits: what it needs, what is free, what would fit now, and whom to free. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.api import conditions
from meshwright.api.labels import LABEL_JOB, LABEL_JOB_UID
from meshwright.api.objects import KubeObject
from meshwright.figures import counted
from meshwright.planner.cluster.inventory import MALFORMED, Inventory
from meshwright.planner.cluster.pod_resources import is_terminal, pod_request
from meshwright.planner.cost_model import cost_model_for
from meshwright.planner.errors import DoesNotFitError, PlanError
from meshwright.planner.placement import nodes_to_free
from meshwright.planner.plan import Plan, make_plans
from meshwright.planner.plan_and_place import place_best
from meshwright.rules.elastic import with_own_batch
from meshwright_cli.client.objects import Job
from meshwright_cli.explain.cluster import ClusterView
from meshwright_cli.text import plural

WAITS_FOR_TURN = ("NotPlacedYet", "Queued", "DoesNotFit", "Preempted")
"""Reasons of the condition `Placed` for which a job waits only for nodes and its turn."""
MAX_NAMED = 8
"""Largest number of nodes, jobs or pods that a line names."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A job, or a pod that belongs to no job, that uses GPUs of nodes to free."""

    name: str
    gpus: int
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({plural(self.gpus, 'GPU')}{f', {self.detail}' if self.detail else ''})"


def pending_facts(job: Job, cluster: ClusterView) -> list[tuple[str, str]]:
    """Names and values of an explanation. Empty if the user may not see the nodes and pods of the cluster."""
    try:
        spec = job.spec
    except ValueError as error:
        return [("Spec", f"invalid: {error}")]
    if not cluster.nodes or "list pods of all namespaces" in cluster.hidden:
        return []
    inventory = Inventory.from_objects(
        cluster.nodes,
        cluster.pods,
        gpu_resource=spec.workers.gpu_resource,
        node_selector=spec.workers.node_selector,
        tolerations=spec.workers.tolerations,
        channel=spec.has_channel,
        pods_joined=spec.joins_pods,
        without_job=job.uid,
        site=cluster.site,
    )
    try:
        plans = make_plans(spec, inventory)
    except PlanError as error:
        return [("Plan", str(error)), *_free(inventory)]
    return [
        ("Needs", _needs(plans[0])),
        *_free(inventory),
        *_fits(job, plans, inventory),
        *_whom_to_free(plans[0], inventory, cluster, spec.workers.gpu_resource),
        *_queue(job, cluster.jobs),
        *_excluded(inventory),
    ]


def _needs(plan: Plan) -> str:
    workers, size = plan.layout.world_size // plan.gpus_per_worker, plan.gpus_per_worker
    summary = plan.to_status().summary
    return f"{plural(workers, 'worker')} with {plural(size, 'GPU')} each, {workers * size} in total: {summary}"


def _free(inventory: Inventory) -> list[tuple[str, str]]:
    nodes = [node for node in inventory.usable if node.capacity.gpus]
    total = sum(node.capacity.gpus for node in nodes)
    free = [max(0, node.free.gpus) for node in nodes]
    largest = max(free, default=0)
    text = f"{sum(free)} of {plural(total, 'GPU')} on {plural(len(nodes), 'usable node')}"
    return [("Free", f"{text}, at most {largest} on one node" if nodes else text)]


def _fits(job: Job, plans: Sequence[Plan], inventory: Inventory) -> list[tuple[str, str]]:
    sized = with_own_batch(job.spec)
    try:
        place_best(plans, inventory, cost_model_for(sized, plans[0].architecture, inventory))
    except DoesNotFitError as error:
        fitting = error.replicas_that_fit
        now = f"`spec.replicas: {fitting}`, with `meshwright scale {job.name} {fitting}`" if fitting else "no replica"
        return [("Fits now", now)]
    placed = conditions.find(job.status.conditions, conditions.PLACED)
    if placed is not None and placed.reason not in WAITS_FOR_TURN:
        return [("Fits now", f"all workers, but the job waits for something else first: `{placed.reason}`, see above")]
    return [("Fits now", "all workers: the operator places the job at its turn")]


def _whom_to_free(plan: Plan, inventory: Inventory, cluster: ClusterView, gpu_resource: str) -> list[tuple[str, str]]:
    found = nodes_to_free(plan, inventory)
    if found is None:
        missing = plan.layout.world_size - sum(node.capacity.gpus for node in inventory.usable)
        too_small = f"the usable nodes are too small even when empty: {plural(missing, 'GPU')} missing"
        return [("Free up", too_small)] if missing > 0 else []
    names = ", ".join(found.nodes[:MAX_NAMED]) + _more(len(found.nodes))
    holders = holders_of(set(found.nodes), cluster, gpu_resource)
    who = ", ".join(str(holder) for holder in holders[:MAX_NAMED]) + _more(len(holders))
    return [("Free up", f"{names}, which {who} use{'s' if len(holders) == 1 else ''}")]


def holders_of(nodes: set[str], cluster: ClusterView, gpu_resource: str) -> list[Holder]:
    """Who uses GPUs of these nodes, the largest first."""
    gpus: Counter[tuple[str, str]] = Counter()
    jobs = {job.uid: job for job in cluster.jobs}
    for pod in cluster.pods:
        try:
            count = 0 if is_terminal(pod) else pod_request(pod, gpu_resource).gpus
            if not count or (pod["spec"].get("nodeName") or _pinned_node(pod)) not in nodes:
                continue
            gpus[_holder(pod)] += count
        except MALFORMED:
            continue
    return [Holder(name, count, _detail(jobs.get(uid))) for (name, uid), count in gpus.most_common()]


def _holder(pod: KubeObject) -> tuple[str, str]:
    """Name and uid of the job that a pod belongs to, or the pod's own name."""
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    if LABEL_JOB in labels:
        return f"job {metadata.get('namespace')}/{labels[LABEL_JOB]}", str(labels.get(LABEL_JOB_UID) or "")
    return f"pod {metadata.get('namespace')}/{metadata['name']}", ""


def _pinned_node(pod: KubeObject) -> str:
    """The node to which the operator has pinned a pod that is not bound yet."""
    required = ((pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    fields = [field for term in required.get("nodeSelectorTerms") or () for field in term.get("matchFields") or ()]
    return next((field["values"][0] for field in fields if field.get("key") == "metadata.name"), "")


def _detail(job: Job | None) -> str:
    if job is None:
        return ""
    spec = job.raw.get("spec") or {}
    parts = [f"priority {spec.get('priority') or 0}"]
    parts += ["preemptible"] if spec.get("preemptible") else []
    least = (spec.get("elastic") or {}).get("minReplicas")
    if spec.get("elastic") and job.status.replicas > (least or 1):
        parts.append(f"elastic: can shrink from {job.status.replicas} to {counted(least or 1, 'replica')}")
    return ", ".join(parts)


def _queue(job: Job, jobs: Sequence[Job]) -> list[tuple[str, str]]:
    """The jobs that wait only for nodes and their turn too, and come first."""

    def turn(one: Job) -> tuple[int, str]:
        return -int((one.raw.get("spec") or {}).get("priority") or 0), str(one.created)

    waiting = [one for one in jobs if one.uid != job.uid and _waits_for_turn(one)]
    ahead = sorted((one for one in waiting if turn(one) < turn(job)), key=turn)
    if not ahead:
        return []
    names = ", ".join(f"{one.namespace}/{one.name}" for one in ahead[:MAX_NAMED]) + _more(len(ahead))
    return [("Ahead", f"{names}: higher priority, or older")]


def waits_for_nodes(job: Job) -> bool:
    """Whether a job has no placement because it does not fit, or because of its turn."""
    placed = conditions.find(job.status.conditions, conditions.PLACED)
    return not job.finished and placed is not None and placed.status == "False"


def _waits_for_turn(job: Job) -> bool:
    placed = conditions.find(job.status.conditions, conditions.PLACED)
    return placed is not None and placed.reason in WAITS_FOR_TURN and waits_for_nodes(job)


def _excluded(inventory: Inventory) -> list[tuple[str, str]]:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for node, reason in sorted(inventory.unusable.items()):
        by_reason[reason].append(node)
    text = "; ".join(
        f"{', '.join(nodes[:MAX_NAMED])}{_more(len(nodes))} ({reason})" for reason, nodes in by_reason.items()
    )
    return [("Excluded", text)] if text else []


def _more(count: int) -> str:
    return f" and {count - MAX_NAMED} more" if count > MAX_NAMED else ""
