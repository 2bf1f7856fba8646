"""The asynchronous client: one method for each verb of the command line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshwright.api.labels import ANNOTATION_CHECKPOINT, API_VERSION, CLI_FIELD_MANAGER, KIND
from meshwright.api.objects import KubeObject
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright_cli.client.api_server import APPLY_PATCH, JOBS, MERGE_PATCH, Action, Kind
from meshwright_cli.client.checkpoints import programs
from meshwright_cli.client.checkpoints.programs import Export, Generation, Notify, PodOptions
from meshwright_cli.client.errors import (
    JobFailedError,
    ManifestError,
    NotFoundError,
    RejectedError,
    WaitTimeoutError,
)
from meshwright_cli.client.job_reader import JobReader
from meshwright_cli.client.log_stream import LogSource, follow_logs
from meshwright_cli.client.manifests import checked, only_job, read_manifest
from meshwright_cli.client.objects import Job, LogLine
from meshwright_cli.client.profiling import STEPS, Profile, profile_job
from meshwright_cli.client.rejection import explained
from meshwright_cli.client.waiting import FINISHED, Target

GONE_POLL_SECONDS = 0.25

Manifest = str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A path (`-` for stdin), an object, or several objects."""


def _ignore(_: str) -> None:
    """Report nothing."""


