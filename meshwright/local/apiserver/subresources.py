"""Subresources that are more than a part of their object: binding, eviction, scale, finalize."""

from __future__ import annotations

from typing import Any

import orjson

from meshwright.local.apiserver.clock import timestamp
from meshwright.local.apiserver.deleting import Deleting
from meshwright.local.apiserver.errors import ApiError, Cause, bad_request, invalid, required
from meshwright.local.apiserver.options import WriteOptions, delete_options
from meshwright.local.apiserver.registry import Registry
from meshwright.local.apiserver.resources import Resource, field_value
from meshwright.local.apiserver.selectors import label_selector_object
from meshwright.local.apiserver.store import Store
from meshwright.local.apiserver.writing import Writing

JsonObject = dict[str, Any]
BUDGETS = ("policy", "poddisruptionbudgets")
_EVICTION_RETRY_SECONDS = 10


class Subresources:
    """Writes through subresources."""

    def __init__(self, store: Store, registry: Registry, writing: Writing, deleting: Deleting) -> None:
        self._store = store
        self._registry = registry
        self._writing = writing
        self._deleting = deleting

    def bind(self, pods: Resource, pod: JsonObject, binding: JsonObject, options: WriteOptions) -> None:
        """Assign a pod to the node that a Binding names.

        Raises:
            ApiError: 409 when the pod is gated, assigned or being deleted.
        """
        target = binding.get("target")
        node = target.get("name") if isinstance(target, dict) else None
        name = pod["metadata"]["name"]
        if not isinstance(node, str) or not node:
            raise invalid("", "Binding", name, [required("target.name")])
        given = binding.get("metadata") if isinstance(binding.get("metadata"), dict) else {}
        for key in ("uid", "resourceVersion"):
            if given and given.get(key) not in (None, "", pod["metadata"][key]):
                raise pods.conflict(name, f"Precondition failed: {key} in precondition: {given[key]}")
        problem = _unbindable(pod)
        if problem:
            raise ApiError(409, "Conflict", f'Operation cannot be fulfilled on pods/binding "{name}": {problem}')
        new = orjson.loads(orjson.dumps(pod))
        new["spec"]["nodeName"] = node
        annotations = given.get("annotations") if given else None
        if isinstance(annotations, dict):
            new["metadata"]["annotations"] = {**(new["metadata"].get("annotations") or {}), **annotations}
        _set_condition(new, {"type": "PodScheduled", "status": "True"})
        if not options.dry_run:
            self._writing.commit(pods, new)

    def evict(self, pods: Resource, pod: JsonObject, eviction: JsonObject) -> None:
        """Delete a pod unless a disruption budget forbids it.

        Raises:
            ApiError: 429 while the budget allows no disruption, 500 when several budgets speak of the pod.
        """
        body = eviction.get("deleteOptions")
        options = delete_options({}, body if isinstance(body, dict) else {})
        ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed", "Pending")
        if not ended and not pod["metadata"].get("deletionTimestamp"):
            self._spend_budget(pod, dry_run=bool(options["dryRun"]))
            if not options["dryRun"]:
                new = orjson.loads(orjson.dumps(pod))
                text = "Eviction API: evicting"
                _set_condition(
                    new,
                    {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": text},
                )
                pod = self._writing.commit(pods, new)
                options["preconditions"] = None
        self._deleting.delete(pods, pod, options)

    def _spend_budget(self, pod: JsonObject, *, dry_run: bool) -> None:
        labels = pod["metadata"].get("labels") or {}
        budgets = [
            stored
            for _, stored in self._store.items(BUDGETS, pod["metadata"]["namespace"])
            if label_selector_object(stored.obj["spec"].get("selector"))(labels)
        ]
        if len(budgets) > 1:
            raise ApiError(
                500, "InternalError", "This pod has more than one PodDisruptionBudget, which is not supported."
            )
        resource = self._registry.get(BUDGETS[0], "v1", BUDGETS[1])
        for stored in budgets:
            budget = orjson.loads(stored.body)
            status = budget.get("status") or {}
            name = budget["metadata"]["name"]
            allowed = status.get("disruptionsAllowed", 0)
            current = status.get("observedGeneration", 0) >= budget["metadata"].get("generation", 0)
            if not current or allowed <= 0:
                text = f"The disruption budget {name} needs {status.get('desiredHealthy', 0)} healthy pods"
                text += f" and has {status.get('currentHealthy', 0)} currently"
                cause = Cause("", "DisruptionBudget", text)
                message = "Cannot evict pod as it would violate the pod's disruption budget."
                wait = None if current else _EVICTION_RETRY_SECONDS
                raise ApiError(429, "TooManyRequests", message, {"causes": [cause.wire()]}, retry_after=wait)
            status["disruptionsAllowed"] = allowed - 1
            status.setdefault("disruptedPods", {})[pod["metadata"]["name"]] = timestamp()
            if resource is not None and not dry_run:
                self._writing.commit(resource, {**budget, "status": status})

    def finalize(self, namespaces: Resource, old: JsonObject, new: JsonObject, options: WriteOptions) -> JsonObject:
        """Replace `spec.finalizers` of a namespace; the last one off ends a namespace that is being deleted.

        Raises:
            ApiError: 400 for a malformed body, 409 when the namespace has changed since.
        """
        spec = new.get("spec")
        finalizers = spec.get("finalizers") if isinstance(spec, dict) else None
        if not isinstance(finalizers, list | None) or any(not isinstance(f, str) for f in finalizers or ()):
            raise bad_request("spec.finalizers must be a list of names")
        updated = orjson.loads(orjson.dumps(old))
        updated["spec"] = {"finalizers": finalizers} if finalizers else {}
        given = new.get("metadata")
        if isinstance(given, dict) and given.get("resourceVersion"):
            updated["metadata"]["resourceVersion"] = given["resourceVersion"]
        return self._writing.update(namespaces, old, updated, options, "finalize")

    def scale_of(self, resource: Resource, obj: JsonObject) -> JsonObject:
        """The Scale object of a custom resource.

        Raises:
            ApiError: 404 when the resource has none.
        """
        paths = resource.scale
        if paths is None:
            raise resource.not_found(obj["metadata"]["name"])
        metadata = obj["metadata"]
        kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        status: JsonObject = {"replicas": field_value(obj, paths.status_replicas) or 0}
        if paths.selector:
            status["selector"] = field_value(obj, paths.selector) or ""
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {key: metadata[key] for key in kept if key in metadata},
            "spec": {"replicas": field_value(obj, paths.spec_replicas) or 0},
            "status": status,
        }

    def rescale(self, resource: Resource, old: JsonObject, scale: JsonObject, options: WriteOptions) -> JsonObject:
        """Set the replicas of a custom resource from a Scale object; returns the new Scale.

        Raises:
            ApiError: 404 without the subresource, 409 for a stale revision, 422 for a count that cannot be.
        """
        if resource.scale is None:
            raise resource.not_found(old["metadata"]["name"])
        spec = scale.get("spec")
        replicas = spec.get("replicas", 0) if isinstance(spec, dict) else 0
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
            cause = Cause("spec.replicas", "FieldValueInvalid", "Invalid value: must be a number that is not negative")
            raise invalid("autoscaling", "Scale", old["metadata"]["name"], [cause])
        new = orjson.loads(orjson.dumps(old))
        given = scale.get("metadata")
        if isinstance(given, dict) and given.get("resourceVersion"):
            new["metadata"]["resourceVersion"] = given["resourceVersion"]
        node = new
        *parents, last = resource.scale.spec_replicas.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = replicas
        return self.scale_of(resource, self._writing.update(resource, old, new, options, "scale"))


def _unbindable(pod: JsonObject) -> str | None:
    name, spec = pod["metadata"]["name"], pod["spec"]
    if pod["metadata"].get("deletionTimestamp"):
        return f"pod {name} is being deleted, cannot be assigned to a host"
    if spec.get("schedulingGates"):
        return f"pod {name} has non-empty .spec.schedulingGates"
    if spec.get("nodeName"):
        return f'pod {name} is already assigned to node "{spec["nodeName"]}"'
    return None


def _set_condition(pod: JsonObject, condition: JsonObject) -> None:
    status = pod.setdefault("status", {})
    others = [c for c in status.get("conditions") or () if c["type"] != condition["type"]]
    status["conditions"] = [*others, {**condition, "lastTransitionTime": timestamp()}]
