"""Printer columns: what `kubectl get` shows of each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.local.apiserver import clock
from meshwright.local.apiserver.jsonpath import first
from meshwright.local.apiserver.resources import Column, Resource

JsonObject = dict[str, Any]
Cells = Callable[[JsonObject], list[Any]]

NONE = "<none>"
UNSET = "<unset>"
_NAME = Column("Name", "string", "", 0, "Name must be unique within a namespace.", "name")
_AGE = Column("Age", "string", "", 0, "Time since creation.")


def columns_and_cells(resource: Resource) -> tuple[list[Column], Cells]:
    """The columns of a resource, and what fills them."""
    if resource.custom:
        return _custom(resource)
    names, cells = _PRINTERS.get(resource.key, (("Age",), lambda obj: [age(obj)]))
    columns = [_column(name) for name in names]
    first_is_name = resource.key != ("", "events")
    if not first_is_name:
        return columns, cells
    return [_NAME, *columns], lambda obj: [obj["metadata"]["name"], *cells(obj)]


def _column(name: str) -> Column:
    """A column by its name; one that `-o wide` alone shows is marked with a star, a numeric one with a hash."""
    if name == "Age":
        return _AGE
    return Column(name.rstrip("*#"), "integer" if "#" in name else "string", "", 1 if "*" in name else 0)


def human_duration(seconds: float) -> str:
    """A time span as kubectl prints it: `42s`, `3m10s`, `2d4h`."""
    s = int(seconds)
    for limit, unit, size, sub, part in (
        (120, "s", 1, "", 1),
        (600, "m", 60, "s", 1),
        (10800, "m", 60, "", 1),
        (28800, "h", 3600, "m", 60),
        (172800, "h", 3600, "", 1),
        (691200, "d", 86400, "h", 3600),
        (63072000, "d", 86400, "", 1),
    ):
        if s < limit:
            rest = s % size // part if sub else 0
            return f"{s // size}{unit}" + (f"{rest}{sub}" if rest else "")
    years, days = s // 31536000, s % 31536000 // 86400
    return f"{years}y" + (f"{days}d" if days and years < 8 else "")


def since(text: Any) -> str:
    """The time since a moment, `<unknown>` when there is none."""
    try:
        return human_duration(max(0.0, (clock.now() - clock.parse(text)).total_seconds()))
    except (TypeError, ValueError):
        return "<unknown>"


def age(obj: JsonObject) -> str:
    """The time since an object was created."""
    return since(obj["metadata"].get("creationTimestamp"))


def _custom(resource: Resource) -> tuple[list[Column], Cells]:
    columns = resource.columns or (Column("Age", "date", ".metadata.creationTimestamp"),)

    def cell(column: Column, obj: JsonObject) -> Any:
        value = first(obj, column.json_path)
        if value is None:
            return None
        if column.type == "date":
            return since(value)
        if column.type in ("integer", "number", "boolean"):
            return value if isinstance(value, int | float) else None
        if isinstance(value, bool):
            return "true" if value else "false"
        return value if isinstance(value, str) else str(value)

    return [_NAME, *columns], lambda obj: [obj["metadata"]["name"], *(cell(c, obj) for c in columns)]


def _pod(obj: JsonObject) -> list[Any]:
    spec, status = obj["spec"], obj.get("status") or {}
    statuses = status.get("containerStatuses") or []
    ready = sum(bool(s.get("ready")) for s in statuses)
    return [
        f"{ready}/{len(spec['containers'])}",
        pod_reason(obj),
        str(sum(s.get("restartCount", 0) for s in statuses)),
        age(obj),
        status.get("podIP") or NONE,
        spec.get("nodeName") or NONE,
        status.get("nominatedNodeName") or NONE,
        NONE,
    ]


def pod_reason(obj: JsonObject) -> str:
    """The STATUS column of a pod."""
    status = obj.get("status") or {}
    reason = status.get("reason") or status.get("phase") or "Unknown"
    if obj["spec"].get("schedulingGates"):
        reason = "SchedulingGated"
    starting = _init_reason(obj, status)
    if starting:
        reason = starting
    else:
        reason = _container_reason(status, reason)
    if obj["metadata"].get("deletionTimestamp") and status.get("phase") not in ("Succeeded", "Failed"):
        reason = "Unknown" if status.get("reason") == "NodeLost" else "Terminating"
    return str(reason)


def _init_reason(obj: JsonObject, status: JsonObject) -> str:
    total = len(obj["spec"].get("initContainers") or ())
    for index, container in enumerate(status.get("initContainerStatuses") or ()):
        state = container.get("state") or {}
        ended, waiting = state.get("terminated"), state.get("waiting")
        if ended and not ended.get("exitCode"):
            continue
        if ended:
            return f"Init:{ended.get('reason') or 'ExitCode:' + str(ended.get('exitCode'))}"
        if waiting and waiting.get("reason") not in (None, "PodInitializing"):
            return f"Init:{waiting['reason']}"
        return f"Init:{index}/{total}"
    return ""


def _container_reason(status: JsonObject, reason: str) -> str:
    running = False
    for container in reversed(status.get("containerStatuses") or []):
        state = container.get("state") or {}
        ended, waiting = state.get("terminated"), state.get("waiting")
        if waiting and waiting.get("reason"):
            reason = waiting["reason"]
        elif ended:
            code = f"Signal:{ended['signal']}" if ended.get("signal") else f"ExitCode:{ended.get('exitCode')}"
            reason = ended.get("reason") or code
        elif container.get("ready") and state.get("running"):
            running = True
    if reason == "Completed" and running:
        conditions = status.get("conditions") or ()
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
        return "Running" if ready else "NotReady"
    return reason


def _node(obj: JsonObject) -> list[Any]:
    status, labels = obj.get("status") or {}, obj["metadata"].get("labels") or {}
    ready = next((c["status"] for c in status.get("conditions") or () if c["type"] == "Ready"), None)
    words = [{"True": "Ready", None: "Unknown"}.get(ready, "NotReady")]
    if obj.get("spec", {}).get("unschedulable"):
        words.append("SchedulingDisabled")
    roles = sorted(k.partition("/")[2] for k in labels if k.startswith("node-role.kubernetes.io/"))
    address = next((a["address"] for a in status.get("addresses") or () if a["type"] == "InternalIP"), NONE)
    info = status.get("nodeInfo") or {}
    version = info.get("kubeletVersion") or ""
    wide = [
        address,
        NONE,
        *(info.get(k) or "<unknown>" for k in ("osImage", "kernelVersion", "containerRuntimeVersion")),
    ]
    return [",".join(words), ",".join(roles) or NONE, age(obj), version, *wide]


def _event(obj: JsonObject) -> list[Any]:
    about, source = obj.get("involvedObject") or {}, obj.get("source") or {}
    first_seen = obj.get("firstTimestamp") or obj.get("eventTime") or obj["metadata"].get("creationTimestamp")
    series = obj.get("series") or {}
    last_seen = series.get("lastObservedTime") or obj.get("lastTimestamp") or first_seen
    component = source.get("component") or obj.get("reportingComponent") or ""
    where = f"{about.get('kind', '').lower()}/{about.get('name', '')}"
    return [
        since(last_seen),
        obj.get("type", ""),
        obj.get("reason", ""),
        where,
        about.get("fieldPath", ""),
        f"{component}, {source['host']}" if source.get("host") else component,
        (obj.get("message") or "").strip(),
        since(first_seen),
        series.get("count") or obj.get("count") or 1,
        obj["metadata"]["name"],
    ]


def _service(obj: JsonObject) -> list[Any]:
    spec = obj["spec"]
    ports = ",".join(f"{p['port']}/{p.get('protocol', 'TCP')}" for p in spec.get("ports") or ()) or NONE
    selector = ",".join(f"{k}={v}" for k, v in sorted((spec.get("selector") or {}).items())) or NONE
    return [
        spec.get("type"),
        spec.get("clusterIP") or NONE,
        spec.get("externalName") or NONE,
        ports,
        age(obj),
        selector,
    ]


def _claim(obj: JsonObject) -> list[Any]:
    spec, status = obj["spec"], obj.get("status") or {}
    phase = "Terminating" if obj["metadata"].get("deletionTimestamp") else status.get("phase", "")
    bound = bool(spec.get("volumeName"))
    size = (status.get("capacity") or {}).get("storage", "") if bound else ""
    modes = access_modes(status.get("accessModes") or ()) if bound else ""
    return [phase, spec.get("volumeName", ""), size, modes, spec.get("storageClassName", ""), UNSET, age(obj)]


def _volume(obj: JsonObject) -> list[Any]:
    spec, status = obj["spec"], obj.get("status") or {}
    phase = "Terminating" if obj["metadata"].get("deletionTimestamp") else status.get("phase", "")
    claim = spec.get("claimRef") or {}
    name = f"{claim.get('namespace', '')}/{claim['name']}" if claim.get("name") else ""
    size, policy = (spec.get("capacity") or {}).get("storage", ""), spec.get("persistentVolumeReclaimPolicy", "")
    modes = access_modes(spec.get("accessModes") or ())
    return [
        size,
        modes,
        policy,
        phase,
        name,
        spec.get("storageClassName", ""),
        UNSET,
        status.get("reason", ""),
        age(obj),
    ]


def access_modes(modes: Any) -> str:
    """Access modes in short, such as `RWX`."""
    short = {"ReadWriteOnce": "RWO", "ReadOnlyMany": "ROX", "ReadWriteMany": "RWX", "ReadWriteOncePod": "RWOP"}
    return ",".join(short.get(mode, mode) for mode in modes)


def _data(obj: JsonObject) -> list[Any]:
    return [len(obj.get("data") or {}) + len(obj.get("binaryData") or {}), age(obj)]


def _workload(obj: JsonObject) -> list[Any]:
    status = obj.get("status") or {}
    wanted = (obj.get("spec") or {}).get("replicas", 1)
    ready = f"{status.get('readyReplicas', 0)}/{wanted}"
    return [ready, status.get("updatedReplicas", 0), status.get("availableReplicas", 0), age(obj)]


def _budget(obj: JsonObject) -> list[Any]:
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    least, most = spec.get("minAvailable", "N/A"), spec.get("maxUnavailable", "N/A")
    return [str(least), str(most), status.get("disruptionsAllowed", 0), age(obj)]


def _storage_class(obj: JsonObject) -> list[Any]:
    expands = bool(obj.get("allowVolumeExpansion"))
    return [obj["provisioner"], obj.get("reclaimPolicy"), obj.get("volumeBindingMode"), expands, age(obj)]


def _role_ref(obj: JsonObject) -> list[Any]:
    reference = obj.get("roleRef") or {}
    return [f"{reference.get('kind')}/{reference.get('name')}", age(obj)]


_POD = ("Ready", "Status", "Restarts", "Age", "IP*", "Node*", "Nominated Node*", "Readiness Gates*")
_NODE = (
    "Status",
    "Roles",
    "Age",
    "Version",
    "Internal-IP*",
    "External-IP*",
    "OS-Image*",
    "Kernel-Version*",
    "Container-Runtime*",
)
_EVENT = (
    "Last Seen",
    "Type",
    "Reason",
    "Object",
    "Subobject*",
    "Source*",
    "Message",
    "First Seen*",
    "Count*#",
    "Name*",
)
_VOLUME = (
    "Capacity",
    "Access Modes",
    "Reclaim Policy",
    "Status",
    "Claim",
    "StorageClass",
    "VolumeAttributesClass",
    "Reason",
    "Age",
)
_CLAIM = ("Status", "Volume", "Capacity", "Access Modes", "StorageClass", "VolumeAttributesClass", "Age")
_RBAC = "rbac.authorization.k8s.io"

_PRINTERS: dict[tuple[str, str], tuple[tuple[str, ...], Cells]] = {
    ("", "pods"): (_POD, _pod),
    ("", "nodes"): (_NODE, _node),
    ("", "events"): (_EVENT, _event),
    ("", "namespaces"): (("Status", "Age"), lambda o: [(o.get("status") or {}).get("phase", ""), age(o)]),
    ("", "services"): (("Type", "Cluster-IP", "External-IP", "Port(s)", "Age", "Selector*"), _service),
    ("", "configmaps"): (("Data#", "Age"), _data),
    ("", "secrets"): (("Type", "Data#", "Age"), lambda o: [o.get("type"), *_data(o)]),
    ("", "serviceaccounts"): (("Secrets#", "Age"), lambda o: [len(o.get("secrets") or ()), age(o)]),
    ("", "persistentvolumeclaims"): (_CLAIM, _claim),
    ("", "persistentvolumes"): (_VOLUME, _volume),
    ("apps", "deployments"): (("Ready", "Up-to-date#", "Available#", "Age"), _workload),
    ("coordination.k8s.io", "leases"): (
        ("Holder", "Age"),
        lambda o: [(o.get("spec") or {}).get("holderIdentity", ""), age(o)],
    ),
    ("scheduling.k8s.io", "priorityclasses"): (
        ("Value#", "Global-Default", "Age", "PreemptionPolicy"),
        lambda o: [o.get("value"), bool(o.get("globalDefault")), age(o), o.get("preemptionPolicy")],
    ),
    ("storage.k8s.io", "storageclasses"): (
        ("Provisioner", "ReclaimPolicy", "VolumeBindingMode", "AllowVolumeExpansion", "Age"),
        _storage_class,
    ),
    ("policy", "poddisruptionbudgets"): (("Min Available", "Max Unavailable", "Allowed Disruptions#", "Age"), _budget),
    ("apiextensions.k8s.io", "customresourcedefinitions"): (
        ("Created At",),
        lambda o: [o["metadata"]["creationTimestamp"]],
    ),
    (_RBAC, "roles"): (("Created At",), lambda o: [o["metadata"]["creationTimestamp"]]),
    (_RBAC, "clusterroles"): (("Created At",), lambda o: [o["metadata"]["creationTimestamp"]]),
    (_RBAC, "rolebindings"): (("Role", "Age"), _role_ref),
    (_RBAC, "clusterrolebindings"): (("Role", "Age"), _role_ref),
}
