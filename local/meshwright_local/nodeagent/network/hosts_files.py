"""Names of services and pods, as a cluster's DNS would resolve them, in each pod's own /etc/hosts.

`SERVICE.NAMESPACE` resolves to every ready pod that the service selects, `HOSTNAME.SERVICE.NAMESPACE` to the one pod
with that `spec.hostname` and `spec.subdomain`. Pods that are not ready are included if `publishNotReadyAddresses` is
set. Each name can end in `.svc.cluster.local`, `.svc` or neither, and the namespace can be omitted in pods of that
namespace, as with the search path of a cluster's resolv.conf. Services with a cluster IP resolve to their pods as
headless ones do: nothing listens at cluster IPs here, so clients must use the pods' own ports.

Files are rewritten in place, because containers mount them by inode. One set of watches serves all nodes of a cluster.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from meshwright.api.objects import KubeObject
from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.reflector import Reflector
from meshwright_local.kube.resources import PODS, SERVICES, has_ended

logger = logging.getLogger(__name__)

_PAUSE = 0.02
_LOCAL = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"

Records = dict[str, list[tuple[str, str]]]
"""Namespace -> (name without its namespace, address)."""


class ClusterNames:
    """Updates the hosts files of pods."""

    def __init__(self) -> None:
        self._users = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._reflectors: tuple[Reflector, ...] = ()
        self._changed = asyncio.Event()
        self._records: Records = {}
        self._files: dict[Path, tuple[str, str]] = {}

    async def join(self, client: ApiClient) -> None:
        """Subscribe a node. Return when the names are known."""
        self._users += 1
        if self._users == 1:
            self._reflectors = (Reflector(client, SERVICES), Reflector(client, PODS))
            for reflector in self._reflectors:
                reflector.listeners.append(lambda _: self._changed.set())
            work = (*(reflector.run() for reflector in self._reflectors), self._follow())
            self._tasks = [asyncio.create_task(task) for task in work]
        for reflector in self._reflectors:
            await reflector.synced.wait()

    async def leave(self) -> None:
        """Unsubscribe a node."""
        self._users -= 1
        if self._users == 0:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def add(self, path: Path, pod: KubeObject, address: str) -> None:
        """Write a pod's hosts file, and update it until `remove`."""
        metadata, spec = pod["metadata"], pod["spec"]
        own = str(spec.get("hostname") or metadata["name"])
        if spec.get("subdomain"):
            own = f"{own}.{spec['subdomain']}.{metadata['namespace']}.svc.cluster.local {own}"
        lines = [f"{address}\t{own}\n"]
        lines += [f"{entry['ip']}\t{' '.join(entry['hostnames'])}\n" for entry in spec.get("hostAliases") or ()]
        self._files[path] = (metadata["namespace"], _LOCAL + "".join(lines))
        self._write(path)

    def remove(self, path: Path) -> None:
        """Stop updating the file of a pod that is gone."""
        self._files.pop(path, None)

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(_PAUSE)
            self._changed.clear()
            services, pods = (reflector.objects.values() for reflector in self._reflectors)
            found = records(services, pods)
            if found != self._records:
                self._records = found
                for path in self._files:
                    self._write(path)

    def _write(self, path: Path) -> None:
        namespace, text = self._files[path]
        for place, found in self._records.items():
            for name, address in found:
                full = f"{name}.{place}"
                short = f" {name}" if place == namespace else ""
                text += f"{address}\t{full}.svc.cluster.local {full}.svc {full}{short}\n"
        try:
            # Write first, then truncate: a reader in between still finds every name.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            with open(descriptor, "wb", buffering=0) as file:
                file.truncate(file.write(text.encode()))
        except OSError as error:
            logger.warning("%s: names of other pods are out of date: %s", path, error)


def records(services: Iterable[KubeObject], pods: Iterable[KubeObject]) -> Records:
    """Return every name and address (pure)."""
    near = defaultdict(list)
    for pod in pods:
        if (pod.get("status") or {}).get("podIP") and not has_ended(pod):
            near[pod["metadata"]["namespace"]].append(pod)
    result: Records = defaultdict(list)
    for service in services:
        name, namespace, spec = service["metadata"]["name"], service["metadata"]["namespace"], service["spec"]
        for pod in near[namespace] if spec.get("selector") else ():
            if not _selects(spec["selector"], pod) or not (spec.get("publishNotReadyAddresses") or _ready(pod)):
                continue
            result[namespace].append((name, pod["status"]["podIP"]))
            if pod["spec"].get("hostname") and pod["spec"].get("subdomain") == name:
                result[namespace].append((f"{pod['spec']['hostname']}.{name}", pod["status"]["podIP"]))
    return dict(result)


def _selects(selector: Mapping[str, str], pod: KubeObject) -> bool:
    return selector.items() <= (pod["metadata"].get("labels") or {}).items()


def _ready(pod: KubeObject) -> bool:
    conditions = pod["status"].get("conditions") or ()
    deleting = pod["metadata"].get("deletionTimestamp")
    return not deleting and any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)
