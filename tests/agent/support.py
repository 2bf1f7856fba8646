"""A coordinator that speaks the protocol over real HTTP and is strict about it, and agents as real processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from meshwright.api import labels
from meshwright.api.checkpoint import CheckpointSpec
from meshwright.api.training import OptimizerSpec, TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.protocol import signing
from meshwright.protocol.messages import (
    AgentState,
    MeshDocument,
    MeshMember,
    MeshRequest,
    ReportReply,
    WorkerReport,
)
from meshwright.protocol.run_config import CommandRun, NativeRun
from meshwright.protocol.versions import VERSION_HEADER
from tests.patience import patient
from tests.runs import native_run

TOKEN = "t0ken-that-must-never-show"
NAMESPACE, JOB, UID = "team-a", "job", "0f3c"
ROOT = Path(__file__).resolve().parents[2]
NO_TORCH = str(ROOT / "tests" / "no_torch")


@dataclass
class Coordinator:
    """Holds what agents said and what they are to be told."""

    port: int
    """Reserved, because it may stop and start again."""
    document: MeshDocument | None = None
    hellos: dict[int, MeshRequest] = field(default_factory=dict)
    reports: list[WorkerReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    answer: int | None = None
    """A status to answer everything with, or None to behave."""
    headers: dict[str, str] = field(default_factory=dict)
    """Further headers of every answer."""
    pause: int = 0
    """The generation whose ranks must stop while their pods stay; 0 for none."""
    extra: dict[str, object] = field(default_factory=dict)
    """Fields of a newer version, in every message."""
    forge: bool = False
    """Whether answers carry the signature of somebody who does not know the token."""
    _runner: web.AppRunner | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    session: str = "session-1"
    asked: dict[str, list[float]] = field(default_factory=dict)
    """When requests of each path came."""
    counters: dict[tuple[str, int], int] = field(default_factory=dict)
    """The last counter of each path and worker."""
    _paused: dict[int, int] = field(default_factory=dict)
    """Worker -> the last generation for whose pause its poll was ended."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        base = f"/v1/jobs/{NAMESPACE}/{JOB}/{UID}"
        app.add_routes([web.post(f"{base}/mesh", self._serve), web.post(f"{base}/report", self._serve)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def announce(self, document: MeshDocument) -> None:
        self.document = document
        self._wake()

    def pause_ranks(self, generation: int) -> None:
        self.pause = generation
        self._wake()

    def answer_all(self, status: int | None) -> None:
        self.answer = status
        self._wake()

    def states(self, worker: int) -> list[AgentState]:
        """The states a worker reported, repetitions left out."""
        states: list[AgentState] = []
        for report in self.reports:
            if report.worker == worker and states[-1:] != [report.state]:
                states.append(report.state)
        return states

    def last(self, worker: int) -> WorkerReport | None:
        return next((report for report in reversed(self.reports) if report.worker == worker), None)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _serve(self, request: web.Request) -> web.Response:
        self.asked.setdefault(request.path, []).append(time.monotonic())
        body = await request.read()
        try:
            head = signing.check_request(TOKEN, request.method, request.path, request.headers)
        except signing.SignatureError as error:
            self.problems.append(str(error))
            return web.Response(status=401)
        sender = request.path, int(json.loads(body)["worker"])
        if not head.matches(body) or head.sender.worker != sender[1]:
            self.problems.append("a request has another body or sender than its headers say")
        last = self.counters.get(sender, 0)
        if head.session != self.session:
            return self._signed(head, 409, b"another session", last)
        if head.counter <= last:
            self.problems.append("a request is older than one before")
        self.counters[sender] = head.counter
        if request.headers[VERSION_HEADER] != "1":
            self.problems.append("wrong version")
        status, answer = await (self._mesh(body) if request.path.endswith("/mesh") else self._report(body))
        return self._signed(head, status, answer, head.counter)

    def _signed(self, head: signing.RequestHead, status: int, answer: bytes, counter: int) -> web.Response:
        digest = signing.digest_of(answer)
        signed = signing.answer_headers(TOKEN, head.signature, status, digest, self.session, counter)
        headers = {**signed, **self.headers}
        if self.forge:
            headers[signing.SIGNATURE] = "f" * 43
        return web.Response(status=status, body=answer, headers=headers)

    async def _mesh(self, body: bytes) -> tuple[int, bytes]:
        if self.answer:
            return self.answer, b""
        hello = MeshRequest.model_validate_json(body)
        self.hellos[hello.worker] = hello
        end = time.monotonic() + hello.wait_seconds
        while (left := end - time.monotonic()) > 0:
            if self.answer:
                return self.answer, b""
            if self.document is not None and self.document.generation > hello.generation:
                self.hellos.pop(hello.worker, None)
                return 200, json.dumps({**self.document.wire(), **self.extra}).encode()
            if self.pause and self.pause == hello.generation != self._paused.get(hello.worker):
                self._paused[hello.worker] = self.pause
                return 204, b""
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                break
        return 204, b""

    async def _report(self, body: bytes) -> tuple[int, bytes]:
        if self.answer:
            return self.answer, b""
        report = WorkerReport.model_validate_json(body)
        self.reports.append(report)
        generation = self.document.generation if self.document else 0
        pause = self.pause if self.pause and self.pause == report.generation else None
        reply = ReportReply(generation=generation, report_seconds=0.5, pause=pause)
        return 200, json.dumps({**reply.wire(), **self.extra}).encode()

    async def gang(self, workers: int, *, above: int = 0) -> list[MeshRequest]:
        """Wait until every worker waits for a generation newer than `above`."""

        def ready() -> bool:
            return all(w in self.hellos and self.hellos[w].generation >= above for w in range(workers))

        await until(ready, 60, lambda: f"hellos: {self.hellos}")
        return [self.hellos[worker] for worker in range(workers)]


async def until(condition: Callable[[], object], seconds: float, why: Callable[[], str] = str) -> None:
    """Wait for a condition, looking often."""
    end = time.monotonic() + patient(seconds)
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s; {why()}")
        await asyncio.sleep(0.02)


class AgentProcess:
    """`python -m meshwright_worker` with a pod's environment; its log is kept and shown when a test fails."""

    def __init__(
        self,
        coordinator: Coordinator,
        directory: Path,
        worker: int = 0,
        output: Path | None = None,
        *,
        torch: bool = False,
        **environment: str,
    ) -> None:
        """`output` is where standard output goes instead of the log; `torch` is whether the pod's image has torch."""
        self.log_path = directory / f"worker-{worker}.log"
        self.worker = worker
        variables = {
            labels.ENV_JOB_NAME: JOB,
            labels.ENV_JOB_NAMESPACE: NAMESPACE,
            labels.ENV_JOB_UID: UID,
            labels.ENV_WORKER_INDEX: str(worker),
            labels.ENV_INCARNATION: "0",
            labels.ENV_POD_UID: f"pod-{worker}",
            labels.ENV_POD_IP: f"127.0.0.{worker + 1}",
            labels.ENV_COORDINATOR_URL: coordinator.url,
            labels.ENV_TOKEN: TOKEN,
            labels.ENV_METRICS_PORT: "0",
            labels.ENV_GRACE_SECONDS: "20",
            labels.ENV_CHECKPOINT_DIR: str(directory / "checkpoints"),
            "MESHWRIGHT_REPORT_SECONDS": "0.5",
            "GLOO_SOCKET_IFNAME": "lo",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([*([] if torch else [NO_TORCH]), str(ROOT), str(ROOT / "worker")]),
            **environment,
        }
        with self.log_path.open("ab") as log, (output or self.log_path).open("ab") as written:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "meshwright_worker"], env=variables, stdout=written, stderr=log
            )
        self._descendants: set[int] = set()

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def ranks_started(self) -> list[tuple[int, int, int]]:
        """Every (rank, generation, pid) the log tells of."""
        lines = re.findall(r"rank started rank=(\d+) generation=(\d+) pid=(\d+)", self.log)
        return [(int(rank), int(generation), int(pid)) for rank, generation, pid in lines]

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def exit_code(self, seconds: float = 30) -> int:
        await until(lambda: self.process.poll() is not None, seconds, lambda: self.log)
        return self.process.returncode

    def processes(self) -> set[int]:
        """The agent and everything below it."""
        return {self.process.pid, *descendants(self.process.pid)}


