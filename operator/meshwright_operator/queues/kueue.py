"""Kueue at the level of a job: makes the Workload of a job that names a queue, follows it, and reports to it.

The operator does what Kueue's own integrations do. Kueue decides whether a job may run; the job has no pods before, and
gives its quota back only once it has none any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime

from meshwright.api import labels
from meshwright.api.conditions import COMPLETE, READY, find, is_true
from meshwright.api.objects import KubeObject
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cluster.inventory import MALFORMED
from meshwright.planner.cluster.pod_resources import pod_request
from meshwright_operator.decide import lifecycle, sizing
from meshwright_operator.decide.admission import Admission
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.observed import Observed
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.job_event import WARNING, JobEvent
from meshwright_operator.kube.paths import group_path
from meshwright_operator.manifests.owned_objects import owner_reference
from meshwright_operator.queues import workload_state as state
from meshwright_operator.queues.kueue_watch import FORBIDDEN, NOT_FOUND, KueueState, KueueWatch
from meshwright_operator.queues.workload_manifest import (
    DIGEST,
    GROUP,
    JOB_UID,
    POD_SET,
    SUSPENDED,
    Demand,
    Priority,
    annotations_of,
    spec_of,
    workload,
)
from meshwright_operator.text import counted
from meshwright_operator.timestamps import utc_now

FLAVOR_SECONDS = 60.0
"""For how long a resource flavor that was read is not read again."""
CONFLICT = 409
REFUSED = (400, 403, 422)
"""Codes with which the API server, a webhook or a quota refuses a Workload. The same request would be refused again."""
REFUSED_SECONDS = 60.0
"""For how long a change that was refused is not tried again."""
MAX_REFUSED = 1024
SCHEDULING = "scheduling.k8s.io"

log = logging.getLogger(__name__)


class QueueUnknownError(Exception):
    """It is not known yet what the job's queue says. The job is left as it is until then."""


