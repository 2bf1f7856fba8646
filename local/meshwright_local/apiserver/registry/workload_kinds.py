"""Kinds with a pod template: their defaults, and the rules that Helm charts and `kubectl apply` run into."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.admission.pods import check_pod_spec, default_template_spec
from meshwright_local.apiserver.resource_types import Rules
from meshwright_local.apiserver.status_errors import Cause, invalid_value, not_allowed, required, unsupported_value
from meshwright_local.kube.selectors import labels_match

SCALE = {
    "specReplicasPath": "spec.replicas",
    "statusReplicasPath": "status.replicas",
    "labelSelectorPath": "spec.selector",
}
_ROLLING: dict[str, Any] = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "25%", "maxSurge": "25%"}}
_DEFAULTS: dict[str, KubeObject] = {
    "Deployment": {
        "replicas": 1,
        "strategy": _ROLLING,
        "revisionHistoryLimit": 10,
        "progressDeadlineSeconds": 600,
    },
    "ReplicaSet": {"replicas": 1},
    "StatefulSet": {
        "replicas": 1,
        "podManagementPolicy": "OrderedReady",
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}},
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain", "whenScaled": "Retain"},
        "revisionHistoryLimit": 10,
    },
    "DaemonSet": {
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}},
        "revisionHistoryLimit": 10,
    },
    "Job": {"backoffLimit": 6, "completionMode": "NonIndexed", "suspend": False},
}
_STATEFUL_SET_EDITS = (
    "replicas",
    "ordinals",
    "template",
    "updateStrategy",
    "revisionHistoryLimit",
    "persistentVolumeClaimRetentionPolicy",
    "minReadySeconds",
)


class WorkloadRules(Rules):
    """Deployments, ReplicaSets, StatefulSets, DaemonSets and Jobs."""

    def defaults(self, obj: KubeObject) -> None:
        """Set the defaults of the kind, and those of the pod template."""
        spec, kind = obj.setdefault("spec", {}), obj["kind"]
        for key, value in orjson.loads(orjson.dumps(_DEFAULTS.get(kind, {}))).items():
            spec.setdefault(key, value)
        strategy = spec.get("strategy") or {}
        if kind == "Deployment" and strategy.setdefault("type", "RollingUpdate") == "RollingUpdate":
            strategy["rollingUpdate"] = {**_ROLLING["rollingUpdate"], **(strategy.get("rollingUpdate") or {})}
        if kind == "Job" and spec.get("completions") is None and spec.get("parallelism") is None:
            spec["completions"] = 1
        if kind == "Job":
            spec.setdefault("parallelism", 1)
        if isinstance((spec.get("template") or {}).get("spec"), dict):
            default_template_spec(spec["template"]["spec"])

    def check(self, obj: KubeObject, old: KubeObject | None, subresource: str) -> list[Cause]:
        """Validate the selector, the template and the changes of an update."""
        if subresource == "status":
            return []
        spec, kind = obj["spec"], obj["kind"]
        causes = list(_number_causes(spec))
        if kind != "Job":
            causes += _selector_causes(spec, kind)
        template = (spec.get("template") or {}).get("spec") or {}
        causes += check_pod_spec(template, "spec.template.spec") + list(_restart_causes(template, kind))
        if kind == "Deployment":
            causes += _strategy_causes(spec["strategy"])
        return causes + (list(_edit_causes(spec, old["spec"], kind)) if old is not None else [])


def _number_causes(spec: KubeObject) -> Iterator[Cause]:
    for key in ("replicas", "minReadySeconds", "revisionHistoryLimit", "backoffLimit", "completions", "parallelism"):
        if (spec.get(key) or 0) < 0:
            yield invalid_value(f"spec.{key}", spec[key], "must be greater than or equal to 0")


def _selector_causes(spec: KubeObject, kind: str) -> Iterator[Cause]:
    selector = spec.get("selector")
    labels = ((spec.get("template") or {}).get("metadata") or {}).get("labels") or {}
    if selector is None:
        yield required("spec.selector")
    elif not selector.get("matchLabels") and not selector.get("matchExpressions"):
        yield invalid_value("spec.selector", selector, f"empty selector is invalid for {kind.lower()}")
        return
    if not labels_match(selector, labels):
        yield invalid_value("spec.template.metadata.labels", labels, "`selector` does not match template `labels`")


def _restart_causes(template: KubeObject, kind: str) -> Iterator[Cause]:
    policy, path = template.get("restartPolicy"), "spec.template.spec.restartPolicy"
    if kind == "Job" and policy not in ("OnFailure", "Never"):
        yield unsupported_value(path, policy, ("OnFailure", "Never"))
    elif kind != "Job" and template and policy != "Always":
        yield unsupported_value(path, policy, ("Always",))


def _strategy_causes(strategy: KubeObject) -> Iterator[Cause]:
    kind, rolling = strategy["type"], strategy.get("rollingUpdate") or {}
    if kind not in ("Recreate", "RollingUpdate"):
        yield unsupported_value("spec.strategy.type", kind, ("Recreate", "RollingUpdate"))
    elif kind == "Recreate" and rolling:
        text = "may not be specified when strategy `type` is 'Recreate'"
        yield not_allowed("spec.strategy.rollingUpdate", text)
    elif kind == "RollingUpdate" and {_share(rolling["maxSurge"]), _share(rolling["maxUnavailable"])} == {0}:
        where = "spec.strategy.rollingUpdate.maxUnavailable"
        yield invalid_value(where, rolling["maxUnavailable"], "may not be 0 when `maxSurge` is 0")


def _share(value: Any) -> int:
    text = str(value).removesuffix("%")
    return int(text) if text.isdigit() else -1


def _edit_causes(spec: KubeObject, was: KubeObject, kind: str) -> Iterator[Cause]:
    if kind == "StatefulSet":
        fixed = [key for key in {**spec, **was} if key not in _STATEFUL_SET_EDITS and spec.get(key) != was.get(key)]
        if fixed:
            names = ", ".join(f"'{name}'" for name in _STATEFUL_SET_EDITS)
            yield not_allowed("spec", f"updates to statefulset spec for fields other than {names} are forbidden")
        return
    frozen = ["selector"] + (["template", "completions"] if kind == "Job" and not was.get("suspend") else [])
    for key in frozen:
        if spec.get(key) != was.get(key):
            yield invalid_value(f"spec.{key}", spec.get(key), "field is immutable")
