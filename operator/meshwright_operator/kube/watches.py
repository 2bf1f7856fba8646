"""What the operator watches, and what an event does: it updates the cache and queues its job's key.

Handlers never write to the cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from meshwright.api.labels import LABEL_JOB
from meshwright.api.objects import KubeObject
from meshwright_operator.kube.cache import Cache, JobKey, key_of
from meshwright_operator.kube.informer import Watched
from meshwright_operator.kube.paths import core_path, pods_path
from meshwright_operator.kube.pod_info import read_pod
from meshwright_operator.kube.resync import Resync
from meshwright_operator.kube.workqueue import WorkQueue
from meshwright_operator.operator_metrics import OperatorMetrics

log = logging.getLogger(__name__)

DELETED = "DELETED"
SECONDS_PER_POD = 0.00025
"""How long to collect changes of a job's pods before it is reconciled: 0.25 s for a thousand pods."""


class EventHandlers:
    """Handles the events of watches."""

    def __init__(self, cache: Cache, queue: WorkQueue[JobKey], metrics: OperatorMetrics) -> None:
        self._cache = cache
        self._queue = queue
        self._metrics = metrics

    def job(self, event: KubeObject) -> None:
        """A job was added, changed or deleted."""
        obj = event["object"]
        self._metrics.last_event.labels("jobs").set_to_current_time()
        if event["type"] == DELETED:
            self._cache.remove_job(obj)
        else:
            self._cache.put_job(obj)
        self._queue.add(key_of(obj))

    def pod(self, event: KubeObject) -> None:
        """A pod with the job label was added, changed or deleted."""
        self._metrics.last_event.labels("pods").set_to_current_time()
        if event["type"] != DELETED and self._cache.has_this_pod(event["object"]):
            # The event repeats what the operator wrote or listed itself, as thousands do after every start.
            return
        pod = read_pod(event["object"])
        if pod is None:
            update = self._cache.remove_deleted_pod if event["type"] == DELETED else self._cache.put_unowned_pod
            if (job := update(event["object"])) is not None:
                self._queue.add(job)
            return
        if event["type"] == DELETED:
            self._cache.remove_pod(pod)
        elif not self._cache.put_pod(pod):
            return
        # The larger a gang, the longer its reconcile takes, and the more of its pods change at the same time.
        key = JobKey(pod.namespace, pod.job)
        self._queue.add_after(key, self._cache.count(key) * SECONDS_PER_POD)

    def node(self, event: KubeObject) -> None:
        """A node was added, changed or deleted."""
        self._metrics.last_event.labels("nodes").set_to_current_time()
        obj = event["object"]
        changed = self._cache.remove_deleted_node(obj) if event["type"] == DELETED else self._cache.put_node(obj)
        if changed:
            self._requeue_unplanned_jobs()
            for key in self._cache.jobs_on(obj["metadata"]["name"]):
                self._queue.add(key)

    def _requeue_unplanned_jobs(self) -> None:
        """Queue the jobs that other nodes may help. The placer wakes the jobs that wait for free nodes."""
        for key in self._cache.jobs_awaiting_layout():
            self._queue.add(key)


def watched_collections(handlers: EventHandlers, resync: Resync, namespaces: Sequence[str]) -> list[Watched]:
    """Nodes, and the worker pods of these namespaces, or of all if there are none. kopf watches jobs (`job_watch`)."""
    nodes = core_path(None, "nodes")
    found = [
        Watched(
            path=nodes,
            listed_version=partial(resync.listed_version, nodes),
            relist=resync.nodes,
            apply=handlers.node,
        )
    ]
    for namespace in namespaces or (None,):
        pods = pods_path(namespace)
        found.append(
            Watched(
                path=pods,
                query={"labelSelector": LABEL_JOB},
                listed_version=partial(resync.listed_version, pods),
                relist=partial(resync.pods, namespace),
                apply=handlers.pod,
            )
        )
    return found
