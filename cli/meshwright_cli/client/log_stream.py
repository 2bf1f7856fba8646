"""Streams the logs of a job's worker pods: of a rank, a stage, a worker, or whatever failed first.

Several pods are read at the same time. With `follow`, a pod that is replaced is followed by its successor, until the
job has finished.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from meshwright.api import conditions
from meshwright.layout import Layout
from meshwright_cli.client.api_server import PODS, Action
from meshwright_cli.client.errors import MeshwrightError, NotFoundError, RejectedError
from meshwright_cli.client.failure_record import read_failure
from meshwright_cli.client.job_reader import JobReader
from meshwright_cli.client.objects import Job, JobEvent, LogLine, WorkerPod, newest_pods, ranks_by_worker

POLL_SECONDS = 1.0
FAILURES = ("RankFailure", "PodFailed", "RankFailed", "RestartLimitReached")
"""Reasons of events that name a failed worker or rank."""


@dataclass(frozen=True, slots=True)
class LogSource:
    """Which lines to read. Without a selection: all lines of the pod with rank 0."""

    ranks: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()
    every_worker: bool = False
    failed_first: bool = False
    """The worker that failed first, according to the job's events."""
    follow: bool = False
    previous: bool = False
    """The previous container of each pod, or the previous incarnation's pod if it still exists."""
    tail: int | None = None
    """Number of last lines of each pod: of those that are selected, except with `follow`."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Workers to read, and of these the ranks to show; no ranks: all lines.

    Lines of the agent that are about no rank, such as those of completed steps, are always shown.
    """

    workers: tuple[int, ...]
    ranks: frozenset[int] = frozenset()
    record: str = ""
    """What the job recorded about the failure. It is shown if the pod no longer exists."""
    pod: str = ""
    """The pod that failed. If it was replaced, the record of the failure is shown, and not the replacement's log."""

    def shows(self, line: LogLine) -> bool:
        """Whether a line belongs to the selection."""
        return not self.ranks or line.rank is None or line.rank in self.ranks


def select(job: Job, source: LogSource, pods: Sequence[WorkerPod], events: Sequence[JobEvent]) -> Selection:
    """The workers and ranks that `source` asks for.

    Raises:
        NotFoundError: there is no such rank, stage or worker, or nothing has failed.
    """
    known = sorted({pod.worker for pod in pods} | set(ranks_by_worker(job.status)))
    if not known:
        raise NotFoundError(f"{job.name} has no worker pods yet: {job.state}. {job.message}".rstrip(". "))
    if source.failed_first:
        return _failed(job, events, known)
    if source.every_worker:
        return Selection(tuple(known))
    for worker in source.workers:
        if worker not in known:
            raise NotFoundError(f"{job.name} has no worker {worker}: it has workers {known[0]} to {known[-1]}")
    if source.workers:
        return Selection(source.workers)
    ranks = source.ranks or _ranks_of_stages(job, source.stages)
    if not ranks:
        return Selection((known[0],))
    placed = ranks_by_worker(job.status)
    owners = {rank: worker for worker, own in placed.items() for rank in own}
    for rank in ranks:
        if rank not in owners:
            raise NotFoundError(f"{job.name} has no rank {rank}: it has ranks 0 to {max(owners, default=0)}")
    return Selection(tuple(sorted({owners[rank] for rank in ranks})), frozenset(ranks))


def _ranks_of_stages(job: Job, stages: Sequence[int]) -> tuple[int, ...]:
    plan = job.status.plan
    if not stages:
        return ()
    if plan is None:
        raise NotFoundError(f"{job.name} has no plan yet, so its stages are unknown: {job.state}. {job.message}")
    for stage in stages:
        if stage >= plan.pipeline:
            raise NotFoundError(f"{job.name} has no stage {stage}: it has stages 0 to {plan.pipeline - 1}")
    layout = Layout(plan.tensor, plan.pipeline, plan.data, plan.context)
    return tuple(rank for rank in range(layout.world_size) if layout.coordinates(rank).pipeline in stages)


def _failed(job: Job, events: Sequence[JobEvent], known: Sequence[int]) -> Selection:
    recorded = job.status.last_failure
    if recorded is not None and recorded.worker in known:
        assert recorded.worker is not None
        ranks = frozenset({recorded.rank} if recorded.rank is not None else ())
        return Selection((recorded.worker,), ranks, recorded.message, recorded.pod)
    failed = conditions.find(job.status.conditions, conditions.FAILED)
    texts = [event.message for event in events if event.reason in FAILURES or event.warning]
    texts += [failed.message] if failed is not None and failed.status == "True" else []
    for text in reversed(texts):
        if found := re.search(r"\b[Ww]orker (\d+)\b|-w(\d+)-\d+\b", text):
            worker = int(found[1] or found[2])
            rank = re.search(r"\b[Rr]ank (\d+)\b", text)
            if worker in known:
                own = ranks_by_worker(job.status).get(worker)
                chosen = int(rank[1]) if rank else None
                ranks = frozenset({chosen}) if chosen is not None and own is not None and chosen in own else frozenset()
                return Selection((worker,), ranks, text)
    raise NotFoundError(f"no worker of {job.name} has failed, according to its events")


