"""The interface of providers: each starts a control plane and reports which components it includes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from meshwright_local.apiserver.auth import certificates
from meshwright_local.kube.kubeconfig import Connection, write_private
from meshwright_local.nodeagent.server.kubelet_server import KubeletTls


class ProviderError(Exception):
    """A control plane could not be started or used; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """A running control plane."""

    connection: Connection
    """Address and the administrator's credentials."""
    kubelet: KubeletTls | None
    """TLS settings of simulated nodes for its API server; None: it has its own nodes and gets no simulated ones."""
    has_scheduler: bool = False
    has_controllers: bool = False


class Provider(Protocol):
    """Starts a control plane, or connects to one."""

    async def start(self) -> ControlPlane:
        """Start it. Return when its API server responds.

        Raises:
            ProviderError: It cannot be started or used.
        """

    async def stop(self) -> None:
        """Stop what was started. It may be called at any time, also after a failed start."""


def serving_files(directory: Path, *, client: bool = False) -> certificates.TlsFiles:
    """Write a new certificate, signed by the directory's authority, which is created if it does not exist.

    The authority stays the same across restarts, so copies of the kubeconfig file stay valid. With `client`, the
    certificate also authenticates the API server to nodes.
    """
    authority = certificates.load_authority(directory)
    certificate, key = authority.issue("meshwright-local", client=client)
    files = certificates.TlsFiles(directory / "serving.crt", directory / "serving.key", directory / "ca.crt")
    write_private(files.certificate, certificate)
    write_private(files.key, key)
    return files
