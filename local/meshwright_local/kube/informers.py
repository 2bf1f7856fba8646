"""One shared watch per resource for every component of a process."""

from __future__ import annotations

import asyncio

from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.reflector import Reflector
from meshwright_local.kube.resources import Resource


class Informers:
    """Reflectors by resource, each started once however many components ask for it."""

    def __init__(self, client: ApiClient) -> None:
        self.client = client
        self._reflectors: dict[Resource, Reflector] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def get(self, resource: Resource) -> Reflector:
        """The reflector of a resource. It begins with `start`, so that listeners added before miss nothing."""
        return self._reflectors.setdefault(resource, Reflector(self.client, resource))

    def start(self) -> None:
        """Start every reflector that was asked for."""
        self._tasks = [asyncio.create_task(reflector.run()) for reflector in self._reflectors.values()]

    async def stop(self) -> None:
        """Stop every reflector."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
