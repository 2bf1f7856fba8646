"""Names of services and pods, as a cluster's DNS would answer them, in each pod's own /etc/hosts.

`SERVICE.NAMESPACE` stands for every ready pod that the service selects, `HOSTNAME.SERVICE.NAMESPACE` for the one pod
whose `spec.hostname` and `spec.subdomain` say so; pods that are not ready count when `publishNotReadyAddresses` is set.
Each name can be written with `.svc.cluster.local`, `.svc` or nothing behind it, and without the namespace in that
namespace's pods: what the search path of a cluster's resolv.conf allows. Services with a cluster IP resolve to their
pods just as headless ones: nothing listens at cluster IPs here, so clients must use the pods' own ports.

Files are rewritten in place, since containers hold them by inode. One set of watches serves all nodes of a cluster, as
long as one of them wants it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.reflector import Reflector
from meshwright_local.kube.resources import PODS, SERVICES, Object

logger = logging.getLogger(__name__)

_PAUSE = 0.02
_LOCAL = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"

Records = dict[str, list[tuple[str, str]]]
"""Namespace → (name without its namespace, address)."""


class ClusterNames:
    """Keeps the hosts files of pods current."""

    def __init__(self) -> None:
        self._users = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._reflectors: tuple[Reflector, ...] = ()
        self._changed = asyncio.Event()
        self._records: Records = {}
        self._files: dict[Path, tuple[str, str]] = {}

    async def join(self, client: ApiClient) -> None:
        """A node wants names from now on; returns when they are known."""
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
        """A node that joined wants no more names."""
        self._users -= 1
        if self._users == 0:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def add(self, path: Path, pod: Object, address: str) -> None:
        """Write a pod's hosts file, and keep it current until it is removed."""
        metadata, spec = pod["metadata"], pod["spec"]
        own = str(spec.get("hostname") or metadata["name"])
        if spec.get("subdomain"):
            own = f"{own}.{spec['subdomain']}.{metadata['namespace']}.svc.cluster.local {own}"
        lines = [f"{address}\t{own}\n"]
        lines += [f"{entry['ip']}\t{' '.join(entry['hostnames'])}\n" for entry in spec.get("hostAliases") or ()]
        self._files[path] = (metadata["namespace"], _LOCAL + "".join(lines))
        self._write(path)

    def remove(self, path: Path) -> None:
        """The pod is gone."""
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
            # One write and then the cut: whoever reads meanwhile finds every name.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            with open(descriptor, "wb", buffering=0) as file:
                file.truncate(file.write(text.encode()))
        except OSError as error:
            logger.warning("%s: names of other pods are out of date: %s", path, error)


def records(services: Iterable[Object], pods: Iterable[Object]) -> Records:
    """Every name and address (pure)."""
    near = defaultdict(list)
    for pod in pods:
        if (pod.get("status") or {}).get("podIP") and pod["status"].get("phase") not in ("Succeeded", "Failed"):
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


def _selects(selector: Mapping[str, str], pod: Object) -> bool:
    return selector.items() <= (pod["metadata"].get("labels") or {}).items()


def _ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions") or ()
    deleting = pod["metadata"].get("deletionTimestamp")
    return not deleting and any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)