class Kueue:
    """The queues of Kueue, as jobs see them."""

    def __init__(
        self, client: KubeClient, cache: Cache, watch: KueueWatch, now: Callable[[], datetime] = utc_now
    ) -> None:
        self._client = client
        self._cache = cache
        self._watch = watch
        self._now = now
        self._flavors: dict[str, tuple[float, KubeObject]] = {}
        self._refused: dict[str, tuple[float, str]] = {}
        """By uid of a job, when a change of its Workload was refused last, and why."""

    async def admission(self, job: KubeObject) -> Admission | None:
        """What the job's queue says. None for a job that names none.

        Raises:
            QueueUnknownError: Nobody knows it yet.
        """
        queue = queue_of(job)
        if not queue:
            await self._forget(job)
            return None
        known = self._watch.want()
        if known is KueueState.UNKNOWN:
            raise QueueUnknownError
        if known is not KueueState.WATCHED:
            return Admission(admitted=False, unavailable=True, message=_unavailable(queue, known))
        found = self._watch.of(job["metadata"]["namespace"], job["metadata"]["uid"])
        if found is None:
            return Admission(admitted=False, message=f"Waiting for queue {queue}")
        missing = ""
        if state.may_run(found):
            for name in state.flavors_of(found):
                missing = missing or await self._read_flavor(name)
        flavors = {name: flavor for name, (_, flavor) in self._flavors.items()}
        admission = state.admission_of(found, queue, flavors, self._cache.nodes, _gpus_per_worker(job))
        if not missing:
            return admission
        # Without the flavor, nobody knows on which nodes the quota is. Pods that run stay.
        return replace(admission, admitted=False, unavailable=True, message=f"Queue {queue} admitted the job {missing}")

    async def follow(
        self, key: JobKey, job: KubeObject, observed: Observed, post: Callable[[JobEvent], None] = lambda event: None
    ) -> Observed:
        """Makes the job's Workload, or brings it up to date. Returns the job as it may run now.

        A refused Workload keeps a job from starting. A refused change of one keeps it from nothing, and is an event.

        Raises:
            ApiError: A request failed.
            QueueUnknownError: The cluster does not serve Workloads as before.
        """
        try:
            return await self._follow(key, job, observed)
        except ApiError as error:
            admission = observed.admission
            if error.code not in REFUSED or admission is None:
                raise
            text = f"The API server rejected the Workload of queue {queue_of(job)}: {error.message}"
            if self._watch.of(key.namespace, observed.uid) is None:
                return replace(observed, admission=Admission(admitted=False, unavailable=True, message=text))
            self._note_refusal(observed.uid, text, post)
            waits = not (admission.admitted or admission.evicted or admission.unavailable)
            return replace(observed, admission=replace(admission, message=text)) if waits else observed

    async def _follow(self, key: JobKey, job: KubeObject, observed: Observed) -> Observed:
        if not self._is_followed(observed.admission) or lifecycle.finished(observed.status):
            return observed
        found = self._watch.of(key.namespace, observed.uid)
        if _prebuilt(job):
            return await self._follow_prebuilt(key, job, observed, found)
        demand = demand_of(job, observed)
        if found is None:
            taken = await self._create(key, job, observed, demand)
            return replace(observed, admission=Admission(admitted=False, message=taken)) if taken else observed
        if found["metadata"].get("deletionTimestamp"):
            return observed
        if not _covers(found, demand, observed) or state.is_true(found, state.FINISHED):
            return await self._renew(job, observed, found, demand)
        if self._may_update(observed.uid):
            await self._update(job, observed, found)
            self._refused.pop(observed.uid, None)
        return observed

    def _may_update(self, uid: str) -> bool:
        """Whether no change of the job's Workload was refused a moment ago."""
        known = self._refused.get(uid)
        return known is None or time.monotonic() - known[0] >= REFUSED_SECONDS

    def _note_refusal(self, uid: str, text: str, post: Callable[[JobEvent], None]) -> None:
        known = self._refused.pop(uid, None)
        if known is None or known[1] != text:
            post(JobEvent("RequestRejected", text, WARNING))
        while len(self._refused) >= MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._refused[uid] = time.monotonic(), text

    async def settle(self, namespace: str, draft: Decision) -> None:
        """Reports to the Workload what has become of the job, once that is written to the job's status.

        Raises:
            ApiError: A request failed.
        """
        observed = draft.observed
        if not self._is_followed(observed.admission):
            return
        found = self._watch.of(namespace, observed.uid)
        if found is None or state.is_true(found, state.FINISHED):
            return
        now = self._now()
        if lifecycle.finished(draft.status):
            reason = "Succeeded" if is_true(draft.status.conditions, COMPLETE) else "Failed"
            ready = find(draft.status.conditions, READY)
            text = ready.message if ready is not None else ""
            end = state.new_condition(found, state.FINISHED, True, reason, text, now)
            await self._patch_status(found, {"conditions": state.with_conditions(found, end)})
        elif not state.may_run(found):
            empty = not observed.live_pods and not draft.create
            if empty and state.is_reserved(found) and state.is_true(found, state.EVICTED):
                await self._patch_status(found, state.released(found, now))
        else:
            await self._report_pods(found, draft, now)

    async def hand_over(self, key: JobKey, job: KubeObject, demand: Callable[[], Demand]) -> None:
        """Makes the Workload of a job that MultiKueue sends to another cluster. It does all else.

        Raises:
            ApiError: A request failed.
            QueueUnknownError: It is not known yet whether there is one.
        """
        known = self._watch.want()
        if known is KueueState.UNKNOWN:
            raise QueueUnknownError
        uid = job["metadata"]["uid"]
        if known is not KueueState.WATCHED or self._watch.of(key.namespace, uid) is not None:
            return
        asked = demand()
        await self._post(key, uid, asked, await self._priority(job, asked.spec), suspended=asked.spec.suspend)

    # The parts of following a job.

    def _is_followed(self, admission: Admission | None) -> bool:
        """Whether the job has a queue, and its Workload can be read."""
        return admission is not None and (not admission.unavailable or self._watch.want() is KueueState.WATCHED)

    async def _forget(self, job: KubeObject) -> None:
        """Deletes the Workload of a job that names no queue any more."""
        found = self._watch.of(job["metadata"]["namespace"], job["metadata"]["uid"])
        if found is not None and not found["metadata"].get("deletionTimestamp"):
            await self._delete(found)

    async def _create(self, key: JobKey, job: KubeObject, observed: Observed, demand: Demand) -> str:
        priority = await self._priority(job, observed.spec)
        return await self._post(key, observed.uid, demand, priority, suspended=observed.spec.suspend)

    async def _post(self, key: JobKey, uid: str, demand: Demand, priority: Priority, *, suspended: bool) -> str:
        """Makes the Workload. Returns why it cannot be made; empty if it is there.

        Raises:
            QueueUnknownError: The cluster does not serve Workloads, or not in this version.
        """
        body = workload(key.name, key.namespace, uid, demand, priority, self._watch.version, suspended=suspended)
        try:
            self._watch.put(await self._client.create(self._watch.path(key.namespace), body))
        except ApiError as error:
            if error.code == NOT_FOUND:
                self._watch.look_again()
                raise QueueUnknownError from None
            if error.code != CONFLICT:
                raise
            name = body["metadata"]["name"]
            self._watch.put(await self._client.get(self._watch.path(key.namespace, name)))
            if self._watch.of(key.namespace, uid) is None:
                return f"Workload {name} exists and does not belong to this job. Delete it"
        return ""

    async def _renew(self, job: KubeObject, observed: Observed, found: KubeObject, demand: Demand) -> Observed:
        """The job needs another quota than its Workload asks for."""
        if not state.is_reserved(found) and not state.is_true(found, state.FINISHED):
            priority = await self._priority(job, observed.spec)
            spec = spec_of(demand, priority, self._watch.version)
            await self._patch(found, {"metadata": {"annotations": annotations_of(demand)}, "spec": spec})
            return observed
        text = "The job needs another quota than it has. It gives it back, and waits for the other one"
        if state.is_true(found, state.FINISHED):
            text = state.waiting_message(found, demand.queue)
        waiting = Admission(admitted=False, message=text)
        if observed.live_pods:
            # What runs is stopped as it is: the edit takes effect when there is quota for it.
            return replace(observed.fallback or observed, admission=waiting)
        await self._delete(found)
        return replace(observed, admission=waiting)

    async def _update(self, job: KubeObject, observed: Observed, found: KubeObject) -> None:
        """Brings what may change at any time up to date: whether the Workload is active, and its priority."""
        spec, annotations = found.get("spec") or {}, found["metadata"].get("annotations") or {}
        patch: KubeObject = {}
        active = spec.get("active", True)
        if observed.spec.suspend and active:
            patch = {"metadata": {"annotations": {SUSPENDED: "true"}}, "spec": {"active": False}}
        elif not observed.spec.suspend and not active and SUSPENDED in annotations:
            patch = {"metadata": {"annotations": {SUSPENDED: None}}, "spec": {"active": True}}
        wanted = (await self._priority(job, observed.spec)).fields(self._watch.version)
        if any(spec.get(name) != value for name, value in wanted.items()):
            patch["spec"] = {**patch.get("spec", {}), **wanted}
        if patch:
            await self._patch(found, patch)

    async def _follow_prebuilt(
        self, key: JobKey, job: KubeObject, observed: Observed, found: KubeObject | None
    ) -> Observed:
        """A job that MultiKueue has sent here: its Workload is there, and becomes the job's own."""
        name, demand = _prebuilt(job), demand_of(job, observed)
        if found is not None:
            if not (short := _shortage(found, demand)):
                return observed
            text = f"Workload {name} {short}: it is not that of this job"
            return replace(observed, admission=Admission(admitted=False, message=text))
        waiting = replace(observed, admission=Admission(admitted=False, message=f"Waiting for Workload {name}"))
        try:
            there = await self._client.get(self._watch.path(key.namespace, name))
        except ApiError as error:
            if error.code != NOT_FOUND:
                raise
            return waiting
        if text := _why_not_of(there, key, observed.uid, demand):
            return replace(observed, admission=Admission(admitted=False, message=f"Workload {name} {text}"))
        metadata = {
            "labels": {JOB_UID: observed.uid, labels.LABEL_JOB_UID: observed.uid, labels.LABEL_JOB: key.name},
            "ownerReferences": [owner_reference(key.name, observed.uid)],
        }
        await self._patch(there, {"metadata": metadata})
        return waiting

    async def _report_pods(self, found: KubeObject, draft: Decision, now: datetime) -> None:
        """Reports whether all ranks train, and gives back the quota of pods that the job does not have any more."""
        changes: KubeObject = {}
        ready = is_true(draft.status.conditions, READY)
        if (condition := state.pods_ready(found, ready, now)) is not None:
            changes["conditions"] = state.with_conditions(found, condition)
        spare = _reclaimable(draft.observed)
        if spare > state.reclaimed(found):
            name = str(state.pod_set_of(found).get("name") or POD_SET)
            changes["reclaimablePods"] = [{"name": name, "count": spare}]
        if changes:
            await self._patch_status(found, changes)

    # Requests.

    async def _delete(self, found: KubeObject) -> None:
        path = self._watch.path(found["metadata"]["namespace"], found["metadata"]["name"])
        await self._client.delete(path, found["metadata"]["uid"])
        self._watch.remove(found)

    async def _patch(self, found: KubeObject, body: KubeObject) -> None:
        metadata = {**body.get("metadata", {}), "resourceVersion": found["metadata"]["resourceVersion"]}
        path = self._watch.path(found["metadata"]["namespace"], found["metadata"]["name"])
        await self._write(path, {**body, "metadata": metadata})

    async def _patch_status(self, found: KubeObject, status: KubeObject) -> None:
        metadata = {"resourceVersion": found["metadata"]["resourceVersion"]}
        path = self._watch.path(found["metadata"]["namespace"], found["metadata"]["name"])
        await self._write(f"{path}/status", {"metadata": metadata, "status": status})

    async def _write(self, path: str, body: KubeObject) -> None:
        try:
            self._watch.put(await self._client.merge_patch(path, body))
        except ApiError as error:
            if error.code == CONFLICT:
                # The watch brings what has changed, which queues the job. Without one, this does.
                self._watch.put(await self._client.get(path.removesuffix("/status")))
            elif error.code != NOT_FOUND:
                raise

    async def _read_flavor(self, name: str) -> str:
        """Read a resource flavor. Return why it cannot be used, and what to do; empty if it can.

        Raises:
            ApiError: The API server does not answer, and the flavor has never been read.
        """
        known = self._flavors.get(name)
        if known is not None and time.monotonic() - known[0] < FLAVOR_SECONDS:
            return ""
        try:
            flavor = await self._client.get(group_path(GROUP, self._watch.version, None, "resourceflavors", name))
        except ApiError as error:
            if error.code == NOT_FOUND:
                return (
                    f"with ResourceFlavor {name}, which does not exist. Create it, or remove it from the ClusterQueue"
                )
            if error.code == FORBIDDEN:
                return (
                    f"with ResourceFlavor {name}, which the operator may not read. Set `queues.kueue.enabled` in the"
                    " values of the operator's chart"
                )
            if known is None:
                raise
            return ""
        self._flavors[name] = time.monotonic(), flavor
        return ""

    async def _priority(self, job: KubeObject, spec: ParallelTrainingJobSpec) -> Priority:
        """The priority of the Workload: of its class, of the pods' class, or `spec.priority`."""
        if name := _labels(job).get(labels.KUEUE_PRIORITY):
            path = group_path(GROUP, self._watch.version, None, "workloadpriorityclasses", name)
            return await self._class_priority(path, GROUP, name, spec.priority)
        if name := spec.priority_class_name:
            path = group_path(SCHEDULING, "v1", None, "priorityclasses", name)
            return await self._class_priority(path, SCHEDULING, name, spec.priority)
        return Priority(spec.priority)

    async def _class_priority(self, path: str, group: str, name: str, default: int) -> Priority:
        known = self._flavors.get(path)
        if known is None or time.monotonic() - known[0] >= FLAVOR_SECONDS:
            try:
                known = self._flavors[path] = time.monotonic(), await self._client.get(path)
            except ApiError as error:
                if error.code not in (NOT_FOUND, FORBIDDEN):
                    raise
                log.info("priority class cannot be read", extra={"class": name, "error": str(error)})
                return Priority(default)
        return Priority(int(known[1].get("value") or 0), group, name)


