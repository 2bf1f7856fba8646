"""Deployments, to the extent that an operator's chart needs them: one replica set for each template.

`kubectl rollout status`, `kubectl rollout undo` and `helm --wait` read what this controller writes: the replica set of
the current template with its revision, the counts, `observedGeneration`, and the conditions Available and Progressing.
RollingUpdate respects maxSurge and maxUnavailable; Recreate waits until the old pods are gone.
"""

from __future__ import annotations

import datetime
import hashlib
import math

import orjson

from meshwright.api.objects import KubeObject
from meshwright_local.controllers.base import Controller, Key, controller_of, owner_key
from meshwright_local.controllers.replica_sets import controlled_by, own_pods
from meshwright_local.kube import timestamps
from meshwright_local.kube.reflector import Informers
from meshwright_local.kube.resources import DEPLOYMENTS, REPLICA_SETS, key_of

HASH_LABEL = "pod-template-hash"
REVISION = "deployment.kubernetes.io/revision"

_RETRY_SECONDS = 0.2


class DeploymentController(Controller):
    """Scales the replica sets of a deployment, one per template, and reports the progress."""

    def __init__(self, informers: Informers) -> None:
        super().__init__(informers, "deployment-controller")
        self.watch_resource(DEPLOYMENTS)
        self.watch_resource(REPLICA_SETS, lambda change: owner_key(change, "Deployment"))

    async def reconcile(self, key: Key) -> float | None:
        """Scale one deployment's replica sets toward its spec. Return the seconds until its progress deadline."""
        item = await self.client.find(DEPLOYMENTS, key[1], key[0])
        if item is None or item["metadata"].get("deletionTimestamp"):
            return None
        listed = (await self.client.list(REPLICA_SETS, key[0])).items
        mine = [entry for entry in listed if (controller_of(entry) or {}).get("uid") == item["metadata"]["uid"]]
        new = next((entry for entry in mine if _template(entry) == _template(item)), None)
        old = sorted((entry for entry in mine if entry is not new), key=_revision)
        waits = False
        if not item["spec"].get("paused"):
            new = await self._current(item, new, old)
            recreate = (item["spec"].get("strategy") or {}).get("type") == "Recreate"
            waits = not await (self._recreate if recreate else self._roll)(item, new, old)
            over = [entry for entry in old if not _count(entry, "replicas") and not entry["spec"]["replicas"]]
            for entry in over[: max(0, len(over) - item["spec"].get("revisionHistoryLimit", 10))]:
                await self.client.delete(REPLICA_SETS, entry["metadata"]["name"], key[0], uid=entry["metadata"]["uid"])
        else:
            await self._scale_paused(item, [*old, new] if new else old)
        late = await self._update_status(item, new, old)
        # Replica sets do not report when their last pod is really gone.
        return _RETRY_SECONDS if waits else late

    async def _current(self, item: KubeObject, new: KubeObject | None, old: list[KubeObject]) -> KubeObject:
        """Return the replica set of the deployment's template, with the highest revision. Create it if needed."""
        space, name = key_of(item)
        revision = max((_revision(entry) + 1 for entry in old), default=1)
        marked = {"metadata": {"annotations": {REVISION: str(revision)}}}
        if new is None:
            new = await self.client.create(REPLICA_SETS, _replica_set(item, revision), space)
        elif _revision(new) < revision:
            new = await self.client.patch(REPLICA_SETS, new["metadata"]["name"], marked, space)
        if _revision(item) < revision:
            await self.client.patch(DEPLOYMENTS, name, marked, space)
        return new

    async def _recreate(self, item: KubeObject, new: KubeObject, old: list[KubeObject]) -> bool:
        for entry in old:
            await self._set_replicas(item, entry, 0)
        if any([await own_pods(self.client, entry) for entry in old]):
            return False
        await self._set_replicas(item, new, _desired_replicas(item))
        return True

    async def _roll(self, item: KubeObject, new: KubeObject, old: list[KubeObject]) -> bool:
        wanted, now = _desired_replicas(item), new["spec"]["replicas"]
        surge, unavailable = _limits(item)
        room = wanted + surge - sum(entry["spec"]["replicas"] for entry in old)
        await self._set_replicas(item, new, min(wanted, max(now, room)))
        # The count may still include pods that the set is about to delete.
        available = [min(entry["spec"]["replicas"], _count(entry, "availableReplicas")) for entry in (new, *old)]
        spare = max(0, sum(available) - (wanted - unavailable))
        for entry, serving in zip(old, available[1:], strict=True):
            # Pods that are not available can be deleted at once; of the others, as many as are not needed.
            needed = max(0, serving - spare)
            spare -= serving - needed
            await self._set_replicas(item, entry, needed)
        return True

    async def _scale_paused(self, item: KubeObject, every: list[KubeObject]) -> None:
        """Scale a paused deployment, unless several of its replica sets have pods: then a rollout waits."""
        active = [entry for entry in every if entry["spec"]["replicas"]] or every[-1:]
        if len(active) == 1:
            await self._set_replicas(item, active[0], _desired_replicas(item))

    async def _set_replicas(self, item: KubeObject, entry: KubeObject, count: int) -> None:
        before = entry["spec"]["replicas"]
        if before != count:
            space, name = key_of(entry)
            await self.client.patch(REPLICA_SETS, name, {"spec": {"replicas": count}}, space)
            text = f"Scaled {'up' if before < count else 'down'} replica set {name} from {before} to {count}"
            self.events.emit(item, "Normal", "ScalingReplicaSet", text)

    async def _update_status(self, item: KubeObject, new: KubeObject | None, old: list[KubeObject]) -> float | None:
        """Write the status if it changed. Return the seconds until the progress deadline; None if done or exceeded."""
        (space, name), before, wanted = key_of(item), item.get("status") or {}, _desired_replicas(item)
        every = [*old, new] if new else old
        status = {
            field: sum(_count(entry, field) for entry in every)
            for field in ("replicas", "readyReplicas", "availableReplicas")
        }
        status["updatedReplicas"] = _count(new, "replicas") if new else 0
        status["unavailableReplicas"] = max(0, wanted - status["availableReplicas"])
        status["observedGeneration"] = item["metadata"]["generation"]
        moved = any((before.get(field) or 0) != value for field, value in status.items())
        enough = status["availableReplicas"] >= wanted - _limits(item)[1]
        done = status["updatedReplicas"] == status["replicas"] == status["availableReplicas"] == wanted
        left = item["spec"].get("progressDeadlineSeconds", 600) - _since(before, "Progressing")
        late = not moved and (left <= 0 or ("Progressing", "False") in _states(before))
        progress = "NewReplicaSetAvailable" if done else "ProgressDeadlineExceeded" if late else "ReplicaSetUpdated"
        conditions = [_available(before, enough=enough), _progressing(before, item, new, progress, renew=moved)]
        if moved or conditions != before.get("conditions"):
            body = {"status": {**status, "conditions": conditions}}
            await self.client.patch(DEPLOYMENTS, name, body, space, subresource="status")
        return None if done or late else max(1.0, left)


