"""The synchronous client, for scripts and notebooks: the same methods as the asynchronous one.

It runs the asynchronous client in an event loop of its own thread, so that it also works where a loop runs already, as
in a notebook.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from meshwright.api.objects import KubeObject
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright_cli.client.async_client import AsyncClient, Manifest
from meshwright_cli.client.checkpoints.programs import Export, Generation, PodOptions
from meshwright_cli.client.kubeconfig import Connection
from meshwright_cli.client.log_stream import LogSource
from meshwright_cli.client.objects import Job, JobEvent, LogLine, WorkerPod
from meshwright_cli.client.profiling import STEPS, Profile
from meshwright_cli.client.waiting import FINISHED, Target

T = TypeVar("T")


class Client:
    """Jobs of one cluster. A context manager; `close` stops its thread.

    The arguments and methods are those of `AsyncClient`.
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
        self._client = AsyncClient(
            kubeconfig=kubeconfig, context=context, namespace=namespace, server=server, timeout=timeout
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="meshwright-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def namespace(self) -> str:
        """The namespace of all methods."""
        return self._client.namespace

    def close(self) -> None:
        """Close every connection, and stop the thread."""
        if self._thread.is_alive():
            self._run(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def submit(self, manifest: Manifest, *, dry_run: bool = False) -> Job:
        """Apply a manifest: see `AsyncClient.submit`."""
        return self._run(self._client.submit(manifest, dry_run=dry_run))

    def submit_spec(self, name: str, spec: ParallelTrainingJobSpec, *, labels: Mapping[str, str] | None = None) -> Job:
        """Apply a job with a spec made in Python."""
        return self._run(self._client.submit_spec(name, spec, labels=labels))

    def apply(self, item: KubeObject, *, dry_run: bool = False) -> KubeObject:
        """Apply one object of any kind."""
        return self._run(self._client.apply(item, dry_run=dry_run))

    def list(self, *, namespace: str | None = None, all_namespaces: bool = False, selector: str = "") -> Sequence[Job]:
        """The jobs of a namespace, or of all."""
        return self._run(self._client.list(namespace=namespace, all_namespaces=all_namespaces, selector=selector))

    def get(self, name: str) -> Job:
        """One job."""
        return self._run(self._client.get(name))

    def status(self, name: str) -> Job:
        """The same as `get`: a job contains its status."""
        return self.get(name)

    def pods(self, name: str) -> Sequence[WorkerPod]:
        """The worker pods of a job."""
        return self._run(self._client.pods(name))

    def events(self, name: str, *, pods: bool = False) -> Sequence[JobEvent]:
        """The events about a job, the latest last."""
        return self._run(self._client.events(name, pods=pods))

    def watch(self, name: str) -> Iterator[Job | None]:
        """Yield the job now and after each change; None once it is deleted."""
        return self._iterate(self._client.watch(name))

    def watch_all(self, *, all_namespaces: bool = False, selector: str = "") -> Iterator[tuple[Job, bool]]:
        """Yield each job now and after each change, with whether it was deleted."""
        return self._iterate(self._client.watch_all(all_namespaces=all_namespaces, selector=selector))

    def wait(self, name: str, target: Target | str = FINISHED, *, timeout: float | None = None) -> Job | None:
        """Wait until a job reaches a state: see `AsyncClient.wait`."""
        return self._run(self._client.wait(name, target, timeout=timeout))

    def logs(self, name: str, source: LogSource | None = None) -> Iterator[LogLine]:
        """Yield lines of the worker pods' logs."""
        return self._iterate(self._client.logs(name, source))

    def profile(
        self,
        name: str,
        ranks: Sequence[int] | None = (0,),
        steps: range | int = STEPS,
        *,
        timeout: float = 1800.0,
    ) -> Profile:
        """Profile steps of a job that runs: see `AsyncClient.profile`."""
        return self._run(self._client.profile(name, ranks, steps, timeout=timeout))

    def scale(self, name: str, replicas: int) -> Job:
        """Set the number of data-parallel replicas."""
        return self._run(self._client.scale(name, replicas))

    def suspend(self, name: str) -> Job:
        """Suspend a job."""
        return self._run(self._client.suspend(name))

    def resume(self, name: str) -> Job:
        """Resume a suspended job from its latest checkpoint."""
        return self._run(self._client.resume(name))

    def request_checkpoint(self, name: str, request: str = "") -> str:
        """Ask a job that trains for a checkpoint: see `AsyncClient.request_checkpoint`."""
        return self._run(self._client.request_checkpoint(name, request))

    def requested_checkpoint(self, name: str, request: str, *, timeout: float | None = None) -> Job:
        """Wait until a requested checkpoint is durable, and return the job."""
        return self._run(self._client.requested_checkpoint(name, request, timeout=timeout))

    def generate(
        self,
        name: str,
        generation: Generation | None = None,
        step: int | None = None,
        options: PodOptions | None = None,
    ) -> str:
        """Continue a text with the model of a job's checkpoint: see `AsyncClient.generate`."""
        return self._run(self._client.generate(name, generation, step, options))

    def inspect_checkpoints(
        self,
        name: str,
        action: str = "list",
        step: int | None = None,
        target: Path | str | None = None,
        options: PodOptions | None = None,
        *,
        best: bool = False,
    ) -> Sequence[dict[str, Any]]:
        """List, verify or copy a job's checkpoints: see `AsyncClient.inspect_checkpoints`."""
        return self._run(self._client.inspect_checkpoints(name, action, step, target, options, best=best))

    def export(
        self,
        name: str,
        target: Path | str,
        export: Export | None = None,
        step: int | None = None,
        options: PodOptions | None = None,
        *,
        on_claim: bool = False,
    ) -> str:
        """Export the model of a job's checkpoint: see `AsyncClient.export`."""
        return self._run(self._client.export(name, target, export, step, options, on_claim=on_claim))

    def delete(self, name: str, *, wait: bool = False, timeout: float | None = None) -> None:
        """Delete a job, and its pods with it. Checkpoints stay."""
        self._run(self._client.delete(name, wait=wait, timeout=timeout))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the client's thread. Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        """The items of an asynchronous iterator, which is closed when the caller stops early."""

        async def following() -> T:
            return await anext(source)

        async def closing() -> None:
            with contextlib.suppress(AttributeError):
                await source.aclose()  # type: ignore[attr-defined]

        try:
            while True:
                try:
                    yield self._run(following())
                except StopAsyncIteration:
                    return
        finally:
            if self._loop.is_running():
                self._run(closing())
