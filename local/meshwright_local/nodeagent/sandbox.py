"""What the parts of one running pod share: its object, its place on this machine, and what it may ask of its node."""

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

from meshwright_local.kube.client import ApiClient, ApiError
from meshwright_local.kube.recorder import EventRecorder
from meshwright_local.kube.resources import SECRETS, Object, Resource
from meshwright_local.nodeagent.node import NodeSpec

API_ERRORS = (ApiError, aiohttp.ClientError, TimeoutError, OSError)
"""What a request may end with that may go better later."""


class PodSpecError(Exception):
    """Something in a pod's spec that is missing (yet), or cannot be had here; the message names it."""

    def __init__(self, message: str, reason: str = "CreateContainerConfigError") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class Host:
    """What all pods of a node share."""

    client: ApiClient
    spec: NodeSpec
    directory: Path
    recorder: EventRecorder
    probe_session: aiohttp.ClientSession
    """Without credentials, unlike the client's."""
    restart_backoff_seconds: float
    """Seconds before the second restart of a container; doubled each time. The first restart is immediate."""
    isolated: bool
    """Whether containers see their volumes mounted; else paths are rewritten."""
    online: asyncio.Event
    """Set while the node may tell the API server anything."""


class Sandbox:
    """A pod on this node.

    Attributes:
        pod: The newest version of the object that is known.
        directory: Everything of the pod on this machine, directly or by links.
        home: HOME of its containers, and where they start.
        hosts: What its containers see as /etc/hosts, where they have a view of their own.
        temporary: TMPDIR of its containers. The name is short: sockets there must have less than 108 bytes.
        account: Where its service account's credentials are, if it gets any.
        changed: To be called whenever the state of a container changed.
    """

    def __init__(self, host: Host, pod: Object, ip: str) -> None:
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

    def event(self, kind: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        """Tell people what happened to the pod."""
        self.host.recorder.emit(self.pod, kind, reason, message)

    async def entries(self, resource: Resource, reference: Object) -> dict[str, bytes]:
        """The entries of a config map or secret that a spec refers to; empty when it is missing and optional.

        Raises:
            PodSpecError: It does not exist and is needed.
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
    """A new temporary directory that a link of a pod's directory remembers; the old one if it is still there."""
    if not link.is_dir():
        link.unlink(missing_ok=True)
        link.symlink_to(tempfile.mkdtemp(prefix="mw-", dir=parent))
    return link.readlink()


def discard_links(directory: Path) -> None:
    """Remove what a pod's directory remembers to lie elsewhere: for a pod none of whose processes is left."""
    for link in (directory / "temporary", *directory.glob("volumes/*")):
        if link.is_symlink():
            shutil.rmtree(link.readlink(), ignore_errors=True)