async def follow_logs(reader: JobReader, name: str, source: LogSource) -> AsyncIterator[LogLine]:
    """Yield the lines of a job's logs, of several pods as they arrive."""
    job = await reader.get(name)
    selection = await _selected(reader, job, source)
    queue: asyncio.Queue[LogLine | BaseException | None] = asyncio.Queue(maxsize=1000)
    tasks = [
        asyncio.create_task(_read_worker(reader, job, worker, source, selection, queue)) for worker in selection.workers
    ]
    try:
        ended = 0
        while ended < len(tasks):
            item = await queue.get()
            if item is None:
                ended += 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _selected(reader: JobReader, job: Job, source: LogSource) -> Selection:
    """The selection; with `follow`, once the job has worker pods."""
    while True:
        now, pods = await reader.get(job.name), await reader.pods(job.name)
        waits = source.follow and not pods and not now.status.placement
        if not waits or now.finished or now.is_true(conditions.STALLED):
            events = await reader.events(job.name) if source.failed_first else []
            return select(now, source, pods, events)
        await asyncio.sleep(POLL_SECONDS)


async def _read_worker(
    reader: JobReader,
    job: Job,
    worker: int,
    source: LogSource,
    selection: Selection,
    queue: asyncio.Queue[LogLine | BaseException | None],
) -> None:
    """Read a worker's pod, and with `follow` its successors, into the queue; None marks the end."""
    done: set[tuple[str, int]] = set()
    try:
        while True:
            pod = await _pod_to_read(reader, job.name, worker, source, selection.pod)
            if pod is not None and (pod.name, pod.restarts) not in done:
                done.add((pod.name, pod.restarts))
                first = len(done) == 1
                async for line in _read_pod(reader, pod, source, selection, tail=source.tail if first else None):
                    await queue.put(line)
            elif not source.follow or selection.pod or await _over(reader, job):
                if not done and selection.record:
                    for line in await _recorded_lines(reader, job.name, worker, selection):
                        await queue.put(line)
                elif not done:
                    text = f"worker {worker} of {job.name} has no log yet: {_state_of(pod, job)}"
                    await queue.put(NotFoundError(text))
                break
            else:
                await asyncio.sleep(POLL_SECONDS)
        await queue.put(None)
    except MeshwrightError as error:
        await queue.put(error)


def _state_of(pod: WorkerPod | None, job: Job) -> str:
    return f"pod {pod.name} is {pod.state}" if pod is not None else f"it has no pod. The job is {job.state}"


async def _recorded_lines(reader: JobReader, name: str, worker: int, selection: Selection) -> list[LogLine]:
    """What is left of a failure whose pod is gone."""
    job, pods = await reader.get(name), await reader.pods(name)
    found = await read_failure(reader, job, pods)
    gone = f"pod {selection.pod} no longer exists" if selection.pod else "the pod no longer exists"
    if found is None or found.failure.rank is None:
        text = f"{gone}, and its log with it. The job recorded: {selection.record}"
        return [LogLine(selection.pod, worker, None, text, agent=True)]
    failure, rank = found.failure, found.failure.rank
    about = [f"{gone}. The job recorded: {selection.record}", f"generation {failure.generation}, {failure.time}"]
    about += [f"last completed step: {found.step}"] if found.step is not None else []
    about += [f"phase {phase}: {seconds:.2f} s" for phase, seconds in found.phases]
    wrote = "the end of its log" if found.log else "it wrote nothing to its log"
    about.append(f"rank {rank}, from {found.where}: {wrote}{':' if found.log else ''}")
    lines = [LogLine(selection.pod, worker, None, text, agent=True) for text in about]
    lines += [LogLine(selection.pod, worker, rank, text) for text in found.log.splitlines()]
    if found.stacks:
        lines.append(LogLine(selection.pod, worker, None, f"the stacks of rank {rank}:", agent=True))
        lines += [LogLine(selection.pod, worker, rank, text) for text in found.stacks.splitlines()]
    return lines


async def _pod_to_read(
    reader: JobReader, name: str, worker: int, source: LogSource, failed: str = ""
) -> WorkerPod | None:
    """The pod whose log to read next; None if it has not started."""
    own = [pod for pod in await reader.pods(name) if pod.worker == worker]
    if failed:
        return next((pod for pod in own if pod.name == failed and pod.container_started), None)
    newest = newest_pods(own)
    if not newest:
        return None
    if source.previous and newest[0].restarts == 0:
        earlier = [pod for pod in own if pod.incarnation < newest[0].incarnation]
        return earlier[-1] if earlier else _no_previous(newest[0])
    return newest[0] if newest[0].container_started else None


def _no_previous(pod: WorkerPod) -> WorkerPod:
    raise NotFoundError(
        f"pod {pod.name} has no previous container, and no earlier pod of worker {pod.worker} exists: leave out "
        "--previous"
    )


async def _read_pod(
    reader: JobReader, pod: WorkerPod, source: LogSource, selection: Selection, tail: int | None
) -> AsyncIterator[LogLine]:
    """Yield the selected lines of a pod's log. The API server counts the last lines before they are selected."""
    params = {"follow": "true"} if source.follow else {}
    if tail is not None and (source.follow or not selection.ranks):
        params["tailLines"] = str(tail)
        tail = None
    params |= {"previous": "true"} if source.previous and pod.restarts else {}
    action = Action("get", PODS, reader.namespace, pod.name, "log")
    path = PODS.path(reader.namespace, pod.name, "log")
    with contextlib.suppress(NotFoundError):  # deleted since it was listed
        try:
            last: deque[LogLine] = deque(maxlen=tail)
            async for raw in reader.server.lines(path, action, params):
                line = LogLine.of(pod, raw.decode(errors="replace"))
                if selection.shows(line):
                    if tail is None:
                        yield line
                    else:
                        last.append(line)
            for line in last:
                yield line
        except RejectedError as error:
            raise RejectedError(f"the log of pod {pod.name} cannot be read: {error}", error.status) from error


async def _over(reader: JobReader, job: Job) -> bool:
    """Whether nothing more will be logged: the job has finished, or no longer exists."""
    try:
        now = await reader.get(job.name)
    except NotFoundError:
        return True
    return now.finished or now.uid != job.uid
