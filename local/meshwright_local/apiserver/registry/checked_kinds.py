"""Kinds that are stored as clients write them, with the defaults and rules that clients depend on or trip over."""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.auth.identity import RBAC
from meshwright_local.apiserver.resource_types import Rules
from meshwright_local.apiserver.status_errors import (
    Cause,
    UnreadableError,
    invalid_value,
    not_allowed,
    required,
    unsupported_value,
)
from meshwright_local.apiserver.store import Store
from meshwright_local.kube import quantities
from meshwright_local.kube.selectors import OPERATORS

_STORAGE_CLASSES = ("storage.k8s.io", "storageclasses")
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d\.\d{6}([Zz]|[+-]\d\d:\d\d)")
_ACCESS_MODES = ("ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod")
_MAX_PRIORITY = 1_000_000_000
_SYSTEM_CLASSES = ("system-node-critical", "system-cluster-critical")


def check_micro_times(obj: KubeObject, *paths: str) -> None:
    """Reject a time with microseconds that is written in another form.

    Clients that write `12:00:00Z` or three digits there find out only from a real server.

    Raises:
        ApiError: 400, as for every value that cannot be decoded.
    """
    for path in paths:
        value = obj
        for part in path.split("."):
            value = (value or {}).get(part) or {}
        if isinstance(value, str) and not _MICRO_TIME.fullmatch(value):
            why = f'parsing time "{value}": {path} needs six digits after the seconds, as 2006-01-02T15:04:05.000000Z'
            raise UnreadableError(obj["kind"], "v1", why)


class LeaseRules(Rules):
    """Leases, on which leader election depends."""

    put_creates = True

    def defaults(self, obj: KubeObject) -> None:
        """Reject times in another form than the real server reads."""
        check_micro_times(obj, "spec.acquireTime", "spec.renewTime")

    def check(self, obj: KubeObject, old: KubeObject | None, subresource: str) -> list[Cause]:
        """Validate the numbers."""
        spec, causes = obj.get("spec") or {}, []
        if spec.get("leaseDurationSeconds", 1) <= 0:
            where = "spec.leaseDurationSeconds"
            causes.append(invalid_value(where, spec["leaseDurationSeconds"], "must be greater than 0"))
        if spec.get("leaseTransitions", 0) < 0:
            text = "must be greater than or equal to 0"
            causes.append(invalid_value("spec.leaseTransitions", spec["leaseTransitions"], text))
        return causes


class EventRules(Rules):
    """Events: they are in the namespace of their object, those of cluster-wide objects in `default`."""

    put_creates = True

    def defaults(self, obj: KubeObject) -> None:
        """Reject times in another form than the real server reads."""
        check_micro_times(obj, "eventTime", "series.lastObservedTime")

    def check(self, obj: KubeObject, old: KubeObject | None, subresource: str) -> list[Cause]:
        """Compare the namespace with that of the object."""
        space = obj["metadata"].get("namespace", "")
        about = (obj.get("involvedObject") or {}).get("namespace") or ""
        fits = space == about or (not about and space in ("", "default"))
        return [] if fits else [invalid_value("involvedObject.namespace", about, "does not match event.namespace")]