def _replica_set(item: KubeObject, revision: int) -> KubeObject:
    """Return the replica set of a deployment's template. Its name is a hash of the template, so it is unique."""
    template = _template(item)
    digest = hashlib.sha256(orjson.dumps(template, option=orjson.OPT_SORT_KEYS)).hexdigest()[:10]
    labels = {**((template.get("metadata") or {}).get("labels") or {}), HASH_LABEL: digest}
    selector = item["spec"]["selector"]
    matched = {**selector, "matchLabels": {**(selector.get("matchLabels") or {}), HASH_LABEL: digest}}
    return {
        "metadata": {
            "name": f"{item['metadata']['name']}-{digest}",
            "labels": labels,
            "annotations": {REVISION: str(revision)},
            "ownerReferences": controlled_by(item, "Deployment"),
        },
        "spec": {
            "replicas": 0,
            "minReadySeconds": item["spec"].get("minReadySeconds") or 0,
            "selector": matched,
            "template": {**template, "metadata": {**(template.get("metadata") or {}), "labels": labels}},
        },
    }


def _template(item: KubeObject) -> KubeObject:
    """Return the pod template without the label that distinguishes replica sets."""
    template: KubeObject = item["spec"]["template"]
    metadata = dict(template.get("metadata") or {})
    labels = metadata.get("labels") or {}
    metadata["labels"] = {name: value for name, value in labels.items() if name != HASH_LABEL}
    return {**template, "metadata": metadata}


