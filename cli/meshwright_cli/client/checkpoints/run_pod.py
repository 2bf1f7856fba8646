"""Runs a pod to its end: creates it, waits until it runs, yields its log, and always deletes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from meshwright.api.objects import KubeObject
from meshwright_cli.client.api_server import PODS, Action, ApiServer
from meshwright_cli.client.checkpoints.pod import CONTAINER, GRACE_SECONDS
from meshwright_cli.client.errors import JobFailedError, MeshwrightError, NotFoundError, WaitTimeoutError

POLL_SECONDS = 0.5
HOPELESS = ("ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError")
"""Reasons of a waiting container that do not pass by themselves."""


class PodRun:
    """One pod, which exists while the context is entered.

    Args:
        server: the API server.
        manifest: the pod.
        start_seconds: time until its container must have started.

    Raises:
        ForbiddenError: the user may not create pods.
        RejectedError: the API server rejects the pod.
    """

    def __init__(self, server: ApiServer, manifest: KubeObject, start_seconds: float) -> None:
        self._server = server
        self._manifest = manifest
        self._start_seconds = start_seconds

    @property
    def name(self) -> str:
        """Name of the pod."""
        return str(self._manifest["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """Namespace of the pod."""
        return str(self._manifest["metadata"]["namespace"])

    async def __aenter__(self) -> PodRun:
        action = Action("create", PODS, self.namespace)
        try:
            await self._server.request("POST", PODS.path(self.namespace), action, body=self._manifest)
        except asyncio.CancelledError:
            await self._delete()  # the request may have arrived
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._delete()

    async def log(self) -> AsyncIterator[str]:
        """Yield the lines of the container's log until it ends, also if the stream is cut.

        Raises:
            WaitTimeoutError: the container did not start in time. The message says what it waits for.
            JobFailedError: it cannot start, or the pod was deleted.
        """
        await self._started()
        seen = 0
        while True:
            ended = _terminated(await self._pod()) is not None
            number = 0
            path, action = (
                PODS.path(self.namespace, self.name, "log"),
                Action("get", PODS, self.namespace, self.name, "log"),
            )
            params = {"container": CONTAINER, "follow": "true"}
            async for line in self._server.lines(path, action, params):
                number += 1
                if number > seen:
                    yield line.decode(errors="replace")
            seen = max(seen, number)
            if ended:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def exit_code(self) -> tuple[int, str]:
        """The container's exit code and the reason, once it has ended."""
        while True:
            state = _terminated(await self._pod())
            if state is not None:
                break
            await asyncio.sleep(POLL_SECONDS)
        return int(state.get("exitCode") or 0), str(state.get("reason") or "")

    async def _started(self) -> None:
        pod: KubeObject = self._manifest
        try:
            async with asyncio.timeout(self._start_seconds):
                while True:
                    pod = await self._pod()
                    state = _state(pod)
                    if "running" in state or "terminated" in state:
                        return
                    waiting = state.get("waiting") or {}
                    if waiting.get("reason") in HOPELESS:
                        raise JobFailedError(f"pod {self.name} cannot start: {_why(pod)}")
                    if (pod.get("status") or {}).get("phase") == "Failed":
                        raise JobFailedError(f"pod {self.name} failed: {_why(pod)}")
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise WaitTimeoutError(
                f"pod {self.name} did not start within {self._start_seconds:g} s: {_why(pod)}. To wait longer, pass "
                "--timeout"
            ) from None

    async def _pod(self) -> KubeObject:
        try:
            return await self._server.get(PODS, self.name, self.namespace)
        except NotFoundError:
            raise JobFailedError(f"pod {self.name} was deleted before it had finished") from None

    async def _delete(self) -> None:
        path = PODS.path(self.namespace, self.name)
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": GRACE_SECONDS}
        # The pod also ends by itself, and is deleted with its job: an error here must not hide the result.
        with contextlib.suppress(MeshwrightError):
            deletion = self._server.request("DELETE", path, Action("delete", PODS, self.namespace), body=body)
            await asyncio.shield(asyncio.ensure_future(deletion))


def _state(pod: KubeObject) -> KubeObject:
    """The state of the container; empty before it has one."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or [{}]
    return statuses[0].get("state") or {}


def _terminated(pod: KubeObject) -> KubeObject | None:
    """How the container ended. None while it runs."""
    ended = _state(pod).get("terminated")
    if ended is None and (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded"):
        status = pod["status"]
        return {"exitCode": 0 if status["phase"] == "Succeeded" else 1, "reason": status.get("reason")}
    return ended


def _why(pod: KubeObject) -> str:
    """What a pod waits for, in the words of the kubelet or the scheduler."""
    status = pod.get("status") or {}
    waiting = _state(pod).get("waiting") or {}
    if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        return f"{waiting['reason']}: {waiting.get('message') or 'no message'}".strip()
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason')}: {condition.get('message')}"
    if status.get("message"):
        return f"{status.get('reason') or status.get('phase')}: {status['message']}"
    return str(waiting.get("reason") or status.get("phase") or "it has no status")