class AsyncClient(JobReader):
    """Jobs of one cluster: reads them as `JobReader` does, and applies, changes, follows and deletes them."""

    async def submit(self, manifest: Manifest, *, dry_run: bool = False, within: str | None = None) -> Job:
        """Apply a manifest with exactly one job, and the objects that it needs, as server-side apply does.

        Args:
            manifest: a path, an object, or several objects.
            dry_run: let the API server validate everything, and store nothing.
            within: reject objects that name another namespace, as kubectl does with `--namespace`.

        Raises:
            ManifestError: it cannot be read, does not contain exactly one job, or names another namespace.
            RejectedError: the API server rejected an object; the message names the field.
        """
        items, name = _objects(manifest)
        job = only_job(items, name)
        for item in items:
            stated = item["metadata"].get("namespace")
            if within and stated and stated != within:
                raise ManifestError(
                    f"{name}: {item['kind']} {item['metadata']['name']}: `metadata.namespace` is `{stated}`, and -n is "
                    f"`{within}`: leave one of them out"
                )
        applied = job
        for item in items:
            answer = await self.apply(item, dry_run=dry_run)
            applied = answer if item is job else applied
        return Job(applied)

    async def submit_spec(
        self, name: str, spec: ParallelTrainingJobSpec, *, labels: Mapping[str, str] | None = None
    ) -> Job:
        """Apply a job with a spec made in Python."""
        metadata: KubeObject = {"name": name, **({"labels": dict(labels)} if labels else {})}
        return await self.submit({"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec.wire()})

    async def apply(self, item: KubeObject, *, dry_run: bool = False) -> KubeObject:
        """Apply one object of any kind. The API server rejects unknown fields.

        Raises:
            RejectedError: the API server rejected it; the message names the object and the field.
        """
        kind = await self._kind_of(item)
        metadata = item["metadata"]
        space = (metadata.get("namespace") or self.namespace) if kind.namespaced else None
        params = {"fieldManager": CLI_FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"}
        params |= {"dryRun": "All"} if dry_run else {}
        action = Action("patch", kind, space, metadata["name"])
        try:
            answer: KubeObject = await self.server.request(
                "PATCH", kind.path(space, metadata["name"]), action, params=params, body=item, content_type=APPLY_PATCH
            )
        except RejectedError as error:
            raise explained(item, error) from error
        return answer

    async def wait(self, name: str, target: Target | str = FINISHED, *, timeout: float | None = None) -> Job | None:  # noqa: ASYNC109
        """Wait until a job reaches a state. Returns the job, or None if it was deleted, as the state asks.

        Args:
            name: name of the job.
            target: the state, such as `complete`, `step=500` or `condition=Placed`.
            timeout: seconds; None: unlimited.

        Raises:
            JobFailedError: it can no longer reach the state: it failed, was deleted, or needs an edit.
            WaitTimeoutError: it did not reach the state in time.
        """
        wanted = Target.parse(target) if isinstance(target, str) else target
        latest = await self.get(name)  # for the message, even if the time is over before the watch begins
        try:
            async with asyncio.timeout(timeout):
                async for job in self.watch(name):
                    if wanted.reached(job):
                        return job
                    if job is None:
                        raise JobFailedError(f"{name} was deleted before it was {wanted}")
                    latest = job
                    if reason := wanted.hopeless(job):
                        raise JobFailedError(f"{name} will not be {wanted}: {reason}")
        except TimeoutError:
            now = f"It is {latest.state}: {latest.message}".rstrip(": ")
            raise WaitTimeoutError(f"{name} was not {wanted} within {timeout:g} s. {now}") from None
        raise JobFailedError(f"{name} was deleted before it was {wanted}")

    async def logs(self, name: str, source: LogSource | None = None) -> AsyncIterator[LogLine]:
        """Yield lines of the worker pods' logs.

        Args:
            name: name of the job.
            source: which pods and ranks, and whether to follow. By default everything that rank 0's pod wrote.

        Raises:
            NotFoundError: there is no such rank or worker, or it has no log.
        """
        async for line in follow_logs(self, name, source or LogSource()):
            yield line

    async def profile(
        self,
        name: str,
        ranks: Sequence[int] | None = (0,),
        steps: range | int = STEPS,
        *,
        timeout: float = 1800.0,  # noqa: ASYNC109
    ) -> Profile:
        """Profile steps of a job that runs with torch's profiler, without a restart.

        Args:
            name: name of the job.
            ranks: ranks of Meshwright's runtime; None: all.
            steps: the steps, such as `range(100, 103)`, or how many of the next ones.
            timeout: seconds in which the job must complete the last of these steps.

        Raises:
            NotFoundError: the job has no such rank, or its pod does not run.
            ForbiddenError: the user may not create `pods/exec`.
            RejectedError: the ranks cannot be profiled; the message says why.
            WaitTimeoutError: the steps were not completed in time.
        """
        return await profile_job(self, await self.get(name), ranks, steps, timeout)

    async def scale(self, name: str, replicas: int) -> Job:
        """Set the number of data-parallel replicas, through the scale subresource.

        Raises:
            RejectedError: the API server or a rule of the job rejects the number.
        """
        action = Action("patch", JOBS, self.namespace, name, "scale")
        body = {"spec": {"replicas": replicas}}
        try:
            path = JOBS.path(self.namespace, name, "scale")
            await self.server.request("PATCH", path, action, body=body, content_type=MERGE_PATCH)
        except NotFoundError:
            raise await self._missing(name) from None
        return await self.get(name)

    async def suspend(self, name: str) -> Job:
        """Suspend a job: it saves a checkpoint, and its pods are deleted."""
        return await self._patch(name, {"spec": {"suspend": True}})

    async def resume(self, name: str) -> Job:
        """Resume a suspended job from its latest checkpoint."""
        return await self._patch(name, {"spec": {"suspend": False}})

    async def request_checkpoint(self, name: str, request: str = "") -> str:
        """Ask a job that trains for a checkpoint after its current step. Returns the name of the request.

        Args:
            name: name of the job.
            request: name of the request: 1 to 64 letters, digits and `-._:+`. A name that the job has already is not
                a new request. By default the time.
        """
        request = request or datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        await self._patch(name, {"metadata": {"annotations": {ANNOTATION_CHECKPOINT: request}}})
        return request

    async def requested_checkpoint(
        self,
        name: str,
        request: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        notify: Notify = _ignore,
    ) -> Job:
        """Wait until a requested checkpoint is durable, and return the job.

        Args:
            name: name of the job.
            request: what `request_checkpoint` has returned.
            timeout: seconds; None: unlimited.
            notify: is called with the reason if the ranks cannot save, and try again.

        Raises:
            JobFailedError: there is no such checkpoint, for example because the job is not running.
            WaitTimeoutError: it was not durable in time.
        """
        latest, asked, problem = await self.get(name), "", ""
        try:
            async with asyncio.timeout(timeout):
                async for job in self.watch(name):
                    if job is None:
                        raise JobFailedError(f"{name} was deleted before it saved the checkpoint")
                    latest, found = job, job.status.checkpoint_request
                    if found is None or found.request != request:
                        continue
                    if found.state == "Failed":
                        raise JobFailedError(f"{name}: {found.message}")
                    if found.state == "Saved":
                        return job
                    asked = asked or found.message
                    if found.message != asked and not problem:  # later ones differ only in the step
                        notify(found.message)
                    problem = found.message if found.message != asked else ""
        except TimeoutError:
            now = problem or f"It is {latest.state}: {latest.message}".rstrip(": ")
            raise WaitTimeoutError(f"{name} did not save the checkpoint within {timeout:g} s. {now}") from None
        raise JobFailedError(f"{name} was deleted before it saved the checkpoint")

    async def generate(
        self,
        name: str,
        generation: Generation | None = None,
        step: int | None = None,
        options: PodOptions | None = None,
        notify: Notify = _ignore,
    ) -> str:
        """Continue a text with the model of a job's checkpoint, in a short-lived pod next to it; the text.

        Args:
            name: name of the job.
            generation: prompt, length and sampling.
            step: step of the checkpoint. None: the newest that is complete and intact.
            options: GPUs and memory of the pod.
            notify: is called with lines about what happens.

        Raises:
            NotFoundError: the job has no complete checkpoint yet.
            ForbiddenError: the user may not create pods.
            RejectedError: the program fails. The message is the program's.
        """
        job, options = await self.get(name), options or PodOptions()
        return await programs.generate(self.server, job, generation or Generation(), step, options, notify)

    async def inspect_checkpoints(
        self,
        name: str,
        action: str = "list",
        step: int | None = None,
        target: Path | str | None = None,
        options: PodOptions | None = None,
        notify: Notify = _ignore,
        *,
        best: bool = False,
    ) -> Sequence[dict[str, Any]]:
        """List, verify or copy a job's checkpoints, in a short-lived pod next to them; what was found of each.

        Args:
            name: name of the job.
            action: `list`, `verify` or `copy`.
            step: only the checkpoint of this step. To copy, None is the newest that is intact.
            target: with `copy`: a URI, or a directory of this machine.
            options: memory of the pod.
            notify: is called with lines about what happens.
            best: only the checkpoint with the lowest evaluation loss (`checkpoint.keepBest`).

        Raises:
            ForbiddenError: the user may not create pods.
            RejectedError: the job has no checkpoints that Meshwright can read, or the program fails.
        """
        job, options = await self.get(name), options or PodOptions()
        if target is not None and "://" not in str(target):
            return [
                await programs.copy_checkpoint_here(self.server, job, step, Path(target), options, notify, best=best)
            ]
        where = None if target is None else str(target)
        return await programs.inspect_checkpoints(self.server, job, action, step, options, notify, where, best=best)

    async def export(
        self,
        name: str,
        target: Path | str,
        export: Export | None = None,
        step: int | None = None,
        options: PodOptions | None = None,
        notify: Notify = _ignore,
        *,
        on_claim: bool = False,
    ) -> str:
        """Export the model of a job's checkpoint as a Hugging Face directory, in a short-lived pod; a summary.

        Args:
            name: name of the job.
            target: a new or empty directory.
            on_claim: whether `target` is on the job's checkpoint claim, and not on this machine.
            export: number format and size of files, and whether only adapters, or the best checkpoint, are exported.
            step: step of the checkpoint. None: the newest that is complete and intact.
            options: memory of the pod.
            notify: is called with lines about what happens.

        Raises:
            NotFoundError: the job has no complete checkpoint yet.
            ForbiddenError: the user may not create pods, or `pods/exec` for a directory of this machine.
            RejectedError: the program fails. The message is the program's.
        """
        job, wanted, options = await self.get(name), export or Export(), options or PodOptions()
        if on_claim:
            return await programs.export_to_claim(self.server, job, wanted, step, str(target), options, notify)
        return await programs.export_here(self.server, job, wanted, step, Path(target), options, notify)

    async def delete(self, name: str, *, wait: bool = False, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Delete a job, and its pods with it. Checkpoints stay.

        Args:
            name: name of the job.
            wait: wait until the job and its worker pods are gone.
            timeout: seconds to wait.
        """
        action = Action("delete", JOBS, self.namespace, name)
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        try:
            await self.server.request("DELETE", JOBS.path(self.namespace, name), action, body=body)
        except NotFoundError:
            raise await self._missing(name) from None
        if not wait:
            return
        try:
            async with asyncio.timeout(timeout):
                await self._gone(name)
        except TimeoutError:
            raise WaitTimeoutError(f"{name} and its pods still exist after {timeout:g} s") from None

    async def _gone(self, name: str) -> None:
        """Wait until neither the job nor a worker pod of it exists."""
        while True:
            if await self.server.find(JOBS, name, self.namespace) is None and not await self.pods(name):
                return
            await asyncio.sleep(GONE_POLL_SECONDS)

    async def _patch(self, name: str, body: KubeObject) -> Job:
        action = Action("patch", JOBS, self.namespace, name)
        params = {"fieldManager": CLI_FIELD_MANAGER}
        try:
            path = JOBS.path(self.namespace, name)
            return Job(
                await self.server.request("PATCH", path, action, params=params, body=body, content_type=MERGE_PATCH)
            )
        except NotFoundError:
            raise await self._missing(name) from None

    async def _kind_of(self, item: KubeObject) -> Kind:
        """The API server's kind of an object, from its discovery documents."""
        api_version, kind = str(item["apiVersion"]), str(item["kind"])
        if (api_version, kind) == (JOBS.api_version, JOBS.kind):
            return JOBS
        group, _, version = api_version.rpartition("/")
        name = f"{kind} {item['metadata']['name']}"
        try:
            found = await self.server.request(
                "GET", f"/apis/{group}/{version}" if group else f"/api/{version}", Action("discover")
            )
        except NotFoundError:
            raise ManifestError(f"{name}: the cluster has no `{api_version}`") from None
        for entry in found["resources"]:
            if entry["kind"] == kind and "/" not in entry["name"]:
                return Kind(group, version, entry["name"], kind, bool(entry["namespaced"]))
        raise ManifestError(f"{name}: `{api_version}` has no kind `{kind}`")


def _objects(manifest: Manifest) -> tuple[list[KubeObject], str]:
    if isinstance(manifest, str | Path):
        return read_manifest(manifest), str(manifest)
    documents = [manifest] if isinstance(manifest, Mapping) else manifest
    return checked(documents, "manifest"), "manifest"
