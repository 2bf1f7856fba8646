"""What a provider gives: a control plane to connect to, and what of it is still missing."""

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
    """As its administrator."""
    kubelet: KubeletTls | None
    """With what nodes of ours serve its API server; None: it has nodes of its own and gets none of ours."""
    has_scheduler: bool = False
    has_controllers: bool = False


class Provider(Protocol):
    """Starts a control plane, or finds one."""

    async def start(self) -> ControlPlane:
        """Start it; returns when its API server answers.

        Raises:
            ProviderError: It cannot be started or used.
        """

    async def stop(self) -> None:
        """Stop what was started; may be called at any time, also after a failed start."""


def serving_files(directory: Path, *, client: bool = False) -> certificates.TlsFiles:
    """A new certificate of the directory's authority, which is made when it is not there.

    The authority stays the same over restarts, so kubeconfig files that were copied elsewhere stay good. With `client`
    the certificate also serves to connect to nodes.
    """
    authority = certificates.load_authority(directory)
    certificate, key = authority.issue("meshwright-local", client=client)
    files = certificates.TlsFiles(directory / "serving.crt", directory / "serving.key", directory / "ca.crt")
    write_private(files.certificate, certificate)
    write_private(files.key, key)
    return files