class ClaimRules(Rules):
    """Persistent volume claims: storage class, phase, and a spec that stays as it is."""

    returns_deleted = True

    def create(self, obj: KubeObject, store: Store) -> None:
        """Set the first status and the default class."""
        obj["status"] = {"phase": "Pending"}
        spec = obj.setdefault("spec", {})
        spec.setdefault("volumeMode", "Filesystem")
        for storage in store.all(_STORAGE_CLASSES):
            if (storage["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true":
                spec.setdefault("storageClassName", storage["metadata"]["name"])

    def check(self, obj: KubeObject, old: KubeObject | None, subresource: str) -> list[Cause]:
        """Validate a new claim. Of a bound one only the size may grow."""
        if subresource:
            return []
        return list(_claim_causes(obj)) if old is None else list(_claim_edits(obj, old))


def _claim_causes(obj: KubeObject) -> Iterator[Cause]:
    spec = obj.get("spec") or {}
    modes = spec.get("accessModes") or ()
    if not modes:
        yield required("spec.accessModes", "at least 1 access mode is required")
    for mode in modes:
        if mode not in _ACCESS_MODES:
            yield unsupported_value("spec.accessModes", mode, _ACCESS_MODES)
    size = ((spec.get("resources") or {}).get("requests") or {}).get("storage")
    if size is None:
        yield required("spec.resources[storage]")
    elif quantities.parse(size)[0] <= 0:
        yield invalid_value("spec.resources[storage]", size, "must be greater than zero")


def _claim_edits(obj: KubeObject, old: KubeObject) -> Iterator[Cause]:
    spec, was = obj.get("spec") or {}, old.get("spec") or {}
    bound = (old.get("status") or {}).get("phase") == "Bound"
    # A controller names the volume, and a class may be added once, to a claim without one.
    free = [key for key in ("volumeName", "storageClassName") if was.get(key) in (None, "")]
    free += ["resources", "volumeAttributesClassName"] if bound else []
    if any(spec.get(key) != was.get(key) for key in {**spec, **was} if key not in free):
        text = "is immutable after creation except resources.requests and volumeAttributesClassName for bound claims"
        yield not_allowed("spec", f"spec {text}")
    sizes = [((s.get("resources") or {}).get("requests") or {}).get("storage", "0") for s in (spec, was)]
    if bound and quantities.parse(sizes[0])[0] < quantities.parse(sizes[1])[0]:
        yield not_allowed("spec.resources.requests.storage", "field can not be less than status.capacity")


class PriorityClassRules(Rules):
    """Priority classes, whose value never changes."""

    def defaults(self, obj: KubeObject) -> None:
        """Set the value 0, and preemption."""
        obj.setdefault("value", 0)
        obj.setdefault("preemptionPolicy", "PreemptLowerPriority")
        if obj.get("globalDefault") is False:
            del obj["globalDefault"]

    def check(self, obj: KubeObject, old: KubeObject | None, subresource: str) -> list[Cause]:
        """Validate the value, and that an update retains it."""
        name, causes = obj["metadata"]["name"], []
        if old is not None and obj["value"] != old.get("value"):
            causes.append(not_allowed("value", "may not be changed in an update."))
        if old is not None and obj["preemptionPolicy"] != old.get("preemptionPolicy"):
            causes.append(invalid_value("preemptionPolicy", obj["preemptionPolicy"], "field is immutable"))
        if obj["preemptionPolicy"] not in ("PreemptLowerPriority", "Never"):
            choices = ("PreemptLowerPriority", "Never")
            causes.append(unsupported_value("preemptionPolicy", obj["preemptionPolicy"], choices))
        if name.startswith("system-") and name not in _SYSTEM_CLASSES:
            text = "priority class names with 'system-' prefix are reserved for system use only"
            causes.append(not_allowed("metadata.name", text))
        elif obj["value"] > _MAX_PRIORITY and name not in _SYSTEM_CLASSES:
            text = f"maximum allowed value of a user defined priority is {_MAX_PRIORITY}"
            causes.append(not_allowed("value", text))
        return causes


class BudgetRules(Rules):
    """Pod disruption budgets."""

    def create(self, obj: KubeObject, store: Store) -> None:
        """Allow no disruption until the controller has counted the pods."""
        counts = ("disruptionsAllowed", "currentHealthy", "desiredHealthy", "expectedPods")
        obj["status"] = dict.fromkeys(counts, 0)

    def check(self, obj: KubeObject, old: KubeObject | None, subresource: str) -> list[Cause]:
        """Validate the numbers and the selector."""
        spec = obj.get("spec") or {}
        causes: list[Cause] = []
        if spec.get("minAvailable") is not None and spec.get("maxUnavailable") is not None:
            causes.append(invalid_value("spec", spec, "minAvailable and maxUnavailable cannot be both set"))
        for key in ("minAvailable", "maxUnavailable"):
            value = spec.get(key)
            if isinstance(value, int) and value < 0:
                causes.append(invalid_value(f"spec.{key}", value, "must be greater than or equal to 0"))
            elif isinstance(value, str) and not re.fullmatch(r"\d+%", value):
                text = "must be an integer or percentage (e.g '5%')"
                causes.append(invalid_value(f"spec.{key}", value, text))
            elif isinstance(value, str) and int(value[:-1]) > 100:
                causes.append(invalid_value(f"spec.{key}", value, "must not be greater than 100%"))
        for index, requirement in enumerate((spec.get("selector") or {}).get("matchExpressions") or ()):
            if requirement["operator"] not in OPERATORS:
                where = f"spec.selector.matchExpressions[{index}].operator"
                causes.append(invalid_value(where, requirement["operator"], "not a valid selector operator"))
        return causes


class RoleRules(Rules):
    """Roles and cluster roles."""

    name_form = "path-segment"
    put_creates = True

    def check(self, obj: KubeObject, old: KubeObject | None, subresource: str) -> list[Cause]:
        """Validate the rules."""
        causes: list[Cause] = []
        for index, rule in enumerate(obj.get("rules") or ()):
            path, urls = f"rules[{index}]", rule.get("nonResourceURLs")
            if not rule.get("verbs"):
                causes.append(required(f"{path}.verbs", "verbs must contain at least one value"))
            elif urls and obj["kind"] == "Role":
                text = "namespaced rules cannot apply to non-resource URLs"
                causes.append(invalid_value(f"{path}.nonResourceURLs", urls, text))
            elif not urls:
                for key, what in (("apiGroups", "api group"), ("resources", "resource")):
                    if not rule.get(key):
                        causes.append(required(f"{path}.{key}", f"resource rules must supply at least one {what}"))
        return causes


class BindingRules(Rules):
    """Role bindings, whose role never changes: who may write a binding must not give other rights with it."""

    name_form = "path-segment"
    put_creates = True

    def defaults(self, obj: KubeObject) -> None:
        """Set the API groups."""
        if isinstance(obj.get("roleRef"), dict):
            obj["roleRef"]["apiGroup"] = obj["roleRef"].get("apiGroup") or RBAC
        for subject in obj.get("subjects") or ():
            if subject.get("kind") in ("User", "Group"):
                subject["apiGroup"] = subject.get("apiGroup") or RBAC

    def check(self, obj: KubeObject, old: KubeObject | None, subresource: str) -> list[Cause]:
        """Validate the role and the subjects."""
        role, causes = obj["roleRef"], []
        kinds = ("ClusterRole",) if obj["kind"] == "ClusterRoleBinding" else ("Role", "ClusterRole")
        if role["apiGroup"] != RBAC:
            causes.append(unsupported_value("roleRef.apiGroup", role["apiGroup"], (RBAC,)))
        if role.get("kind") not in kinds:
            causes.append(unsupported_value("roleRef.kind", role.get("kind"), kinds))
        if not role.get("name"):
            causes.append(required("roleRef.name"))
        for index, subject in enumerate(obj.get("subjects") or ()):
            path = f"subjects[{index}]"
            if subject.get("kind") not in ("ServiceAccount", "User", "Group"):
                choices = ("ServiceAccount", "User", "Group")
                causes.append(unsupported_value(f"{path}.kind", subject.get("kind"), choices))
            elif not subject.get("name"):
                causes.append(required(f"{path}.name"))
            elif subject["kind"] == "ServiceAccount" and not subject.get("namespace") and len(kinds) == 1:
                causes.append(required(f"{path}.namespace"))
        if old is not None and role != old.get("roleRef"):
            causes.append(invalid_value("roleRef", role, "cannot change roleRef"))
        return causes
