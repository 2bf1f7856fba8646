"""The first request to the API server: a cluster that is not there, or has no CRD, is one clear error, not many."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from meshwright.api.labels import GROUP, VERSION
from meshwright_operator.kube.client import ApiError, KubeClient

PATIENCE_SECONDS = 30.0
"""How long the operator waits for the API server, or for the CRD, when it starts."""
RETRY_SECONDS = 1.0
CALL_SECONDS = 10.0
_FIX = "start the cluster, or set --kubeconfig"

log = logging.getLogger(__name__)


class ClusterError(Exception):
    """The cluster cannot be used. The message says why and what to do."""


async def wait_for_cluster(
    client: KubeClient, url: str, alive: Callable[[], None], patience: float = PATIENCE_SECONDS
) -> None:
    """Wait until the API server serves the kind of jobs. Calls `alive` at each attempt.

    An error that is not about the connection or the CRD counts as an answer: the server has its own reasons, such as
    too many requests, and later calls handle them.

    Raises:
        ClusterError: It does not within `patience` seconds.
    """
    deadline, logged = time.monotonic() + patience, ""
    while problem := await _problem(client, url):
        if time.monotonic() >= deadline:
            raise ClusterError(problem)
        if problem != logged:
            log.warning("waiting for the cluster", extra={"seconds": patience, "error": problem})
            logged = problem
        alive()
        await asyncio.sleep(RETRY_SECONDS)


async def _problem(client: KubeClient, url: str) -> str:
    """Why the cluster cannot be used yet; empty if it can."""
    try:
        async with asyncio.timeout(CALL_SECONDS):
            await client.get(f"/apis/{GROUP}/{VERSION}")
    except TimeoutError:
        return f"the API server at {url} does not answer: {_FIX}"
    except ApiError as error:
        if error.code == 0 and error.reason != "Fenced":
            return (
                f"the API server at {url} cannot be reached ({error.message}): start the cluster, or set --kubeconfig"
            )
        if error.code == 404:  # noqa: PLR2004
            return (
                f"the cluster has no CustomResourceDefinition of {GROUP}/{VERSION}: install it with "
                "`meshwright crd | kubectl apply --server-side -f -`"
            )
    return ""
