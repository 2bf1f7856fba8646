"""A cluster that exists already, by its kubeconfig: nothing is started and nothing is added to it."""

from __future__ import annotations

from pathlib import Path

from meshwright.local.connection import Connection, KubeconfigError
from meshwright.local.providers.base import ControlPlane, ProviderError


class KubeconfigProvider:
    """The cluster of one kubeconfig context (default: the current one)."""

    def __init__(self, path: Path, context: str | None = None) -> None:
        self._path = path
        self._context = context

    async def start(self) -> ControlPlane:
        """Read the file."""
        try:
            connection = Connection.from_kubeconfig(self._path, self._context)
        except KubeconfigError as error:
            raise ProviderError(str(error)) from error
        return ControlPlane(connection, None, has_scheduler=True, has_controllers=True)

    async def stop(self) -> None:
        """Nothing was started."""