def descendants(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in path.read_text().split()]
        except OSError:
            continue
        for child in children:
            yield child
            yield from descendants(child)


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def training_run(steps: int, *, tensor: int = 1, data_parallel: int = 1, every_steps: int = 1000) -> NativeRun:
    """Meshwright's own runtime on a model of a few thousand parameters."""
    return native_run(
        Architecture(layers=2, hidden_size=32, intermediate_size=64, heads=2, kv_heads=2, vocab_size=260),
        TrainingSpec(steps=steps, global_batch_size=4, sequence_length=32, optimizer=OptimizerSpec(learning_rate=1e-3)),
        (tensor, 1, data_parallel),
        checkpoint=CheckpointSpec(claim_name="claim", every_steps=every_steps),
    )


def mesh(generation: int, run: NativeRun | CommandRun, hellos: list[MeshRequest], ranks_each: int) -> MeshDocument:
    """The document of a generation whose members are those that said hello."""
    members = [
        MeshMember(
            worker=hello.worker,
            incarnation=hello.incarnation,
            address=hello.address,
            first_rank=index * ranks_each,
            ranks=ranks_each,
        )
        for index, hello in enumerate(hellos)
    ]
    return MeshDocument(
        generation=generation,
        world_size=len(members) * ranks_each,
        master_address=hellos[0].address,
        master_port=hellos[0].store_port,
        members=members,
        run=run,
    )
