"""Makes, resizes and deletes the PodGroups of jobs for other schedulers.

A group exists as long as the job has pods, or is about to get some: a scheduler may reserve what a group asks for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NoReturn

from meshwright.api.objects import KubeObject
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright_operator.decide.incarnations import WAITING_FOR_OLD_PODS
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.paths import group_path
from meshwright_operator.manifests.pod_group import FORMS, Form, Resize, group_name, members_of, pod_group

NOT_FOUND, FORBIDDEN, CONFLICT = 404, 403, 409
LEAVING_SECONDS = 600.0
"""After this time with a group that is being deleted the job is Stalled. Kubernetes keeps a group until its pods are
gone."""
POD_GROUP_UNAVAILABLE = "PodGroupUnavailable"
"""Reason of a job whose PodGroup cannot be made, because its kind does not exist or the operator may not make it."""

log = logging.getLogger(__name__)


class PodGroupError(Exception):
    """The group cannot be made."""

    def __init__(self, message: str, reason: str = POD_GROUP_UNAVAILABLE) -> None:
        super().__init__(message)
        self.reason = reason


class PodGroups:
    """The groups of all jobs."""

    def __init__(self, client: KubeClient, now: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._now = now
        self._without: set[str] = set()
        """uids of jobs whose groups were deleted."""
        self._leaving: dict[str, float] = {}
        """uid of a job -> since when a group of it that is being deleted is in the way of a new one."""

    async def ensure(self, key: JobKey, uid: str, spec: ParallelTrainingJobSpec, members: int) -> None:
        """Makes the group of a job, or resizes it, before its pods are created.

        Raises:
            ApiError: A request failed.
            PodGroupError: The cluster does not have the kind, its answer is no, or the group of an earlier start is not
                gone yet.
        """
        if spec.workers.pod_group is None:
            return
        form = FORMS[spec.workers.pod_group.kind]
        body = pod_group(key.name, key.namespace, uid, spec, members)
        try:
            await self._make(key, form, body, members)
        except ApiError as error:
            if error.code == NOT_FOUND:
                raise PodGroupError(
                    f"The cluster does not have PodGroups of {form.group}/{form.version}. Install {form.scheduler}, or"
                    " remove `spec.workers.podGroup`"
                ) from None
            if error.code == FORBIDDEN:
                raise PodGroupError(
                    f"The operator may not make PodGroups of {form.group}: {error.message}. Name"
                    f" {spec.workers.pod_group.kind.value} in `queues.podGroups` of the chart's values"
                ) from None
            if error.code in (400, 422):
                raise PodGroupError(f"The API server rejected the PodGroup: {error.message}") from None
            raise
        self._without.discard(uid)
        self._leaving.pop(uid, None)

    async def remove(self, key: JobKey, uid: str, spec: ParallelTrainingJobSpec) -> None:
        """Deletes the group of a job that has no pods.

        Raises:
            ApiError: A request failed.
        """
        if spec.workers.pod_group is None or uid in self._without:
            return
        form = FORMS[spec.workers.pod_group.kind]
        path = _path(form, key.namespace, group_name(key.name, uid))
        try:
            found = await self._client.get(path)
        except ApiError as error:
            if error.code not in (NOT_FOUND, FORBIDDEN):
                raise
        else:
            if _owned(found, uid):
                await self._client.delete(path, found["metadata"]["uid"])
        self._without.add(uid)

    def forget(self, uid: str) -> None:
        """Drops the state of a deleted job."""
        self._without.discard(uid)
        self._leaving.pop(uid, None)

    async def _make(self, key: JobKey, form: Form, body: KubeObject, members: int) -> None:
        uid, name = _uid(body), group_name(key.name, _uid(body))
        path = _path(form, key.namespace, name)
        found = await self._create_or_find(form, key.namespace, name, body)
        if found is None:
            return
        if not _owned(found, uid):
            text = f"PodGroup {name} exists and does not belong to this job"
            raise PodGroupError(f"{text}. Delete it, or create the job under another name")
        if found["metadata"].get("deletionTimestamp"):
            self._wait_until_gone(uid, found)
        if members_of(found) == members:
            return
        if form.resize is Resize.PATCH:
            await self._client.merge_patch(path, {"metadata": {"uid": found["metadata"]["uid"]}, "spec": body["spec"]})
            return
        await self._client.delete(path, found["metadata"]["uid"])
        found = await self._create_or_find(form, key.namespace, name, body)
        if found is not None:
            self._wait_until_gone(uid, found)

    async def _create_or_find(self, form: Form, namespace: str, name: str, body: KubeObject) -> KubeObject | None:
        """Makes the group. Returns the one that has its name already, or else None."""
        try:
            await self._client.create(_path(form, namespace), body)
            return None
        except ApiError as error:
            if error.code != CONFLICT:
                raise
            taken = error
        try:
            return await self._client.get(_path(form, namespace, name))
        except ApiError as error:
            raise (taken if error.code == NOT_FOUND else error) from None

    def _wait_until_gone(self, uid: str, found: KubeObject) -> NoReturn:
        since = self._leaving.setdefault(uid, self._now())
        name, finalizers = found["metadata"]["name"], found["metadata"].get("finalizers") or []
        text = f"PodGroup {name} of an earlier start is being deleted"
        if self._now() - since < LEAVING_SECONDS:
            # The pods that keep it are deleted by the same decision whose pods need the new one.
            raise PodGroupError(f"{text}. Kubernetes keeps it until its pods are gone", WAITING_FOR_OLD_PODS)
        kept = f" and has the finalizers {', '.join(finalizers)}" if finalizers else ""
        raise PodGroupError(f"{text}{kept}. The job waits until it is gone")


def _path(form: Form, namespace: str, name: str | None = None) -> str:
    return group_path(form.group, form.version, namespace, "podgroups", name)


def _uid(body: KubeObject) -> str:
    return str(body["metadata"]["ownerReferences"][0]["uid"])


def _owned(obj: KubeObject, uid: str) -> bool:
    owners = obj["metadata"].get("ownerReferences") or ()
    return any(one.get("controller") and one.get("uid") == uid for one in owners)
