"""One shared watch per resource for every component of a process."""

from __future__ import annotations

import asyncio

from meshwright.local.client import ApiClient
from meshwright.local.reflector import Reflector
from meshwright.local.resources import Resource


class Informers:
    """Reflectors by resource, each started once however many components ask for it."""

    def __init__(self, client: ApiClient) -> None:
        self.client = client
        self._reflectors: dict[Resource, Reflector] = {}
        self._tasks: dict[Resource, asyncio.Task[None]] = {}

    def get(self, resource: Resource) -> Reflector:
        """The reflector of a resource. It begins with `start`, so that listeners added before miss nothing."""
        if resource not in self._reflectors:
            self._reflectors[resource] = Reflector(self.client, resource)
        return self._reflectors[resource]

    def start(self) -> None:
        """Start every reflector that was asked for and does not run yet."""
        for resource, reflector in self._reflectors.items():
            if resource not in self._tasks:
                self._tasks[resource] = asyncio.create_task(reflector.run(), name=f"watch {resource.plural}")

    async def synced(self) -> None:
        """Wait until every started reflector has its first list."""
        for resource in self._tasks:
            await self._reflectors[resource].synced.wait()

    async def stop(self) -> None:
        """Stop every reflector."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
