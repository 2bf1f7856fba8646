"""State that the parts of one running pod share: its object, its directories, and services of its node."""

from __future__ import annotations

import asyncio
import base64
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aiohttp

from meshwright.api.objects import KubeObject
from meshwright_local.kube.client import ApiClient, ApiError
from meshwright_local.kube.recorder import EventRecorder
from meshwright_local.kube.resources import SECRETS, Resource
from meshwright_local.nodeagent.node import NodeSpec

API_ERRORS = (ApiError, aiohttp.ClientError, TimeoutError, OSError)
"""Exceptions of a request that may succeed later."""


class PodSpecError(Exception):
    """Something in a pod's spec is missing (yet), or is not supported here; the message names it."""

    def __init__(self, message: str, reason: str = "CreateContainerConfigError") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class Host:
    """State that all pods of a node share."""

    client: ApiClient
    spec: NodeSpec
    directory: Path
    recorder: EventRecorder
    probe_session: aiohttp.ClientSession
    """A session without credentials, unlike the client's."""
    restart_backoff_seconds: float
    """Seconds before the second restart of a container; doubled each time. The first restart is immediate."""
    isolated: bool
    """Whether volumes are mounted in containers; else paths are rewritten."""
    online: asyncio.Event
    """Set while the node may send requests to the API server."""
    images: Path | None = None
    """Directory of the images that have their own root directory."""


class Sandbox:
    """A pod on this node.

    Attributes:
        pod: The newest known version of the object.
        directory: Directory of all files of the pod on this machine, directly or by links.
        home: HOME and working directory of its containers.
        hosts: The file that its containers see as /etc/hosts, if they have their own view of the file system.
        temporary: TMPDIR of its containers. Its name is short: socket paths must have less than 108 bytes.
        account: Directory of its service account's credentials, if it has any.
        changed: Callback for every change of a container's state.
        restart_all: Callback of a container whose end restarts all of them.
    """

    def __init__(self, host: Host, pod: KubeObject, ip: str) -> None:
        self.host, self.pod, self.ip = host, pod, ip
        metadata, spec = pod["metadata"], pod["spec"]
        self.uid, self.name, self.namespace = (str(metadata[key]) for key in ("uid", "name", "namespace"))
        self.hostname = str(spec.get("hostname") or self.name)[:63]
        self.grace = float(spec.get("terminationGracePeriodSeconds", 30))
        self.directory = host.directory / "pods" / self.uid
        self.home, self.hosts = self.directory / "home", self.directory / "hosts"
        self.home.mkdir(parents=True, exist_ok=True)
        self.temporary = linked_directory(self.directory / "temporary")
        self.volumes: dict[str, Path] = {}
        self.account: Path | None = None
        self.changed: Callable[[], None] = lambda: None
        self.restart_all: Callable[[], None] = lambda: None

    def event(self, kind: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        """Post an event about the pod."""
        self.host.recorder.emit(self.pod, kind, reason, message)

    async def entries(self, resource: Resource, reference: KubeObject) -> dict[str, bytes]:
        """Return the entries of a config map or secret; empty if it is missing and optional.

        Raises:
            PodSpecError: It does not exist and is required.
        """
        name = reference.get("secretName") or reference["name"]
        found = await self.host.client.find(resource, name, self.namespace)
        if found is None and not reference.get("optional"):
            raise PodSpecError(f'{resource.kind.lower()} "{name}" not found')
        data, binary = ((found or {}).get(part) or {} for part in ("data", "binaryData"))
        if resource is SECRETS:
            data, binary = {}, data
        plain = {key: value.encode() for key, value in data.items()}
        return plain | {key: base64.b64decode(value) for key, value in binary.items()}


def linked_directory(link: Path, parent: str | None = None) -> Path:
    """Return a temporary directory that a link in a pod's directory points to. Create it if it does not exist."""
    if not link.is_dir():
        link.unlink(missing_ok=True)
        link.symlink_to(tempfile.mkdtemp(prefix="mw-", dir=parent))
    return link.readlink()


def discard_links(directory: Path) -> None:
    """Remove the directories that links in a pod's directory point to, once none of its processes is left."""
    for link in (directory / "temporary", *directory.glob("volumes/*")):
        if link.is_symlink():
            shutil.rmtree(link.readlink(), ignore_errors=True)
