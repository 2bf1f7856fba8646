"""Reads and watches the jobs of a namespace, with their pods and events: what every part of the client builds on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Self

from meshwright.api.labels import LABEL_JOB
from meshwright.api.objects import KubeObject
from meshwright_cli.client.api_server import EVENTS, JOBS, PODS, ApiServer
from meshwright_cli.client.errors import NotFoundError, RejectedError, nearest, suggestion
from meshwright_cli.client.kubeconfig import Connection, connection
from meshwright_cli.client.objects import Job, JobEvent, WorkerPod

RETRY_SECONDS = 1.0
"""Seconds before a watch that has ended begins again."""


class JobReader:
    """Jobs of one cluster, to read, as an asynchronous context manager.

    Without arguments it uses what kubectl would use: `KUBECONFIG`, `~/.kube/config`, or the service account of a pod.
    Every method raises subclasses of `MeshwrightError`, whose messages name what to do.

    Args:
        kubeconfig: a kubeconfig file.
        context: a context of it instead of the current one.
        namespace: the namespace of all methods instead of that of the context.
        server: a connection that exists, instead of all of the above.
        timeout: seconds for one request.
    """

    def __init__(
        self,
        *,
        kubeconfig: str | Path | None = None,
        context: str | None = None,
        namespace: str | None = None,
        server: Connection | None = None,
        timeout: float = 30.0,
    ) -> None:
        found = server or connection(Path(kubeconfig) if kubeconfig else None, context, namespace)
        self.namespace = namespace or found.namespace
        self.server = ApiServer(found, timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self.server.close()

    async def list(
        self, *, namespace: str | None = None, all_namespaces: bool = False, selector: str = ""
    ) -> Sequence[Job]:
        """The jobs of a namespace, or of all, by namespace and name."""
        space = None if all_namespaces else namespace or self.namespace
        items, _ = await self.server.collect(JOBS, space, selector=selector)
        return sorted((Job(item) for item in items), key=lambda job: (job.namespace, job.name))

    async def get(self, name: str) -> Job:
        """One job.

        Raises:
            NotFoundError: it does not exist. The message names the nearest existing name, or another namespace.
        """
        try:
            return Job(await self.server.get(JOBS, name, self.namespace))
        except NotFoundError:
            raise await self._missing(name) from None

    async def status(self, name: str) -> Job:
        """The same as `get`: a job contains its status."""
        return await self.get(name)

    async def pods(self, name: str) -> Sequence[WorkerPod]:
        """The worker pods of a job, by worker and incarnation."""
        items, _ = await self.server.collect(PODS, self.namespace, selector=f"{LABEL_JOB}={name}")
        return sorted((WorkerPod.of(item) for item in items), key=lambda pod: (pod.worker, pod.incarnation))

    async def events(self, name: str, *, pods: bool = False) -> Sequence[JobEvent]:
        """The events about a job, the latest last; with `pods`, also those about its worker pods."""
        job = await self.get(name)
        items, _ = await self.server.collect(EVENTS, self.namespace, fields=f"involvedObject.uid={job.uid}")
        if pods:
            names = {pod.name for pod in await self.pods(name)}
            others, _ = await self.server.collect(EVENTS, self.namespace, fields="involvedObject.kind=Pod")
            items += [item for item in others if (item.get("involvedObject") or {}).get("name") in names]
        return [event for _, event in sorted(map(_in_order, items), key=lambda pair: pair[0])]

    async def watch(self, name: str) -> AsyncIterator[Job | None]:
        """Yield the job now and after each change; None once it is deleted, and then nothing more."""
        job: Job | None = await self.get(name)
        yield job
        while job is not None:
            try:
                fields = f"metadata.name={name}"
                async for event, item in self.server.watch(JOBS, job.revision, self.namespace, fields=fields):
                    if item["metadata"].get("uid") != job.uid:
                        continue
                    if event == "DELETED":
                        yield None
                        return
                    job = Job(item)
                    yield job
                # The next watch begins after the last change: a job that is deleted meanwhile may have ended before.
                await asyncio.sleep(RETRY_SECONDS)
            except RejectedError as error:
                if error.status != HTTPStatus.GONE:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
                found = await self.server.find(JOBS, name, self.namespace)
                job = Job(found) if found is not None and found["metadata"].get("uid") == job.uid else None
                yield job

    async def watch_all(self, *, all_namespaces: bool = False, selector: str = "") -> AsyncIterator[tuple[Job, bool]]:
        """Yield each job of the namespace, or of all, now and after each change, with whether it was deleted."""
        space, known, revision = None if all_namespaces else self.namespace, dict[str, Job](), ""
        while True:
            if not revision:
                items, revision = await self.server.collect(JOBS, space, selector=selector)
                now = {job.uid: job for job in map(Job, items)}
                for uid in known.keys() - now.keys():
                    yield known[uid], True
                for job in sorted(now.values(), key=lambda job: (job.namespace, job.name)):
                    if job.uid not in known or job.revision != known[job.uid].revision:
                        yield job, False
                known = now
            try:
                async for event, item in self.server.watch(JOBS, revision, space, selector=selector):
                    job, deleted = Job(item), event == "DELETED"
                    # The next watch begins after the last change, so that none is missed.
                    revision, known[job.uid] = job.revision, job
                    if deleted:
                        del known[job.uid]
                    yield job, deleted
            except RejectedError as error:
                if error.status != HTTPStatus.GONE:
                    raise
                revision = ""
            await asyncio.sleep(RETRY_SECONDS)

    async def _missing(self, name: str) -> NotFoundError:
        """The error for a job that does not exist, with the names that do."""
        if not name:
            return NotFoundError("the name of the job is empty: set the variable of the shell that has it")
        here = [job.name for job in await self.list()]
        text = f"no job `{name}` in namespace `{self.namespace}`"
        if near := nearest(name, here):
            return NotFoundError(f"{text}{suggestion(name, here)}", near)
        try:
            elsewhere = [job.namespace for job in await self.list(all_namespaces=True) if job.name == name]
        except Exception:  # noqa: BLE001 - only a hint: whoever may not list all namespaces gets none
            elsewhere = []
        if elsewhere:
            return NotFoundError(f"{text}: it is in namespace `{elsewhere[0]}`: use -n {elsewhere[0]}", (name,))
        return NotFoundError(f"{text}. To list all jobs: meshwright list -A")


def _in_order(item: KubeObject) -> tuple[tuple[str, int], JobEvent]:
    """An event, and what orders it: its time has seconds, in which the API server's versions tell the earlier one."""
    event, version = JobEvent.of(item), str(item["metadata"].get("resourceVersion"))
    return (str(event.time), int(version) if version.isdecimal() else 0), event
