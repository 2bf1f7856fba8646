"""Every pod that holds something: the jobs' own from the operator's cache, everybody else's from the API server.

The cache has its own pods by watch and by the answers to its own writes, so only what is foreign is asked for: listing
every pod for every placement would cost the API server more than all else that the operator does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from meshwright.api.labels import LABEL_JOB
from meshwright.planner.pods import HOSTNAME_LABEL
from meshwright_operator.cache import Cache
from meshwright_operator.claims import Claim, read_claim
from meshwright_operator.cluster import ApiError, Cluster, pods_path

ACTIVE = "status.phase!=Succeeded,status.phase!=Failed"
QUICK_SECONDS = 0.02
"""A listing that takes no longer is made anew for every placement."""
REUSED = 10.0
"""One that takes longer serves for so many times its own duration: most of the time is not spent on listing."""


class Census:
    """Counts what pods hold, for one placement after another."""

    def __init__(self, cluster: Cluster, cache: Cache, namespaces: Sequence[str]) -> None:
        self._cluster = cluster
        self._cache = cache
        self._namespaces = namespaces
        self._foreign: list[Claim] = []
        self._serves_until = float("-inf")

    async def claims(self) -> list[Claim]:
        """What every pod holds.

        Raises:
            ApiError: the pods of others could not be listed.
        """
        started = time.monotonic()
        if started >= self._serves_until:
            self._foreign = await self._list_foreign()
            ended = time.monotonic()
            took = ended - started
            self._serves_until = ended + REUSED * took if took > QUICK_SECONDS else started
        return [*self._cache.claims(), *self._foreign]

    async def _list_foreign(self) -> list[Claim]:
        """Pods that the watch does not show.

        An operator that serves a few namespaces does not see the jobs of others, nor may it be allowed to list their
        pods; the scheduler, which checks every pinned pod, then has the last word.
        """
        not_ours = {"labelSelector": f"!{LABEL_JOB}", "fieldSelector": ACTIVE}
        try:
            found = await self._list(None, not_ours)
            if self._namespaces:
                elsewhere = ",".join([ACTIVE, *(f"metadata.namespace!={name}" for name in self._namespaces)])
                found += await self._list(None, {"labelSelector": LABEL_JOB, "fieldSelector": elsewhere})
        except ApiError as error:
            if error.code != 403 or not self._namespaces:
                raise
            found = [claim for name in self._namespaces for claim in await self._list(name, not_ours)]
        return found

    async def _list(self, namespace: str | None, query: Mapping[str, str]) -> list[Claim]:
        node_by_hostname = self._node_by_hostname()
        found: list[Claim] = []
        async for page in self._cluster.pages(pods_path(namespace), **query):
            found += [claim for obj in page.items if (claim := read_claim(obj, node_by_hostname)) is not None]
        return found

    def _node_by_hostname(self) -> dict[str, str]:
        labels = {name: node["metadata"].get("labels") for name, node in self._cache.nodes.items()}
        named = ((own.get(HOSTNAME_LABEL), name) for name, own in labels.items() if isinstance(own, dict))
        return {hostname: name for hostname, name in named if isinstance(hostname, str)}
