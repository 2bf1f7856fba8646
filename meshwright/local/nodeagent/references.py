"""Config maps and secrets that a pod refers to, fetched when they are needed."""

from __future__ import annotations

import base64

from meshwright.local.client import ApiClient
from meshwright.local.resources import CONFIG_MAPS, SECRETS, Resource


class MissingReferenceError(Exception):
    """A config map, secret, key or claim that a pod needs does not exist (yet)."""


class References:
    """Reads the objects of one namespace."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self.client = client
        self.namespace = namespace

    async def config_map(self, name: str, *, optional: bool = False) -> dict[str, bytes] | None:
        """The entries of a config map; None when it is missing and `optional`.

        Raises:
            MissingReferenceError: It does not exist and is needed.
        """
        return await self._entries(CONFIG_MAPS, name, optional)

    async def secret(self, name: str, *, optional: bool = False) -> dict[str, bytes] | None:
        """The entries of a secret, decoded; None when it is missing and `optional`.

        Raises:
            MissingReferenceError: It does not exist and is needed.
        """
        return await self._entries(SECRETS, name, optional)

    async def _entries(self, resource: Resource, name: str, optional: bool) -> dict[str, bytes] | None:
        found = await self.client.find(resource, name, self.namespace)
        if found is None:
            if optional:
                return None
            raise MissingReferenceError(f'{resource.kind.lower()} "{name}" not found')
        if resource is SECRETS:
            return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}
        binary = {key: base64.b64decode(value) for key, value in (found.get("binaryData") or {}).items()}
        return {**{key: value.encode() for key, value in (found.get("data") or {}).items()}, **binary}
