"""Response formats of objects: complete, only metadata, or rows of a Table (kubectl get); as JSON or YAML.

The columns of most built-in kinds are JSONPaths, as for custom resources; a few are functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson
import yaml

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.resource_types import Column, Resource
from meshwright_local.apiserver.rest.ages import since
from meshwright_local.apiserver.rest.pod_columns import pod_gates, pod_ready, pod_reason, pod_restarts
from meshwright_local.apiserver.status_errors import ApiError
from meshwright_local.apiserver.store import Stored

_META = "meta.k8s.io/v1"
_FORMS = {None: "", "Table": "Table", "PartialObjectMetadata": "Partial", "PartialObjectMetadataList": "Partial"}
_MEDIA = ("*/*", "application/*", "application/json", "application/yaml", "")
_NONE = "<none>"
_STEP = re.compile(
    r"""\[\?\(\s*@\.(?P<field>[\w.]+)\s*==\s*(?P<quote>['"])(?P<value>.*?)(?P=quote)\s*\)\]"""
    r"""|\[['"](?P<quoted>[^'"]+)['"]\]|\[(?P<index>-?\d+)\]|\[(?P<all>\*)\]"""
    r"""|\.?(?P<name>(?:[^.\[\]\\]|\\.)+)"""
)


@dataclass(frozen=True, slots=True)
class View:
    """Format of one resource's objects for one client; `form` is Table, Partial, or empty for complete objects."""

    resource: Resource
    form: str = ""
    yaml: bool = False
    include_object: str = "Metadata"

    def one(self, stored: Stored, *, header: bool = True) -> bytes:
        """Format one object. In a Table, `header` adds the column definitions."""
        if self.form == "Table":
            metadata = {"resourceVersion": stored.obj["metadata"]["resourceVersion"]}
            return orjson.dumps(self._table([stored.obj], metadata, header))
        if self.form:
            return orjson.dumps(_partial(stored.obj))
        same = stored.api_version == self.resource.group_version
        return stored.body if same else orjson.dumps(self._converted(stored.obj))

    def many(self, items: Sequence[Stored], metadata: KubeObject) -> bytes:
        """Format a list."""
        if self.form == "Table":
            return orjson.dumps(self._table([item.obj for item in items], metadata, True))
        kind, version = self.resource.list_kind, self.resource.group_version
        if self.form:
            kind, version = "PartialObjectMetadataList", _META
        head = orjson.dumps({"kind": kind, "apiVersion": version, "metadata": metadata})[:-1]
        form = self._item if not self.form and not self.resource.custom else self.one
        return head + b',"items":[' + b",".join(form(item) for item in items) + b"]}"

    def _item(self, stored: Stored) -> bytes:
        """Format an object of a built-in kind in a list, where it has no kind and no version, as in the real server."""
        head = orjson.dumps({"apiVersion": self.resource.group_version, "kind": self.resource.kind})[:-1] + b","
        if stored.body.startswith(head):
            return b"{" + stored.body[len(head) :]
        return orjson.dumps({key: value for key, value in stored.obj.items() if key not in ("apiVersion", "kind")})

    def bookmark(self, revision: int, *, initial_end: bool) -> bytes:
        """Return the object of a BOOKMARK event, which has only a revision."""
        metadata: KubeObject = {"resourceVersion": str(revision), "creationTimestamp": None}
        metadata |= {"annotations": {"k8s.io/initial-events-end": "true"}} if initial_end else {}
        obj = {"kind": self.resource.kind, "apiVersion": self.resource.group_version, "metadata": metadata}
        if self.form == "Table":
            return orjson.dumps(self._table([], {"resourceVersion": str(revision)}, False))
        return orjson.dumps(_partial(obj) if self.form else obj)

    def encode(self, body: bytes) -> tuple[bytes, str]:
        """Convert a JSON document to the client's format. Return it with its content type."""
        if self.yaml:
            return yaml.safe_dump(orjson.loads(body), sort_keys=True).encode(), "application/yaml"
        return body, "application/json"

    def _converted(self, obj: KubeObject) -> KubeObject:
        return {**obj, "apiVersion": self.resource.group_version}

    def _table(self, objects: Sequence[KubeObject], metadata: KubeObject, header: bool) -> KubeObject:
        columns = columns_of(self.resource)
        shown = {"Object": self._converted, "Metadata": _partial}.get(self.include_object)
        rows = [
            {"cells": [_cell(column, obj) for column in columns], **({"object": shown(obj)} if shown else {})}
            for obj in objects
        ]
        keys = ("name", "type", "priority", "format")
        described = [{"description": "", **{k: getattr(c, k) for k in keys}} for c in columns] if header else None
        table: KubeObject = {"kind": "Table", "apiVersion": _META, "metadata": metadata}
        return {**table, "columnDefinitions": described, "rows": rows}


def _partial(obj: KubeObject) -> KubeObject:
    return {"kind": "PartialObjectMetadata", "apiVersion": _META, "metadata": obj["metadata"]}


def negotiate(resource: Resource, accept: str, include_object: str = "") -> View:
    """Return the view for an Accept header: the first of its choices that is supported; raises ApiError 406."""
    for choice in accept.split(","):
        media, *parameters = (part.strip() for part in choice.split(";"))
        wanted = dict(p.partition("=")[::2] for p in parameters)
        form = _FORMS.get(wanted.get("as"))
        known = form == "" or (form and (wanted.get("g"), wanted.get("v")) == ("meta.k8s.io", "v1"))
        if media in _MEDIA and known:
            return View(resource, form or "", media == "application/yaml", include_object or "Metadata")
    text = "only the following media types are accepted: application/json, application/yaml"
    raise ApiError(406, "NotAcceptable", text)


@lru_cache(maxsize=1024)
def _steps(path: str) -> tuple[re.Match[str], ...]:
    return tuple(_STEP.finditer(path.strip("{}")))


def first(obj: Any, path: str) -> Any:
    """Return the first value at a JSONPath such as `.status.conditions[?(@.type=="Ready")].status`, or None."""
    values = [obj]
    for step in _steps(path):
        values = [found for value in values for found in _follow(value, step)]
    return values[0] if values else None


def _follow(value: Any, step: re.Match[str]) -> list[Any]:
    if step["field"]:
        key = "." + step["field"]
        return [item for item in value if str(first(item, key)) == step["value"]] if isinstance(value, list) else []
    if step["all"]:
        return list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list) else []
    if step["index"]:
        index = int(step["index"])
        return [value[index]] if isinstance(value, list) and -len(value) <= index < len(value) else []
    name = step["quoted"] or re.sub(r"\\(.)", r"\1", step["name"])
    return [value[name]] if isinstance(value, dict) and name in value else []


def _cell(column: Column, obj: KubeObject) -> Any:
    if column.path in _COMPUTED:
        return _COMPUTED[column.path](obj)
    value = first(obj, column.path)
    if value is None:
        return column.missing
    if column.type == "date":
        return since(value)
    if column.type in ("integer", "number", "boolean"):
        return value if isinstance(value, int | float) else None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _node_status(obj: KubeObject) -> str:
    ready = first(obj, '.status.conditions[?(@.type=="Ready")].status')
    cordoned = ",SchedulingDisabled" if (obj.get("spec") or {}).get("unschedulable") else ""
    return {"True": "Ready", None: "Unknown"}.get(ready, "NotReady") + cordoned


def _node_roles(obj: KubeObject) -> str:
    prefix = "node-role.kubernetes.io/"
    return (
        ",".join(sorted(k[len(prefix) :] for k in obj["metadata"].get("labels") or {} if k.startswith(prefix))) or _NONE
    )


def _last_seen(obj: KubeObject) -> str:
    moments = (first(obj, f".{p}") for p in ("series.lastObservedTime", "lastTimestamp", "firstTimestamp", "eventTime"))
    return since(next(filter(None, moments), None) or obj["metadata"].get("creationTimestamp"))


def _about(obj: KubeObject) -> str:
    about = obj.get("involvedObject") or {}
    return f"{about.get('kind', '').lower()}/{about.get('name', '')}"


def _ports(obj: KubeObject) -> str:
    return ",".join(f"{p['port']}/{p.get('protocol', 'TCP')}" for p in obj["spec"].get("ports") or ()) or _NONE


def _replicas(obj: KubeObject) -> str:
    return f"{(obj.get('status') or {}).get('readyReplicas', 0)}/{(obj.get('spec') or {}).get('replicas', 1)}"


def _completions(obj: KubeObject) -> str:
    return f"{(obj.get('status') or {}).get('succeeded', 0)}/{(obj.get('spec') or {}).get('completions', 1)}"


_MODES = {"ReadWriteOnce": "RWO", "ReadOnlyMany": "ROX", "ReadWriteMany": "RWX", "ReadWriteOncePod": "RWOP"}


def _access_modes(obj: KubeObject) -> str:
    """Return the modes that a bound volume has."""
    has = (obj.get("status") or {}).get("accessModes") or ()
    return ",".join(short for mode, short in _MODES.items() if mode in has) if _COMPUTED["volume"](obj) else ""


_COMPUTED: dict[str, Callable[[KubeObject], Any]] = {
    "ready": pod_ready,
    "reason": pod_reason,
    "restarts": pod_restarts,
    "gates": pod_gates,
    "node": _node_status,
    "roles": _node_roles,
    "seen": _last_seen,
    "about": _about,
    "ports": _ports,
    "replicas": _replicas,
    "completions": _completions,
    "volume": lambda obj: (obj.get("spec") or {}).get("volumeName") or "",
    "capacity": lambda obj: first(obj, ".status.capacity.storage") or "",
    "modes": _access_modes,
    "class": lambda obj: (obj.get("spec") or {}).get("storageClassName") or "",
    "unset": lambda obj: "<unset>",
    "holder": lambda obj: first(obj, ".spec.holderIdentity") or "",
    "least": lambda obj: str(first(obj, ".spec.minAvailable") or "N/A"),
    "most": lambda obj: str(first(obj, ".spec.maxUnavailable") or "N/A"),
    "role": lambda obj: f"{obj['roleRef']['kind']}/{obj['roleRef']['name']}",
    "default": lambda obj: str(bool(obj.get("globalDefault"))).lower(),
    "message": lambda obj: (obj.get("message") or "").strip(),
    "data": lambda obj: len(obj.get("data") or {}) + len(obj.get("binaryData") or {}),
}
# Columns: name, path or function, separated by "=". A star: only with `-o wide`; a hash: a number.
_AGE = "Age=.metadata.creationTimestamp"
_COLUMNS: dict[tuple[str, str], tuple[str, ...]] = {
    ("", "pods"): (
        "Ready=ready",
        "Status=reason",
        "Restarts=restarts",
        _AGE,
        "IP=.status.podIP*",
        "Node=.spec.nodeName*",
    )
    + ("Nominated Node=.status.nominatedNodeName*", "Readiness Gates=gates*"),
    ("", "nodes"): ("Status=node", "Roles=roles", _AGE, "Version=.status.nodeInfo.kubeletVersion")
    + ('Internal-IP=.status.addresses[?(@.type=="InternalIP")].address*', "External-IP=none*")
    + ("OS-Image=.status.nodeInfo.osImage*", "Kernel-Version=.status.nodeInfo.kernelVersion*")
    + ("Container-Runtime=.status.nodeInfo.containerRuntimeVersion*",),
    ("", "events"): ("Last Seen=seen", "Type=.type", "Reason=.reason", "Object=about", "Message=message"),
    ("", "namespaces"): ("Status=.status.phase", _AGE),
    ("", "services"): ("Type=.spec.type", "Cluster-IP=.spec.clusterIP", "External-IP=.spec.externalName")
    + ("Port(s)=ports", _AGE),
    ("", "configmaps"): ("Data=data#", _AGE),
    ("", "secrets"): ("Type=.type", "Data=data#", _AGE),
    ("apps", "deployments"): ("Ready=replicas", "Up-to-date=.status.updatedReplicas#")
    + ("Available=.status.availableReplicas#", _AGE),
    ("", "persistentvolumeclaims"): ("Status=.status.phase", "Volume=volume", "Capacity=capacity")
    + ("Access Modes=modes", "StorageClass=class", "VolumeAttributesClass=unset", _AGE, "VolumeMode=.spec.volumeMode*"),
    ("apps", "replicasets"): ("Desired=.spec.replicas#", "Current=.status.replicas#")
    + ("Ready=.status.readyReplicas#", _AGE),
    ("coordination.k8s.io", "leases"): ("Holder=holder", _AGE),
    ("policy", "poddisruptionbudgets"): ("Min Available=least", "Max Unavailable=most")
    + ("Allowed Disruptions=.status.disruptionsAllowed#", _AGE),
    ("rbac.authorization.k8s.io", "roles"): ("Created At=.metadata.creationTimestamp",),
    ("rbac.authorization.k8s.io", "clusterroles"): ("Created At=.metadata.creationTimestamp",),
    ("rbac.authorization.k8s.io", "rolebindings"): ("Role=role", _AGE),
    ("rbac.authorization.k8s.io", "clusterrolebindings"): ("Role=role", _AGE),
    ("node.k8s.io", "runtimeclasses"): ("Handler=.handler", _AGE),
    ("scheduling.k8s.io", "priorityclasses"): ("Value=.value#", "Global-Default=default", _AGE)
    + ("PreemptionPolicy=.preemptionPolicy",),
    ("batch", "jobs"): ("Completions=completions", _AGE),
    ("apiextensions.k8s.io", "customresourcedefinitions"): ("Created At=.metadata.creationTimestamp",),
}


def columns_of(resource: Resource) -> list[Column]:
    """Return the columns of a resource."""
    name = Column("Name", "string", ".metadata.name", 0, "name")
    if resource.custom:
        return [name, *(resource.columns or (Column("Age", "date", ".metadata.creationTimestamp"),))]
    columns = [] if resource.key == ("", "events") else [name]
    for row in _COLUMNS.get(resource.key, (_AGE,)):
        title, _, path = row.rstrip("*#").partition("=")
        kind = "date" if title == "Age" else "integer" if row[-1] == "#" else "string"
        columns.append(Column(title, kind, path, int(row[-1] == "*"), missing=0 if kind == "integer" else _NONE))
    return columns
