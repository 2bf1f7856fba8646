"""An existing cluster, given by its kubeconfig. Its control plane is neither started nor changed.

Its own nodes are used, which must have GPUs. `with_nodes` adds simulated nodes: node agents in this process that
register there and run the pods that its scheduler binds to them, with this user's permissions. Its API server must
reach this machine's loopback addresses, so it must run on this machine. Logs and exec work unless it requires a certain
authority for kubelets' certificates.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from meshwright.api.labels import GPU_RESOURCE
from meshwright_local.kube.client import REQUEST_ERRORS, ApiClient
from meshwright_local.kube.kubeconfig import Connection, KubeconfigError
from meshwright_local.kube.resources import NODES
from meshwright_local.nodeagent.server.kubelet_server import KubeletTls
from meshwright_local.providers.base import ControlPlane, ProviderError, serving_files
from meshwright_local.scheduler.resource_requests import allocatable


class KubeconfigProvider:
    """The cluster of one kubeconfig context (default: the current one).

    Args:
        path: The kubeconfig file.
        context: One of its contexts.
        directory: Directory for the certificates of added nodes; only needed with `with_nodes`.
        with_nodes: Allow simulated nodes.
    """

    def __init__(
        self, path: Path, context: str | None = None, *, directory: Path | None = None, with_nodes: bool = False
    ) -> None:
        if with_nodes and directory is None:
            raise ValueError("directory: needed for the nodes' certificates")
        self._path = path
        self._context = context
        self._directory = directory if with_nodes else None

    async def start(self) -> ControlPlane:
        """Read the file. Check that the cluster responds and has GPUs, unless simulated nodes are added."""
        try:
            connection = Connection.from_kubeconfig(self._path, self._context)
            async with ApiClient(connection, timeout=10) as client:
                nodes = (await client.list(NODES)).items
        except KubeconfigError as error:
            raise ProviderError(str(error)) from error
        except REQUEST_ERRORS as error:
            raise ProviderError(f"{self._path}: the cluster cannot be used: {error}") from error
        if self._directory is None and not any(allocatable(node)[GPU_RESOURCE] for node in nodes):
            what = f"none of its {len(nodes)} nodes offers {GPU_RESOURCE}"
            raise ProviderError(f"{connection.url}: {what}: install a device plugin, or add simulated nodes")
        return ControlPlane(connection, self._kubelet(connection), has_scheduler=True, has_controllers=True)

    def _kubelet(self, connection: Connection) -> KubeletTls | None:
        if self._directory is None:
            return None
        tls = serving_files(self._directory / "certificates")
        authority = self._directory / "certificates" / "cluster-ca.crt"
        authority.write_text(connection.ca_pem or tls.authority.read_text())
        # The token stays unknown: the API server authenticates with a client certificate of its cluster's authority.
        return KubeletTls(tls.certificate, tls.key, secrets.token_urlsafe(32), client_ca=authority)

    async def stop(self) -> None:
        """Nothing was started."""
