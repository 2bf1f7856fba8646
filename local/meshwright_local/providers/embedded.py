"""The embedded API server, in this process and event loop."""

from __future__ import annotations

import secrets
from pathlib import Path

from meshwright_local.apiserver.rest.server import ApiServer
from meshwright_local.apiserver.store import StoreInUseError
from meshwright_local.kube.kubeconfig import Connection
from meshwright_local.nodeagent.server.kubelet_server import KubeletTls
from meshwright_local.providers.base import ControlPlane, ProviderError, serving_files


class EmbeddedProvider:
    """Runs the embedded API server. The scheduler, controllers and nodes are embedded too.

    Args:
        directory: Directory of certificates and, unless `in_memory`, of all objects.
        in_memory: Keep all objects only in memory.
        port: Port on 127.0.0.1; 0 selects a free port.
    """

    def __init__(self, directory: Path, *, in_memory: bool, port: int = 0) -> None:
        self._directory = directory
        self._in_memory = in_memory
        self._port = port
        self._server: ApiServer | None = None

    async def start(self) -> ControlPlane:
        """Serve."""
        tls = serving_files(self._directory / "certificates")
        kubelet = KubeletTls(tls.certificate, tls.key, secrets.token_urlsafe(32))
        objects = None if self._in_memory else self._directory / "objects"
        self._server = ApiServer(objects, kubelet_token=kubelet.token, tls=tls)
        try:
            await self._server.start("127.0.0.1", self._port)
        except StoreInUseError as error:
            raise ProviderError(f"{self._directory}: another API server has these objects open; stop it") from error
        except OSError as error:
            raise ProviderError(f"port {self._port}: {error.strerror}; choose another, or 0 for a free one") from error
        connection = Connection(self._server.url, self._server.token, self._server.ca_pem)
        return ControlPlane(connection, kubelet)

    async def stop(self) -> None:
        """Stop serving."""
        if self._server is not None:
            await self._server.stop()
            self._server = None