def _desired_replicas(item: KubeObject) -> int:
    return int(item["spec"].get("replicas", 1))


def _count(entry: KubeObject, field: str) -> int:
    return int((entry.get("status") or {}).get(field) or 0)


def _revision(item: KubeObject) -> int:
    return int((item["metadata"].get("annotations") or {}).get(REVISION, 0))


def _limits(item: KubeObject) -> tuple[int, int]:
    """Return `(maxSurge, maxUnavailable)` in pods; percentages are rounded up and down. Recreate: 0 and all."""
    strategy, wanted = item["spec"].get("strategy") or {}, _desired_replicas(item)
    if strategy.get("type") == "Recreate":
        return 0, 0
    rolling = strategy.get("rollingUpdate") or {}

    def pods(field: str) -> float:
        value = rolling.get(field, "25%")
        return wanted * int(value[:-1]) / 100 if isinstance(value, str) else value

    surge, unavailable = math.ceil(pods("maxSurge")), math.floor(pods("maxUnavailable"))
    return surge, unavailable if surge or unavailable else 1


def _states(status: KubeObject) -> set[tuple[str, str]]:
    return {(item["type"], item["status"]) for item in status.get("conditions") or ()}


def _since(status: KubeObject, kind: str) -> float:
    """Return the seconds since a condition was last updated; 0 if there is no such condition."""
    for condition in status.get("conditions") or ():
        if condition["type"] == kind:
            moment = timestamps.parse(condition["lastUpdateTime"])
            return (datetime.datetime.now(datetime.UTC) - moment).total_seconds()
    return 0.0


def _available(before: KubeObject, *, enough: bool) -> KubeObject:
    text = f"Deployment {'has' if enough else 'does not have'} minimum availability."
    return _condition(
        before, "Available", str(enough), f"MinimumReplicas{'Available' if enough else 'Unavailable'}", text
    )


def _progressing(
    before: KubeObject, item: KubeObject, new: KubeObject | None, reason: str, *, renew: bool
) -> KubeObject:
    if item["spec"].get("paused"):
        return _condition(before, "Progressing", "Unknown", "DeploymentPaused", "Deployment is paused")
    name = (new or item)["metadata"]["name"]
    what = {"NewReplicaSetAvailable": "has successfully progressed", "ReplicaSetUpdated": "is progressing"}
    text = f'ReplicaSet "{name}" {what.get(reason, "has timed out progressing")}.'
    return _condition(before, "Progressing", str(reason in what), reason, text, renew=renew)


def _condition(
    before: KubeObject, kind: str, value: str, reason: str, message: str, *, renew: bool = False
) -> KubeObject:
    """Return the new condition, or the old one if nothing changes."""
    old: KubeObject = next((item for item in before.get("conditions") or () if item["type"] == kind), {})
    moment = timestamps.now()
    if (old.get("status"), old.get("reason")) == (value, reason) and not renew:
        return dict(old)
    since = old["lastTransitionTime"] if old.get("status") == value else moment
    text = {"type": kind, "status": value, "reason": reason, "message": message}
    return {**text, "lastUpdateTime": moment, "lastTransitionTime": since}
