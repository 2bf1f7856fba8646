"""The requests of foreign pods, from the API server. Those of jobs' pods are in the operator's cache.

Only foreign pods are listed. Listing every pod for every placement would load the API server more than everything else
that the operator does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from meshwright.api.labels import LABEL_JOB
from meshwright.planner.cluster.pod_resources import HOSTNAME_LABEL
from meshwright_operator.kube.cache import Cache
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.paths import pods_path
from meshwright_operator.kube.pod_requests import PodRequest, read_pod_request

ACTIVE = "status.phase!=Succeeded,status.phase!=Failed"
FAST_LIST_SECONDS = 0.02
"""A listing that takes at most this long is repeated for every placement."""
REUSE_FACTOR = 10.0
"""A slower listing is reused for this many times its duration."""
LONGEST_REUSE_SECONDS = 300.0
"""No listing is reused for longer, however long the API server made it wait."""
FEW_PODS = 500
"""So many foreign pods are listed from the API server's cache, in one answer."""


class PodRequestLister:
    """Lists the requests of foreign pods."""

    def __init__(self, cluster: KubeClient, cache: Cache, namespaces: Sequence[str]) -> None:
        self._client = cluster
        self._cache = cache
        self._namespaces = namespaces
        self._valid_until = float("-inf")
        self._few = False
        """Whether the last listing had few pods."""

    async def list_if_due(self) -> list[PodRequest] | None:
        """The requests of all foreign pods; None if the last listing is recent for the time that it took.

        Raises:
            ApiError: Foreign pods could not be listed.
        """
        started = time.monotonic()
        if started < self._valid_until:
            return None
        foreign = await self._list_foreign()
        self._few = len(foreign) <= FEW_PODS
        ended = time.monotonic()
        took = ended - started
        reuse = min(REUSE_FACTOR * took, LONGEST_REUSE_SECONDS)
        self._valid_until = ended + reuse if took > FAST_LIST_SECONDS else started
        return foreign

    async def look(self) -> None:
        """Find out before the first placement whether there are few pods, if the API server answers."""
        with contextlib.suppress(ApiError):
            self._few = len(await self._list_foreign()) <= FEW_PODS

    async def _list_foreign(self) -> list[PodRequest]:
        """Pods that are not in the cache.

        An operator that serves some namespaces does not see jobs in others, and may not be allowed to list their pods.
        Then kube-scheduler, which checks every pinned pod, rejects a placement that does not fit.
        """
        foreign = {"labelSelector": f"!{LABEL_JOB}", "fieldSelector": ACTIVE}
        try:
            pod_requests = await self._list(None, foreign)
            if self._namespaces:
                elsewhere = ",".join([ACTIVE, *(f"metadata.namespace!={name}" for name in self._namespaces)])
                pod_requests += await self._list(None, {"labelSelector": LABEL_JOB, "fieldSelector": elsewhere})
        except ApiError as error:
            if error.code != 403 or not self._namespaces:
                raise
            pod_requests = [pod_request for name in self._namespaces for pod_request in await self._list(name, foreign)]
        return pod_requests

    async def _list(self, namespace: str | None, query: Mapping[str, str]) -> list[PodRequest]:
        node_by_hostname = self._node_by_hostname()
        pod_requests: list[PodRequest] = []
        # A list without a version includes every write before it. Until the API server knows that its cache does, up to
        # 0.1 s pass. What the cache has is as recent as what kube-scheduler sees, which checks every pinned pod.
        recent = {"resourceVersion": "0"} if self._few else {}
        async for page in self._client.pages(pods_path(namespace), **query, **recent):
            pod_requests += [
                pod_request
                for obj in page.items
                if (pod_request := read_pod_request(obj, node_by_hostname)) is not None
            ]
        return pod_requests

    def _node_by_hostname(self) -> dict[str, str]:
        labels = {name: node["metadata"].get("labels") for name, node in self._cache.nodes.items()}
        named = (
            (node_labels.get(HOSTNAME_LABEL), name)
            for name, node_labels in labels.items()
            if isinstance(node_labels, dict)
        )
        return {hostname: name for hostname, name in named if isinstance(hostname, str)}
