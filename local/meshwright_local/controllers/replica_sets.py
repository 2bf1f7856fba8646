"""Replica sets: the desired number of pods of one template, and the counts of ready and available pods."""

from __future__ import annotations

import datetime
import re
from typing import Any

from meshwright.api.objects import KubeObject
from meshwright_local.controllers.base import Controller, Key, controller_of, owner_key
from meshwright_local.kube import timestamps
from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.reflector import Informers
from meshwright_local.kube.resources import PODS, REPLICA_SETS, has_ended, key_of

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""An annotation of pods: those with less are deleted first."""


class ReplicaSetController(Controller):
    """Creates missing pods and deletes surplus ones. It lists pods from the server, because a cache would lag."""

    def __init__(self, informers: Informers) -> None:
        super().__init__(informers, "replicaset-controller")
        self.watch_resource(REPLICA_SETS)
        self.watch_resource(PODS, lambda change: owner_key(change, "ReplicaSet"))

    async def reconcile(self, key: Key) -> float | None:
        """Scale one set to its number of replicas. Return the seconds until the next pod becomes available."""
        item = await self.client.find(REPLICA_SETS, key[1], key[0])
        if item is None or item["metadata"].get("deletionTimestamp"):
            return None
        pods = [pod for pod in await own_pods(self.client, item) if not pod["metadata"].get("deletionTimestamp")]
        wanted: int = item["spec"].get("replicas", 1)
        for _ in range(wanted - len(pods)):
            pod = await self.client.create(PODS, _pod_of(item), key[0])
            self.events.emit(item, "Normal", "SuccessfulCreate", f"Created pod: {pod['metadata']['name']}")
        for pod in sorted(pods, key=_worth)[: max(0, len(pods) - wanted)]:
            await self.client.delete(PODS, pod["metadata"]["name"], key[0], uid=pod["metadata"]["uid"])
            self.events.emit(item, "Normal", "SuccessfulDelete", f"Deleted pod: {pod['metadata']['name']}")
        return await self._update_status(item, pods)

    async def _update_status(self, item: KubeObject, pods: list[KubeObject]) -> float | None:
        patience = item["spec"].get("minReadySeconds") or 0
        ready = [seconds for pod in pods if (seconds := ready_for(pod)) is not None]
        status = {
            "replicas": len(pods),
            "fullyLabeledReplicas": len(pods),
            "readyReplicas": len(ready),
            "availableReplicas": sum(seconds >= patience for seconds in ready),
            "observedGeneration": item["metadata"]["generation"],
        }
        if any((item.get("status") or {}).get(name, 0) != value for name, value in status.items()):
            space, name = key_of(item)
            await self.client.patch(REPLICA_SETS, name, {"status": status}, space, subresource="status")
        return min((patience - seconds for seconds in ready if seconds < patience), default=None)


def _worth(pod: KubeObject) -> tuple[Any, ...]:
    """Return what decides which pods are deleted first: the one that has done least, and of equal ones the youngest."""
    metadata, ready = pod["metadata"], ready_for(pod)
    running = (pod.get("status") or {}).get("phase") == "Running"
    given = str((metadata.get("annotations") or {}).get(DELETION_COST) or "0")
    cost = int(given) if re.fullmatch(r"-?\d{1,10}", given) else 0
    return bool(pod["spec"].get("nodeName")), running, ready is not None, cost, ready or 0.0, _age(metadata)


def _age(metadata: KubeObject) -> float:
    created = timestamps.parse(metadata["creationTimestamp"])
    return (datetime.datetime.now(datetime.UTC) - created).total_seconds()


async def own_pods(client: ApiClient, item: KubeObject) -> list[KubeObject]:
    """Return a replica set's pods that have not ended, including those being deleted."""
    selector = ",".join(f"{key}={value}" for key, value in (item["spec"]["selector"].get("matchLabels") or {}).items())
    listed = (await client.list(PODS, item["metadata"]["namespace"], label_selector=selector or None)).items
    uid = item["metadata"]["uid"]
    return [pod for pod in listed if (controller_of(pod) or {}).get("uid") == uid and not has_ended(pod)]


def ready_for(pod: KubeObject) -> float | None:
    """Return the seconds since a pod became ready; None if it is not ready."""
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition["type"] == "Ready" and condition["status"] == "True":
            since = timestamps.parse(condition["lastTransitionTime"])
            return max(0.0, (datetime.datetime.now(datetime.UTC) - since).total_seconds())
    return None


def controlled_by(owner: KubeObject, kind: str) -> list[KubeObject]:
    """Return the ownerReferences for an object that a controller creates."""
    reference = {"apiVersion": "apps/v1", "kind": kind, "controller": True, "blockOwnerDeletion": True}
    return [{**reference, "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}]


def _pod_of(item: KubeObject) -> KubeObject:
    template = item["spec"]["template"]
    metadata = template.get("metadata") or {}
    return {
        "metadata": {
            "generateName": f"{item['metadata']['name']}-",
            "labels": metadata.get("labels") or {},
            "annotations": metadata.get("annotations") or {},
            "ownerReferences": controlled_by(item, "ReplicaSet"),
        },
        "spec": template["spec"],
    }
