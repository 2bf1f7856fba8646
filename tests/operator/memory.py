"""An API server in a dict, as far as the operator's own calls go, without any waiting: for thousands of reconciles."""

from __future__ import annotations

import marshal
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from typing import Any

from meshwright.api.labels import PLURAL
from meshwright.api.objects import KubeObject
from meshwright_operator.kube.client import ApiError, KubeClient, Page
from meshwright_operator.timestamps import format_time

_WITHOUT_REFERENCES = 2
"""The newest version of `marshal` that writes an object twice if it is there twice."""
Refuse = Callable[[str, KubeObject], ApiError | None]


class MemoryCluster(KubeClient):
    """Objects by path, optimistic locking, and a watch that tells at once whom it may tell."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._version = 0
        self.objects: dict[str, KubeObject] = {}
        self.refuse: Refuse = lambda path, body: None
        """Asked before every create; an error it gives is raised."""
        self.watchers: list[Callable[[str, KubeObject], None]] = []
        """Told (`ADDED` | `MODIFIED` | `DELETED`, object) of jobs and pods."""
        self.writes = 0
        self.requests: list[tuple[str, str]] = []
        """(verb, path) of every call, with the verbs of roles: get, list, create, patch and delete."""
        self.missing_claims: set[str] = set()
        """Names of claims that do not exist. All others do, also without an object."""
        self.on_pod_change: Callable[[KubeObject, KubeObject], None] = lambda old, new: None
        """Told of every change of a pod by the operator, before it is visible."""

    @property
    def version(self) -> str:
        """The version of a list that begins now."""
        return str(self._version)

    async def get(self, path: str) -> KubeObject:
        self.requests.append(("get", path))
        if "/persistentvolumeclaims/" in path and path.rsplit("/", 1)[1] not in self.missing_claims:
            return {"kind": "PersistentVolumeClaim"}
        return copied(self._at(path))

    async def pages(self, path: str, **query: str) -> AsyncIterator[Page]:
        self.requests.append(("list", path))
        resource = path.rsplit("/", 1)[1]
        found = list(self.of(resource))
        if "labelSelector" in query:
            found = [obj for obj in found if _selected(obj["metadata"].get("labels") or {}, query["labelSelector"])]
        if resource == "events":
            uid = query["fieldSelector"].partition("=")[2].partition(",")[0]
            found = [event for event in found if (event.get("involvedObject") or {}).get("uid") == uid]
        elif "fieldSelector" in query:
            found = [obj for obj in found if obj["status"]["phase"] not in ("Succeeded", "Failed")]
        yield Page(found, "")

    async def create(self, path: str, body: KubeObject) -> KubeObject:
        where = f"{path}/{body['metadata']['name']}"
        self.requests.append(("create", where))
        if (error := self.refuse(path, body)) is not None:
            raise error
        if where in self.objects:
            raise ApiError(409, "AlreadyExists", f"{where} exists")
        return self.put(where, body)

    async def merge_patch(self, path: str, body: KubeObject) -> KubeObject:
        self.requests.append(("patch", path))
        path = path.removesuffix("/status")
        old = self._at(path)
        metadata = body.get("metadata") or {}
        wanted = metadata.get("uid", old["metadata"]["uid"]), metadata.get("resourceVersion")
        if wanted[0] != old["metadata"]["uid"] or wanted[1] not in (None, old["metadata"]["resourceVersion"]):
            raise ApiError(409, "Conflict", f"{path} has changed")
        new = copied(old)
        _merge(new, {**body, "metadata": {"labels": metadata.get("labels") or {}}})
        if "/pods/" in path:
            self.on_pod_change(old, new)
        return self.update(path, new)

    async def delete(self, path: str, uid: str, version: str = "") -> KubeObject | None:
        self.requests.append(("delete", path))
        obj = self.objects.get(path)
        if obj is None or obj["metadata"]["uid"] != uid or version not in ("", obj["metadata"]["resourceVersion"]):
            return None
        self.writes += 1
        if "/pods/" in path and obj["spec"].get("nodeName") and obj["status"]["phase"] in ("Pending", "Running"):
            if "deletionTimestamp" not in obj["metadata"]:
                obj["metadata"]["deletionTimestamp"] = format_time(self._now())
                self.update(path, obj)
        else:
            self.remove(path)
        return {}

    def of(self, resource: str) -> Iterator[KubeObject]:
        """Every object of a resource, such as `pods`."""
        return (obj for path, obj in list(self.objects.items()) if path.rsplit("/", 2)[1] == resource)

    def put(self, path: str, body: KubeObject) -> KubeObject:
        """A new object, with what a server adds."""
        obj = copied(body)
        obj["metadata"] |= {
            "uid": f"uid-{self._version}",
            "creationTimestamp": format_time(self._now()),
            "generation": 1,
        }
        obj["metadata"].setdefault("namespace", "default")
        obj.setdefault("status", {"phase": "Pending"} if "/pods/" in path else {})
        return self.update(path, obj, "ADDED")

    def stamp(self, obj: KubeObject) -> None:
        """Give the object a new version."""
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)

    def update(self, path: str, obj: KubeObject, kind: str = "MODIFIED") -> KubeObject:
        """The object as it is now, in a new version."""
        self.stamp(obj)
        self.writes += 1
        self.objects[path] = obj
        self._tell(kind, path, obj)
        return copied(obj)

    def remove(self, path: str) -> None:
        """The object is gone."""
        obj = self.objects.pop(path)
        self.stamp(obj)
        self._tell("DELETED", path, obj)

    def _tell(self, kind: str, path: str, obj: KubeObject) -> None:
        if f"/{PLURAL}/" in path or "/pods/" in path:
            for watcher in self.watchers:
                watcher(kind, copied(obj))

    def _at(self, path: str) -> KubeObject:
        if path not in self.objects:
            raise ApiError(404, "NotFound", f"{path} is not there")
        return self.objects[path]


def copied(value: Any) -> Any:
    """A copy of JSON: many times faster than `copy.deepcopy`."""
    return marshal.loads(marshal.dumps(value, _WITHOUT_REFERENCES))  # noqa: S302 what it has just written


def _selected(labels: dict[str, str], selector: str) -> bool:
    """Whether labels match a selector of the forms `key`, `!key` and `key=value`."""
    key, _, value = selector.partition("=")
    if key.startswith("!"):
        return key[1:] not in labels
    return key in labels and value in ("", labels[key])


def _merge(target: KubeObject, patch: KubeObject) -> None:
    """RFC 7386."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = copied(value)
