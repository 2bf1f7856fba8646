"""Carries out a decision: creates, ungates and deletes pods. Every call is idempotent.

Objects are created, and never applied over objects that exist. If the API server refuses a write because the cache is
behind, the object is read again, so that the next decision is based on its current state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Collection, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

from meshwright.api.labels import GANG_GATE
from meshwright.api.objects import KubeObject
from meshwright.api.status import WorkerPlacement
from meshwright_operator.controller.missing_pods import Incarnation, MissingPods
from meshwright_operator.controller.pod_groups import PodGroupError, PodGroups
from meshwright_operator.decide.incarnations import NAME_TAKEN, WAITING_FOR_OLD_PODS, old_pod_message
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.paths import compute_domains_path, core_path, network_policies_path, pods_path
from meshwright_operator.kube.pod_info import Pod, read_pod
from meshwright_operator.manifests.owned_objects import compute_domain, service
from meshwright_operator.manifests.worker_pod import PodContext, worker_pod
from meshwright_operator.operator_metrics import OperatorMetrics

log = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_CREATING = 64
"""Pods of a gang for which a manifest is built and sent at the same time: a thousand would block the event loop. More
than the client has in flight, so that it never waits for a manifest."""


class PodsRejectedError(Exception):
    """The API server rejects the job's pods, a change of them, its Service or its Secret: a quota, a limit or a policy,
    or a name is taken.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class PodControl:
    """Changes to the job's pods, Service, Secret and NetworkPolicy. Puts the API server's answers into the cache."""

    def __init__(self, cluster: KubeClient, cache: Cache, metrics: OperatorMetrics) -> None:
        self._client = cluster
        self._cache = cache
        self._metrics = metrics
        self.missing = MissingPods(cluster, cache)
        self.groups = PodGroups(cluster)

    @asynccontextmanager
    async def shared_objects(self, context: PodContext, secret: KubeObject) -> AsyncIterator[asyncio.Task[None]]:
        """Create the headless Service, the Secret and the NetworkPolicy, if they do not exist, while the block runs.

        Their names depend on the job's uid only, so they may exist before the status is written that has the pods.
        """
        creating = asyncio.create_task(self._create_shared(context, secret), name=f"objects of {context.name}")
        try:
            yield creating
        finally:
            creating.cancel()
            await asyncio.wait([creating])
            if not creating.cancelled():
                creating.exception()  # `create` raises it. Without that call, the status has not been written.

    async def _create_shared(self, context: PodContext, secret: KubeObject) -> None:
        offered = service(context.name, context.namespace, context.uid)
        objects: list[Awaitable[None]] = [
            self._create_owned(core_path(context.namespace, "services"), offered, context.uid),
            self._create_secret(context, secret),
            self._ensure_group(context),
        ]
        if context.network_policy is not None:
            path = network_policies_path(context.namespace)
            objects.append(self._create_owned(path, context.network_policy, context.uid))
        if context.spec.joins_hosts:
            domain = compute_domain(context.name, context.namespace, context.uid)
            objects.append(self._create_owned(compute_domains_path(context.namespace), domain, context.uid))
        await _all(objects)

    async def _ensure_group(self, context: PodContext) -> None:
        key = JobKey(context.namespace, context.name)
        try:
            await self.groups.ensure(key, context.uid, context.spec, context.members)
        except PodGroupError as error:
            raise PodsRejectedError(error.reason, str(error)) from None

    async def create(self, context: PodContext, shared: Awaitable[None], placed: Collection[WorkerPlacement]) -> None:
        """Create the pods of these workers, as soon as the objects exist that they share.

        Raises:
            PodsRejectedError: The API server rejected an object, or an object that the job does not own has its name.
                Other objects may have been created.
        """
        try:
            await shared
        except PodsRejectedError:
            self.missing.set_absent(context.uid, (Incarnation(entry.worker, entry.incarnation) for entry in placed))
            raise
        creating = asyncio.Semaphore(MAX_CREATING)

        async def create(entry: WorkerPlacement) -> None:
            async with creating:
                await self._create(context, entry)

        await _all([create(entry) for entry in placed])

    async def ungate(self, pods: Iterable[Pod]) -> int:
        """Remove the gang's scheduling gate. Other gates stay.

        Returns:
            The number of pods that have changed or are gone. They still have their gates, and were read again.

        Raises:
            PodsRejectedError: The API server rejected the change, such as for a webhook. Other pods may have started.
        """
        return (await _all([self._ungate(pod) for pod in pods])).count(False)

    async def delete(self, pods: Iterable[Pod]) -> None:
        """Delete these pods, by uid, with their own grace period."""
        await _all([self._delete(pod) for pod in pods])

    async def _create_owned(self, path: str, body: KubeObject, uid: str) -> None:
        """Create an object whose name contains a part of the job's uid only. Users can create objects of its kind."""
        kind, name = body["kind"], body["metadata"]["name"]
        if await self._create_or_find(path, body, f"the job's {kind}"):
            return
        if not _owned_by(await self._client.get(f"{path}/{name}"), uid):
            raise PodsRejectedError(NAME_TAKEN, _not_owned(kind, name))

    async def _create_secret(self, context: PodContext, secret: KubeObject) -> None:
        # Nobody else can know the name of a Secret that does not exist: one that does is the job's own.
        await self._create_or_find(core_path(context.namespace, "secrets"), secret, "the job's token Secret")

    async def _create_or_find(self, path: str, body: KubeObject, what: str) -> bool:
        """Create an object. Return False if an object with this name exists."""
        try:
            await self._client.create(path, body)
        except ApiError as error:
            if _already_exists(error):
                return False
            raise _rejected(error, what) from None
        return True

    async def _create(self, context: PodContext, placed: WorkerPlacement) -> None:
        body = worker_pod(context, placed)
        name = body["metadata"]["name"]
        try:
            obj = await self._client.create(pods_path(context.namespace), body)
        except ApiError as error:
            if _already_exists(error):
                await self._find_existing(context, name)
                return
            rejected = _rejected(error, f"pod {name}", context.spec.workers.profile)
            if isinstance(rejected, PodsRejectedError):
                self.missing.set_absent(context.uid, [Incarnation(placed.worker, placed.incarnation)])
            raise rejected from None
        self._metrics.pod_operations.labels("create").inc()
        self._cache_pod(obj)

    async def _find_existing(self, context: PodContext, name: str) -> None:
        """Put the pod that has a new pod's name into the cache, if the job owns it. Other pods are left alone."""
        obj = await self._client.get(pods_path(context.namespace, name))
        self._cache_pod(obj)
        if _owned_by(obj, context.uid):
            return
        pod = read_pod(obj)
        if pod is not None and pod.of_job:
            raise PodsRejectedError(WAITING_FOR_OLD_PODS, old_pod_message(pod))
        raise PodsRejectedError(NAME_TAKEN, _not_owned("Pod", name))

    async def _ungate(self, pod: Pod) -> bool:
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
                raise _rejected(error, f"the removal of the scheduling gate of pod {pod.name}") from None
            log.info("pod changed before its scheduling gate was removed", extra={"pod": pod.name, "code": error.code})
            await self._read_again(pod)
            return False
        self._metrics.pod_operations.labels("ungate").inc()
        return True

    async def _delete(self, pod: Pod) -> None:
        obj = await self._client.delete(pods_path(pod.namespace, pod.name), pod.uid)
        if obj is None:
            await self._read_again(pod)
            return
        if obj.get("kind") == "Pod" and obj["metadata"].get("deletionTimestamp"):
            self._cache_pod(obj)
        self._metrics.pod_operations.labels("delete").inc()

    async def _read_again(self, pod: Pod) -> None:
        """Replace a pod in the cache, which is behind, by its current state."""
        try:
            obj = await self._client.get(pods_path(pod.namespace, pod.name))
        except ApiError as error:
            if error.code != 404:
                raise
            self._cache.remove_pod(pod)
            return
        if obj["metadata"].get("uid") != pod.uid:
            self._cache.remove_pod(pod)
        self._cache_pod(obj)

    def _cache_pod(self, obj: KubeObject) -> None:
        pod = read_pod(obj)
        if pod is not None:
            self._cache.put_pod(pod)


