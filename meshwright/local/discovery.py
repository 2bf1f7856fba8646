"""Which resources an API server serves, custom ones included."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.local.client import ApiClient, ApiError
from meshwright.local.resources import Resource


@dataclass(frozen=True, slots=True)
class Discovered:
    """A served resource and what can be done with it."""

    resource: Resource
    verbs: frozenset[str]


async def discover(client: ApiClient) -> list[Discovered]:
    """Every resource of every group, each group in its preferred version; subresources are left out."""
    found = await _version(client, "", "v1")
    groups = await client.request("GET", "/apis")
    for group in groups.get("groups") or ():
        found += await _version(client, group["name"], group["preferredVersion"]["version"])
    return found


async def _version(client: ApiClient, group: str, version: str) -> list[Discovered]:
    path = f"/apis/{group}/{version}" if group else f"/api/{version}"
    try:
        answer = await client.request("GET", path)
    except ApiError as error:
        # A group whose last definition went away between the two requests, or an aggregated server that is down.
        if error.status in (404, 503):
            return []
        raise
    return [
        Discovered(
            Resource(group, version, item["name"], item["kind"], bool(item["namespaced"])),
            frozenset(item.get("verbs") or ()),
        )
        for item in answer.get("resources") or ()
        if "/" not in item["name"]
    ]
