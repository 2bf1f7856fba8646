"""Pod disruption budgets: counts the healthy pods, and so how many an eviction may take."""

from __future__ import annotations

import datetime
import math

from meshwright.api.objects import KubeObject
from meshwright_local.controllers.base import Controller, Key, controller_of
from meshwright_local.controllers.replica_sets import ready_for
from meshwright_local.kube import timestamps
from meshwright_local.kube.reflector import Change, Informers
from meshwright_local.kube.resources import BUDGETS, DEPLOYMENTS, PODS, REPLICA_SETS, has_ended, key_of
from meshwright_local.kube.selectors import labels_match

_EVICTION_SECONDS = 120.0
"""An eviction that has not deleted its pod after this time has failed."""


class DisruptionController(Controller):
    """Sets the status of each budget. Without it, a budget allows nothing and a drain waits forever."""

    def __init__(self, informers: Informers) -> None:
        super().__init__(informers, "disruption-controller")
        self._budgets = self.watch_resource(BUDGETS)
        self._sets = self.watch_resource(REPLICA_SETS, self._in_namespace)
        self._deployments = self.watch_resource(DEPLOYMENTS, self._in_namespace)
        self._pods = self.watch_resource(PODS, self._in_namespace)

    def _in_namespace(self, change: Change) -> list[Key]:
        space = key_of(change.object)[0]
        return [key for key in self._budgets if key[0] == space]

    async def reconcile(self, key: Key) -> float | None:
        """Update the status of one budget. Return the seconds until a failed eviction counts no more."""
        budget = self._budgets.get(key)
        if budget is None or budget["metadata"].get("deletionTimestamp"):
            return None
        selector = (budget.get("spec") or {}).get("selector")
        pods = [
            pod
            for place, pod in self._pods.items()
            if place[0] == key[0] and not has_ended(pod) and labels_match(selector, pod["metadata"].get("labels") or {})
        ]
        names = {pod["metadata"]["name"] for pod in pods if not pod["metadata"].get("deletionTimestamp")}
        was = budget.get("status") or {}
        evicted = {
            name: time
            for name, time in (was.get("disruptedPods") or {}).items()
            if name in names and _age(time) < _EVICTION_SECONDS
        }
        status = self._counts(budget.get("spec") or {}, pods, evicted)
        status["observedGeneration"] = budget["metadata"].get("generation", 1)
        if evicted:
            status["disruptedPods"] = evicted
        ended = dict.fromkeys((was.get("disruptedPods") or {}).keys() - evicted.keys())
        if ended or any(was.get(name) != value for name, value in status.items()):
            # With the revision, an eviction that was counted meanwhile makes it conflict, and it is repeated.
            revision = {"resourceVersion": budget["metadata"]["resourceVersion"]}
            new = {**status, "disruptedPods": {**evicted, **ended}, "conditions": [_condition(status, was)]}
            body = {"metadata": revision, "status": new}
            await self.client.patch(BUDGETS, key[1], body, key[0], subresource="status")
        return min((_EVICTION_SECONDS - _age(time) for time in evicted.values()), default=None)

    def _counts(self, spec: KubeObject, pods: list[KubeObject], evicted: dict[str, str]) -> KubeObject:
        at_least, at_most = spec.get("minAvailable"), spec.get("maxUnavailable")
        # A number of pods that must remain needs no total, so it also works for pods without a controller.
        expected = len(pods) if isinstance(at_least, int) else self._replicas(pods)
        if at_least is not None:
            desired = _share(at_least, expected)
        else:
            desired = max(0, expected - _share(at_most, expected)) if at_most is not None else 0
        healthy = sum(
            ready_for(pod) is not None
            and not pod["metadata"].get("deletionTimestamp")
            and pod["metadata"]["name"] not in evicted
            for pod in pods
        )
        return {
            "disruptionsAllowed": max(0, healthy - desired) if expected else 0,
            "currentHealthy": healthy,
            "desiredHealthy": desired,
            "expectedPods": expected,
        }

    def _replicas(self, pods: list[KubeObject]) -> int:
        """Return how many pods the controllers of these pods want; pods of others are counted."""
        wanted: dict[str, int] = {}
        for pod in pods:
            space, owner = key_of(pod)[0], controller_of(pod) or {}
            owned = self._sets.get((space, owner.get("name", ""))) if owner.get("kind") == "ReplicaSet" else None
            above = controller_of(owned) if owned else None
            if above and above["kind"] == "Deployment":
                owned = self._deployments.get((space, above["name"]), owned)
            if owned is None:
                wanted[pod["metadata"]["uid"]] = 1
            else:
                wanted[owned["metadata"]["uid"]] = owned["spec"].get("replicas", 1)
        return sum(wanted.values())


def _share(value: int | str, total: int) -> int:
    return value if isinstance(value, int) else math.ceil(int(value.removesuffix("%")) * total / 100)


def _age(time: str) -> float:
    return (datetime.datetime.now(datetime.UTC) - timestamps.parse(time)).total_seconds()


def _condition(status: KubeObject, was: KubeObject) -> KubeObject:
    allowed = status["disruptionsAllowed"] > 0
    new = {
        "type": "DisruptionAllowed",
        "status": "True" if allowed else "False",
        "reason": "SufficientPods" if allowed else "InsufficientPods",
        "message": "",
        "observedGeneration": status["observedGeneration"],
    }
    before: KubeObject = next((c for c in was.get("conditions") or () if c["type"] == "DisruptionAllowed"), {})
    same = before.get("status") == new["status"]
    return {**new, "lastTransitionTime": before["lastTransitionTime"] if same else timestamps.now()}
