"""Carries out a decision: creates, ungates and deletes pods. Every call is idempotent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable

from meshwright.api.labels import GANG_GATE, LABEL_JOB
from meshwright.api.objects import KubeObject, pod_name
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
    """An object with a name that the job needs exists, and the job does not own it."""


class PodsRejectedError(Exception):
    """The API server rejects the job's pods, Service or Secret, because of a quota, a limit or a policy."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class PodControl:
    """Changes to the job's pods, Service and Secret. Puts the API server's answers into the cache."""

    def __init__(self, cluster: KubeClient, cache: Cache, metrics: OperatorMetrics) -> None:
        self._client = cluster
        self._cache = cache
        self._metrics = metrics

    async def apply_owned_objects(self, key: JobKey, uid: str, token: str) -> None:
        """Apply the headless Service and the token Secret.

        Raises:
            PodsRejectedError: The API server rejected one of them. Pods must not start without both.
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
            raise PodsRejectedError(
                reason, f"The API server rejected the job's Service or token Secret: {error.message}"
            ) from None

    async def create(self, context: PodContext, placed: Iterable[WorkerPlacement]) -> None:
        """Create the pods of these workers concurrently.

        Raises:
            ForeignObjectError: A pod with that name exists, and the job does not own it.
            PodsRejectedError: The API server rejected a pod. Others may have been created.
        """
        await _all(self._create(context, entry) for entry in placed)

    async def ungate(self, pods: Iterable[Pod]) -> None:
        """Remove the gang's scheduling gate. Other gates stay."""
        await _all(self._ungate(pod) for pod in pods)

    async def delete(self, pods: Iterable[Pod]) -> None:
        """Delete these pods, by uid, with their own grace period."""
        await _all(self._delete(pod) for pod in pods)

    async def confirm_missing(self, key: JobKey, uid: str, worker: int, incarnation: int) -> None:
        """Ask the API server for a pod that is missing from the cache, before it is replaced.

        If the pod has lost its job label, this restores the label, because the watch selects pods by it.
        """
        path = pods_path(key.namespace, pod_name(key.name, worker, incarnation))
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
                raise PodsRejectedError(
                    reason, f"The API server rejected pod {body['metadata']['name']}: {error.message}"
                ) from None
            if error.code != 409 or error.reason != "AlreadyExists":
                raise
            obj = await self._client.get(pods_path(context.namespace, body["metadata"]["name"]))
            pod = read_pod(obj)
            if pod is None or pod.owner != context.uid:
                name = body["metadata"]["name"]
                message = (
                    f"Pod {name} already exists and this job does not own it. "
                    "Delete it, or create the job under another name"
                )
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
            log.info("pod changed before its scheduling gate was removed", extra={"pod": pod.name, "code": error.code})
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
    """The CamelCase reason why a pod was rejected; None for errors that are not rejections.

    Quotas, LimitRange and Pod Security answer with 403, a webhook with any code. A webhook that cannot be called
    causes a 500.
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
    """Wait for all calls, and then raise the first error."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
