"""Asks ranks of a running job for a profile, and fetches their traces, with commands in their pods."""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import json
import math
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from meshwright.api.labels import METRICS_PORT, PROFILE_DIRECTORY, PROFILE_REQUEST
from meshwright_cli.client.errors import (
    NotFoundError,
    RejectedError,
    UnreachableError,
    WaitTimeoutError,
)
from meshwright_cli.client.job_reader import JobReader
from meshwright_cli.client.objects import Job, WorkerPod, newest_pods, ranks_by_worker
from meshwright_cli.client.pod_exec import run_in_pod
from meshwright_cli.client.rank_metrics import RankSample, read_samples
from meshwright_cli.client.trace_merge import RankTrace, merge

POLL_SECONDS = 1.0
START_SECONDS, FETCH_SECONDS = 60.0, 600.0
STEPS = 3
"""Steps that are profiled if no others are named."""
LEAD_SECONDS = 5.0
"""Time from the request to the first step, if no steps are named. It doubles after each request that was too late."""
MAX_TRACE_BYTES = 2 << 30
"""Largest trace of a rank, as text."""
TRIES = 6
_TOO_LATE = "is over: the next one is"
"""In the answer of a rank that has passed the first step."""

_METRICS = """
import os, sys, urllib.request
address = os.environ["MESHWRIGHT_POD_IP"]
address = f"[{address}]" if ":" in address else address
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(opener.open(f"http://{address}:{sys.argv[1]}/metrics", timeout=20).read().decode())
"""
_REQUEST = f"""
import os, sys, tempfile
folder = os.path.join(tempfile.gettempdir(), "{PROFILE_DIRECTORY}")
os.makedirs(folder, mode=0o700, exist_ok=True)
path = os.path.join(folder, "{PROFILE_REQUEST}")
with open(path + ".part", "w") as file:
    file.write(sys.argv[1])
os.replace(path + ".part", path)
"""
_FETCH = f"""
import base64, os, sys, tempfile
path = os.path.join(tempfile.gettempdir(), "{PROFILE_DIRECTORY}", sys.argv[1])
if os.path.exists(path):
    with open(path, "rb") as file:
        sys.stdout.buffer.write(base64.b64encode(file.read()))
"""
_REMOVE = f"""
import glob, os, sys, tempfile
folder = os.path.join(tempfile.gettempdir(), "{PROFILE_DIRECTORY}")
request = os.path.join(folder, "{PROFILE_REQUEST}")
with open(request) as file:
    mine = sys.argv[1] in file.read()
for path in [*glob.glob(os.path.join(folder, sys.argv[1] + "-rank-*")), *([request] if mine else [])]:
    os.unlink(path)
"""
"""These run in the pod, with the Python of its image. The rank's part is `meshwright_worker.trainer.step_profiler`."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The traces of some ranks and steps of a job."""

    job: str
    steps: range
    traces: Sequence[RankTrace]

    def merged(self) -> dict[str, Any]:
        """One Chrome trace with a process for each rank, on one clock, that Perfetto opens."""
        return merge(self.traces)

    def write(self, path: Path) -> None:
        """Write `merged` to a file, compressed if its name ends with `.gz`."""
        content = json.dumps(self.merged()).encode()
        path.write_bytes(gzip.compress(content, compresslevel=5, mtime=0) if path.suffix == ".gz" else content)


async def profile_job(
    reader: JobReader, job: Job, ranks: Sequence[int] | None, steps: range | int, seconds: float
) -> Profile:
    """Profile ranks of a job that runs.

    Args:
        reader: reads the job and its pods.
        job: a job that runs.
        ranks: ranks; None: all.
        steps: the steps, or how many of the next ones.
        seconds: how long the job may take to complete the last of them.

    Raises:
        NotFoundError: the job has no such rank, or its pod does not run.
        RejectedError: the ranks cannot be profiled; the message says why.
        WaitTimeoutError: the steps were not completed in time.
    """
    if job.spec.runtime.command is not None:
        raise RejectedError(f"{job.name} runs a `runtime.command`: call torch.profiler in your script")
    chosen = _pods_of(job, await reader.pods(job.name), ranks)
    lead = LEAD_SECONDS
    for tried in range(1, TRIES + 1):
        wanted = _steps(job, await _samples(reader, chosen), steps, lead)
        try:
            return Profile(job.name, wanted, await _profiled(reader, job.name, chosen, wanted, seconds))
        except RejectedError as error:
            if isinstance(steps, range) or _TOO_LATE not in str(error) or tried == TRIES:
                raise
        lead *= 2
    raise AssertionError("the last try returns or raises")


def _pods_of(job: Job, pods: Sequence[WorkerPod], ranks: Sequence[int] | None) -> dict[int, WorkerPod]:
    """Rank -> its pod."""
    placed = {rank: worker for worker, own in ranks_by_worker(job.status).items() for rank in own}
    if not placed:
        raise NotFoundError(f"{job.name} has no ranks yet: it is {job.state or 'Pending'}")
    running = {pod.worker: pod for pod in newest_pods(pods) if pod.state == "Running"}
    found = {}
    for rank in sorted(set(placed if ranks is None else ranks)):
        if rank not in placed:
            raise NotFoundError(f"{job.name} has no rank {rank}: it has ranks 0 to {max(placed)}")
        if placed[rank] not in running:
            raise NotFoundError(f"the pod of rank {rank} does not run: {job.name} is {job.state}")
        found[rank] = running[placed[rank]]
    return found


