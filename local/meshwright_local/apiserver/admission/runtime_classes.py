"""Runtime classes: their rules, and what they add to pods: overhead, node selector and tolerations.

The handler selects nothing here: every node runs containers as processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.admission.metadata import key_problem, problem
from meshwright_local.apiserver.admission.pod_spec import resource_causes, toleration_causes
from meshwright_local.apiserver.resource_types import Rules
from meshwright_local.apiserver.status_errors import ApiError, Cause, duplicate, forbidden, invalid_value, required
from meshwright_local.apiserver.store import Store
from meshwright_local.kube import quantities

RUNTIME_CLASSES = ("node.k8s.io", "runtimeclasses")
_KEYS = ("key", "operator", "value", "effect")


class RuntimeClassRules(Rules):
    """Runtime classes, whose handler never changes."""

    def check(self, obj: KubeObject, old: KubeObject | None, subresource: str) -> list[Cause]:
        """Validate the handler, the overhead and the scheduling."""
        handler = obj.get("handler") or ""
        if old is not None:
            return [] if handler == old.get("handler") else [invalid_value("handler", handler, "field is immutable")]
        causes = list(_scheduling_causes(obj.get("scheduling") or {}))
        amounts = (obj.get("overhead") or {}).get("podFixed") or {}
        causes[:0] = resource_causes({"limits": amounts}, "overhead")
        if not handler:
            causes.insert(0, required("handler"))
        elif text := problem("label", handler):
            causes.insert(0, invalid_value("handler", handler, text))
        return causes


def _scheduling_causes(scheduling: KubeObject) -> Iterator[Cause]:
    for key, value in (scheduling.get("nodeSelector") or {}).items():
        if text := key_problem(key):
            yield invalid_value("scheduling.nodeSelector", key, text)
        if text := problem("value", value):
            yield invalid_value("scheduling.nodeSelector", value, text)
    tolerations = scheduling.get("tolerations") or []
    for index, toleration in enumerate(tolerations):
        yield from toleration_causes(toleration, f"scheduling.tolerations[{index}]")
    named = [tuple(toleration.get(key) for key in _KEYS) for toleration in tolerations]
    for index, name in enumerate(named):
        if name in named[:index]:
            yield duplicate(f"scheduling.tolerations[{index}]", tolerations[index])


def apply_runtime_class(pod: KubeObject, store: Store) -> None:
    """Add to a new pod what its runtime class says; raises ApiError 403 if it is missing or contradicts the pod."""
    spec, name = pod["spec"], pod["spec"].get("runtimeClassName")
    found = store.find(RUNTIME_CLASSES, "", name) if name else None
    if name and found is None:
        raise _rejected(pod, f'pod rejected: RuntimeClass "{name}" not found')
    overhead = ((found or {}).get("overhead") or {}).get("podFixed") or {}
    if overhead:
        if spec.get("overhead") and _amounts(spec["overhead"]) != _amounts(overhead):
            raise _rejected(pod, "pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead")
        spec["overhead"] = dict(overhead)
    elif spec.get("overhead"):
        text = "pod rejected: Pod Overhead set without corresponding RuntimeClass defined Overhead"
        raise _rejected(pod, text)
    if scheduling := (found or {}).get("scheduling"):
        _schedule(pod, scheduling)


def _schedule(pod: KubeObject, scheduling: KubeObject) -> None:
    spec = pod["spec"]
    own, wanted = spec.get("nodeSelector") or {}, scheduling.get("nodeSelector") or {}
    for key, value in wanted.items():
        if own.get(key, value) != value:
            places = (
                f"runtimeClass.scheduling.nodeSelector[{key}] = {value}",
                f"pod.spec.nodeSelector[{key}] = {own[key]}",
            )
            raise _rejected(pod, f"conflict: {'; '.join(places)}")
    merged = _merged([*(spec.get("tolerations") or ()), *(scheduling.get("tolerations") or ())])
    spec |= {key: value for key, value in (("nodeSelector", {**own, **wanted}), ("tolerations", merged)) if value}


def _rejected(pod: KubeObject, why: str) -> ApiError:
    return forbidden("", "pods", pod["metadata"].get("name") or "", why)


def _amounts(values: KubeObject) -> dict[str, Any]:
    return {name: quantities.parse(value)[0] for name, value in values.items()}


def _merged(tolerations: list[KubeObject]) -> list[KubeObject]:
    """Return the tolerations without those that another one includes. Of equal ones the first stays."""
    merged: list[KubeObject] = []
    for index, toleration in enumerate(tolerations):
        later = (other for other in tolerations[index + 1 :] if other != toleration)
        if not any(_includes(other, toleration) for other in (*merged, *later)):
            merged.append(toleration)
    return merged


def _includes(wide: KubeObject, narrow: KubeObject) -> bool:
    """Whether a toleration tolerates everything that another one does."""
    if wide == narrow:
        return True
    exists = wide.get("operator") == "Exists"
    if narrow.get("key", "") != wide.get("key", "") and (wide.get("key") or not exists):
        return False
    if wide.get("effect") and narrow.get("effect") != wide["effect"]:
        return False
    if wide.get("effect") == "NoExecute" and wide.get("tolerationSeconds") is not None:
        seconds = narrow.get("tolerationSeconds")
        if seconds is None or seconds > wide["tolerationSeconds"]:
            return False
    return exists or (narrow.get("operator") == "Equal" and narrow.get("value", "") == wide.get("value", ""))
