"""What a provider gives: a control plane to connect to, and what of it is still missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from meshwright.local.connection import Connection
from meshwright.local.nodeagent.kubelet import KubeletTls


class ProviderError(Exception):
    """A control plane could not be started; the message says what to do."""


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
            ProviderError: It cannot be started.
        """

    async def stop(self) -> None:
        """Stop what was started; may be called at any time, also after a failed start."""
