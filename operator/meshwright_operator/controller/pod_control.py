"""Carrying out a decision: pods made, ungated and deleted. Every call may be repeated without harm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable

from meshwright.api import names
from meshwright.api.labels import GANG_GATE, LABEL_JOB
from meshwright.api.objects import KubeObject
from meshwright.api.status import WorkerPlacement
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.paths import core_path, pods_path
from meshwright_operator.kube.pod_info import Pod, read_pod
from meshwright_operator.manifests.owned_objects import service, token_secret
from meshwright_operator.manifests.worker_pod import PodContext, worker_pod
from meshwright_operator.metrics.operator_metrics import OperatorMetrics

log = logging.getLogger(__name__)


class ForeignObjectError(Exception):
    """An object of the name the job needs belongs to somebody else."""


class PodsRejectedError(Exception):
    """The API server refuses the job's pods, or what they need: a quota, a limit or a policy forbids them."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class PodControl:
    """Changes to pods and the small children. What the API server answers goes into the cache."""

    def __init__(self, cluster: KubeClient, cache: Cache, metrics: OperatorMetrics) -> None:
        self._client = cluster
        self._cache = cache
        self._metrics = metrics

    async def apply_owned_objects(self, key: JobKey, uid: str, token: str) -> None:
        """The headless service and the token secret.

        Raises:
            PodsRefusedError: the API server refused one of them: without both no pod may start.
        """
        bodies = {
            "services": service(key.name, key.namespace, uid),
            "secrets": token_secret(key.name, key.namespace, uid, token),
        }
        try:
            await _all(
                self._apply(core_path(key.namespace, resource, body["metadata"]["name"]), body)
                for resource, body in bodies.items()
            )
        except ApiError as error:
            if (reason := rejection_reason(error)) is None:
                raise
            raise PodsRejectedError(reason, f"service and token secret of the job: {error.message}") from None

    async def create(self, context: PodContext, placed: Iterable[WorkerPlacement]) -> None:
        """The pods of these workers, together.

        Raises:
            ForeignObjectError: a pod of that name exists and is not the job's.
            PodsRefusedError: the API server refused one of them; the others may have been made.
        """
        await _all(self._create(context, entry) for entry in placed)

    async def ungate(self, pods: Iterable[Pod]) -> None:
        """Takes the gang's gate off; gates of others stay."""
        await _all(self._ungate(pod) for pod in pods)

    async def delete(self, pods: Iterable[Pod]) -> None:
        """Deletes exactly these pods, with their own grace period."""
        await _all(self._delete(pod) for pod in pods)

    async def confirm_missing(self, key: JobKey, uid: str, worker: int, incarnation: int) -> None:
        """Looks for a pod that the cache does not have, before anybody acts on its absence.

        A pod that lost its job label is given it back, since no watch shows it without.
        """
        path = pods_path(key.namespace, names.pod_name(key.name, worker, incarnation))
        try:
            obj = await self._client.get(path)
        except ApiError as error:
            if error.code == 404:
                return
            raise
        owners = obj["metadata"].get("ownerReferences") or ()
        if read_pod(obj) is None and any(owner.get("uid") == uid for owner in owners):
            obj = await self._client.merge_patch(path, {"metadata": {"labels": {LABEL_JOB: key.name}}})
        self._cache_pod(obj)

    async def _apply(self, path: str, body: KubeObject) -> None:
        await self._client.apply(path, body)

    async def _create(self, context: PodContext, placed: WorkerPlacement) -> None:
        body = worker_pod(context, placed)
        try:
            obj = await self._client.create(pods_path(context.namespace), body)
        except ApiError as error:
            if (reason := rejection_reason(error)) is not None:
                raise PodsRejectedError(reason, f"pod {body['metadata']['name']}: {error.message}") from None
            if error.code != 409 or error.reason != "AlreadyExists":
                raise
            obj = await self._client.get(pods_path(context.namespace, body["metadata"]["name"]))
            pod = read_pod(obj)
            if pod is None or pod.owner != context.uid:
                message = f"pod {body['metadata']['name']} exists and belongs to something else; delete or rename it"
                raise ForeignObjectError(message) from None
        self._metrics.pod_operations.labels("create").inc()
        self._cache_pod(obj)

    async def _ungate(self, pod: Pod) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"uid": pod.uid, "resourceVersion": str(pod.version)},
            "spec": {"schedulingGates": [{"name": gate} for gate in pod.gates if gate != GANG_GATE]},
        }
        try:
            self._cache_pod(await self._client.merge_patch(pods_path(pod.namespace, pod.name), body))
        except ApiError as error:
            if error.code not in (404, 409):
                raise
            log.info("a pod changed before it could be ungated", extra={"pod": pod.name, "code": error.code})
            return
        self._metrics.pod_operations.labels("ungate").inc()

    async def _delete(self, pod: Pod) -> None:
        await self._client.delete(pods_path(pod.namespace, pod.name), pod.uid)
        self._metrics.pod_operations.labels("delete").inc()

    def _cache_pod(self, obj: KubeObject) -> None:
        pod = read_pod(obj)
        if pod is not None:
            self._cache.put_pod(pod)


def rejection_reason(error: ApiError) -> str | None:
    """Why a pod was refused, in one CamelCase word; None when asking again at once may help, or somebody else's case.

    A quota answers 403, LimitRange and Pod Security 403, a webhook with what code it likes, and one that cannot be
    called makes a 500.
    """
    text = error.message.lower()
    if "exceeded quota" in text:
        return "QuotaExceeded"
    if "webhook" in text:
        return "AdmissionDenied" if error.code in range(400, 500) else "AdmissionUnavailable"
    if error.code == 403:
        return "PodsForbidden"
    return "PodsInvalid" if error.code in (400, 422) else None


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    """Waits for every call; then raises the first error, so that one failure does not leave others unknown."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
