"""Makes, resizes and deletes the PodGroups of jobs for other schedulers.

A group exists as long as the job has pods, or is about to get some: a scheduler may reserve what a group asks for.
"""

from __future__ import annotations

import logging

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.paths import group_path
from meshwright_operator.manifests.pod_group import FORMS, Form, Resize, group_name, members_of, pod_group

NOT_FOUND, FORBIDDEN, CONFLICT = 404, 403, 409
POD_GROUP_UNAVAILABLE = "PodGroupUnavailable"
"""Reason of a job whose PodGroup cannot be made, because its kind does not exist or the operator may not make it."""

log = logging.getLogger(__name__)


class PodGroupError(Exception):
    """The group cannot be made."""


class PodGroups:
    """The groups of all jobs."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._without: set[str] = set()
        """uids of jobs whose groups were deleted."""

    async def ensure(self, key: JobKey, uid: str, spec: ParallelTrainingJobSpec, members: int) -> None:
        """Makes the group of a job, or resizes it, before its pods are created.

        Raises:
            ApiError: A request failed.
            PodGroupError: The cluster does not have the kind, or its answer is no.
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

    async def _make(self, key: JobKey, form: Form, body: dict[str, object], members: int) -> None:
        name = group_name(key.name, _uid(body))
        try:
            await self._client.create(_path(form, key.namespace), body)
            return
        except ApiError as error:
            if error.code != CONFLICT:
                raise
        path = _path(form, key.namespace, name)
        found = await self._client.get(path)
        if not _owned(found, _uid(body)):
            text = f"PodGroup {name} exists and does not belong to this job"
            raise PodGroupError(f"{text}. Delete it, or create the job under another name")
        if members_of(found) == members:
            return
        if form.resize is Resize.RECREATE:
            await self._client.delete(path, found["metadata"]["uid"])
            await self._client.create(_path(form, key.namespace), body)
        else:
            await self._client.merge_patch(path, {"metadata": {"uid": found["metadata"]["uid"]}, "spec": body["spec"]})


def _path(form: Form, namespace: str, name: str | None = None) -> str:
    return group_path(form.group, form.version, namespace, "podgroups", name)


def _uid(body: dict[str, object]) -> str:
    metadata = body["metadata"]
    assert isinstance(metadata, dict)
    return str(metadata["ownerReferences"][0]["uid"])


def _owned(obj: dict[str, object], uid: str) -> bool:
    metadata = obj["metadata"]
    assert isinstance(metadata, dict)
    return any(one.get("controller") and one.get("uid") == uid for one in metadata.get("ownerReferences") or ())