def queue_of(job: KubeObject) -> str:
    """The queue that the job names; empty if it names none."""
    return str(_labels(job).get(labels.KUEUE_QUEUE) or "")


def demand_of(job: KubeObject, observed: Observed) -> Demand:
    """What the job asks its queue for: at its full size, if it is elastic."""
    layout, per_worker = observed.plan.layout, observed.plan.gpus_per_worker
    per_replica = layout.world_size // layout.data
    workers, least = len(observed.plan.workers), None
    if observed.elastic is not None:
        if (full := observed.full_plan) is not None:
            per_replica = full.tensor * full.pipeline * full.context
        workers = -(-sizing.wanted(observed) * per_replica // per_worker)
        least = max(1, -(-sizing.elastic_of(observed).min_replicas * per_replica // per_worker))
    spec = observed.elastic or observed.spec
    profile = observed.profile.profile if observed.profile is not None else None
    return Demand(queue_of(job), workers, least, per_replica, spec, _max_seconds(job), profile)


def _covers(found: KubeObject, demand: Demand, observed: Observed) -> bool:
    """Whether the Workload asks for what the job needs. Fewer workers of an elastic job need no other quota."""
    digest, _, shape = str((found["metadata"].get("annotations") or {}).get(DIGEST, "")).partition(".")
    reserved, applied = state.is_reserved(found), observed.profile
    demands = [demand]
    if reserved and applied is not None and applied.record == observed.status.applied_profile:
        # Earlier builds did not ask for what the containers of a profile request. A job that runs keeps its quota.
        demands.append(replace(demand, profile=None))
    if any(digest == one.digest for one in demands):
        return True
    count = int(state.pod_set_of(found).get("count") or 0)
    same_pods = reserved and any(shape == one.shape for one in demands)
    return demand.least is not None and same_pods and demand.workers <= count


def _why_not_of(there: KubeObject, key: JobKey, uid: str, demand: Demand) -> str:
    """Why a job may not take a Workload that was there before it. Empty if it may.

    MultiKueue sends a Workload without its owner, but with the labels of the operator that made it.
    """
    owners = [one for one in there["metadata"].get("ownerReferences") or () if one.get("controller")]
    if any(one.get("uid") != uid for one in owners):
        return f"belongs to {owners[0].get('kind')} {owners[0].get('name')}, and not to this job"
    if (other := _labels(there).get(labels.LABEL_JOB, key.name)) != key.name:
        return f"came with job {other}, and not with this one"
    short = _shortage(there, demand)
    return f"{short}: it is not that of this job" if short else ""


def _shortage(found: KubeObject, demand: Demand) -> str:
    """How a Workload that somebody else made asks for less than the job needs, so that its quota is not enough."""
    pods = state.pod_set_of(found)
    count, needed = int(pods.get("count") or 0), demand.workers if demand.least is None else demand.least
    if count < needed:
        return f"asks for {counted(count, 'pod')}, and the job needs {needed}"
    workers = demand.spec.workers
    try:
        gpus = pod_request({"spec": (pods.get("template") or {}).get("spec") or {}}, workers.gpu_resource).gpus
    except MALFORMED:
        gpus = 0
    if gpus < workers.gpus_per_worker and not workers.resource_claims:
        return f"asks for {counted(gpus, 'GPU')} per pod, and the job needs {workers.gpus_per_worker}"
    return ""


def _reclaimable(observed: Observed) -> int:
    """How many of the admitted workers an elastic job does not need, whatever becomes of its nodes."""
    admission = observed.admission
    if admission is None or admission.workers is None or observed.elastic is None:
        return 0
    layout, per_worker = observed.plan.layout, observed.plan.gpus_per_worker
    per_replica = layout.world_size // layout.data
    replicas = min(sizing.wanted(observed), admission.replicas or 0)
    return max(0, admission.workers - -(-replicas * per_replica // per_worker))


def _max_seconds(job: KubeObject) -> int | None:
    text = str(_labels(job).get(labels.KUEUE_MAX_SECONDS) or "")
    return int(text) if text.isdigit() and int(text) else None


def _gpus_per_worker(job: KubeObject) -> int:
    workers = (job.get("spec") or {}).get("workers") or {}
    count = workers.get("gpusPerWorker", 8)
    return count if isinstance(count, int) and count > 0 else 8


def _labels(job: KubeObject) -> Mapping[str, str]:
    return job["metadata"].get("labels") or {}


def _prebuilt(job: KubeObject) -> str:
    """The Workload with which MultiKueue has sent the job here; empty for a job of this cluster.

    Kueue names it in an annotation since 0.18, and in a label before.
    """
    annotations = job["metadata"].get("annotations") or {}
    return str(annotations.get(labels.KUEUE_PREBUILT) or _labels(job).get(labels.KUEUE_PREBUILT) or "")


def _unavailable(queue: str, known: KueueState) -> str:
    named = f"The label `{labels.KUEUE_QUEUE}` names queue {queue}"
    if known is KueueState.DENIED:
        return (
            f"{named}, and the operator may not use Kueue. Set `queues.kueue.enabled` in the values of the operator's"
            " chart, or remove the label"
        )
    if known is KueueState.OFF:
        return (
            f"{named}, and the operator's feature gate KueueQueues is off. Set `featureGates.KueueQueues: true` in the"
            " values of its chart, or remove the label"
        )
    return f"{named}, and the cluster does not have Kueue. Install it, or remove the label"