def rejection_reason(error: ApiError) -> str | None:
    """The CamelCase reason why a pod was rejected; None for errors that are not rejections.

    Quotas, LimitRange and Pod Security answer with 403, a webhook with any code. A webhook that cannot be called
    causes a 500. A namespace that is being deleted takes no new objects, and its pods may go before its jobs.
    """
    text = error.message.lower()
    if "because it is being terminated" in text:
        return "NamespaceTerminating"
    if "exceeded quota" in text:
        return "QuotaExceeded"
    if 'webhook "' in text or "admission webhook" in text:  # not only the name of a job
        return "AdmissionDenied" if error.code in range(400, 500) else "AdmissionUnavailable"
    if error.code == 403:
        return "PodsForbidden"
    return "PodsInvalid" if error.code in (400, 422) else None


def _rejected(error: ApiError, what: str, profile: str | None = None) -> Exception:
    """The error, as a rejection of the job's objects if it is one."""
    reason = rejection_reason(error)
    if reason is None:
        return error
    if profile is not None and "violates podsecurity" in error.message.lower():
        text = (
            f"The namespace enforces a Pod Security level that `spec.workers.profile: {profile}` exceeds. Remove the "
            "field, or have the administrator set the label `pod-security.kubernetes.io/enforce` of the namespace to "
            f"`privileged`. The API server rejected {what}: {error.message}"
        )
        return PodsRejectedError(reason, text)
    return PodsRejectedError(reason, f"The API server rejected {what}: {error.message}")


def _already_exists(error: ApiError) -> bool:
    return error.code == 409 and error.reason == "AlreadyExists"


def _owned_by(obj: KubeObject, uid: str) -> bool:
    owners = obj["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") and owner.get("uid") == uid for owner in owners)


def _not_owned(kind: str, name: str) -> str:
    return f"{kind} {name} exists and does not belong to this job. Delete it, or create the job under another name"


async def _all(calls: Collection[Awaitable[Result]]) -> list[Result]:
    """Wait for all calls. Return their results, or raise the first error."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