async def _samples(reader: JobReader, chosen: Mapping[int, WorkerPod]) -> list[RankSample]:
    """What the metrics of the pods say about these ranks."""
    pods = sorted({pod.name for pod in chosen.values()})
    command = ("python", "-c", _METRICS, str(METRICS_PORT))
    pages = await asyncio.gather(*(_run(reader, pod, command) for pod in pods))
    samples: dict[int, RankSample] = {}
    for page in pages:
        samples |= read_samples(page.decode(errors="replace"))
    return [samples[rank] for rank in chosen if rank in samples]


def _steps(job: Job, samples: Sequence[RankSample], steps: range | int, lead: float) -> range:
    """The steps to profile. Raises RejectedError if they are over, or are not steps of the job."""
    # A rank that has just started has completed no step in its metrics.
    reached = max([job.status.step or 0, *(sample.step for sample in samples)])
    total = job.status.total_steps
    if isinstance(steps, range):
        wanted = steps
        if wanted.start <= reached:
            raise RejectedError(f"step {wanted.start} {_TOO_LATE} {reached + 1}. Leave the steps out to profile those")
    else:
        recent = [sample.step_seconds for sample in samples if sample.step_seconds]
        ahead = math.ceil(lead / max(recent)) if recent else 0
        wanted = range(reached + 2 + ahead, reached + 2 + ahead + steps)
    if total is not None and wanted.stop > total:
        raise RejectedError(
            f"{job.name} has {total} steps and has completed {reached}: steps {wanted.start} to {wanted.stop - 1} "
            "cannot be profiled, because pods stop after the last step"
        )
    return wanted


async def _profiled(
    reader: JobReader, job: str, chosen: Mapping[int, WorkerPod], steps: range, seconds: float
) -> list[RankTrace]:
    """Write the request into each pod, and wait for all traces."""
    name = secrets.token_hex(6)
    request = json.dumps({"name": name, "ranks": sorted(chosen), "first": steps.start, "last": steps.stop - 1})
    pods = sorted({pod.name for pod in chosen.values()})
    try:
        await asyncio.gather(*(_run(reader, pod, ("python", "-c", _REQUEST, request)) for pod in pods))
        async with asyncio.timeout(seconds):
            return list(await asyncio.gather(*(_trace(reader, name, rank, pod) for rank, pod in chosen.items())))
    except TimeoutError:
        reached = (await reader.get(job)).status.step or 0
        raise WaitTimeoutError(
            f"{job} did not complete step {steps.stop - 1} within {seconds:g} s: it has completed step {reached}"
        ) from None
    except NotFoundError:
        state = (await reader.get(job)).state
        raise NotFoundError(
            f"a pod of these ranks has ended or was replaced: {job} is {state}. Profile it again once it is Running"
        ) from None
    finally:
        remove = ("python", "-c", _REMOVE, name)
        # An error here must not hide the result. Ranks delete traces too, before their next profile.
        await asyncio.gather(*(run_in_pod(reader, pod, remove) for pod in pods), return_exceptions=True)


async def _trace(reader: JobReader, name: str, rank: int, pod: WorkerPod) -> RankTrace:
    """Wait for the trace of one rank, and fetch it."""
    command = ("python", "-c", _FETCH, f"{name}-rank-{rank}.json.gz")
    while True:
        content = await _run(reader, pod.name, command, FETCH_SECONDS)
        if content:
            break
        await asyncio.sleep(POLL_SECONDS)
    trace = read_trace(content, rank)
    if error := (trace.get("meshwright") or {}).get("error"):
        raise RejectedError(f"rank {rank}: {error}")
    return RankTrace(rank, pod.worker, pod.node, trace)


def read_trace(content: bytes, rank: int) -> dict[str, Any]:
    """The trace that a pod has sent.

    Raises:
        RejectedError: it is none. The pod runs an image of the job's choice, so its size is limited too.
    """
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(base64.b64decode(content))) as file:
            text = file.read(MAX_TRACE_BYTES + 1)
        trace = json.loads(text) if len(text) <= MAX_TRACE_BYTES else None
    except (ValueError, EOFError, OSError, zlib.error, RecursionError):
        trace = None
    if not isinstance(trace, dict):
        raise RejectedError(
            f"rank {rank} has sent no trace of at most {MAX_TRACE_BYTES >> 20} MiB: profile fewer steps"
        )
    return trace


async def _run(reader: JobReader, pod: str, command: Sequence[str], seconds: float = START_SECONDS) -> bytes:
    """Run a command in a pod; again if the API server or the node is overloaded, or the connection is cut."""
    for tried in range(1, TRIES + 1):
        try:
            return await run_in_pod(reader, pod, command, seconds=seconds)
        except (UnreachableError, RejectedError) as error:
            passes = isinstance(error, UnreachableError) or error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
            if not passes or tried == TRIES:
                raise
        await asyncio.sleep(POLL_SECONDS)
    raise AssertionError("the last try returns or raises")
