"""The agent's main loop: each event goes through the pure core, and the actions that follow are done."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any

from meshwright.protocol import MeshRequest, WorkerReport
from meshwright_worker import messages
from meshwright_worker.agent import core as decisions
from meshwright_worker.agent.client import CoordinatorClient
from meshwright_worker.agent.inbox import Event, Inbox, Leave, LoopBroke, MeshArrived, RankExited, RankTold
from meshwright_worker.agent.launcher import Launcher, LaunchError
from meshwright_worker.agent.link import Heartbeat, MeshPoll
from meshwright_worker.agent.metrics_server import start_metrics_server
from meshwright_worker.agent.ranks import process_state
from meshwright_worker.agent.report import build_report
from meshwright_worker.agent.training_log import TrainingLog
from meshwright_worker.metrics import TrainerMetrics
from meshwright_worker.settings import Settings

log = logging.getLogger(__name__)

# A run is complete only once the operator knows it; without it a finished pod would be taken for a lost one.
COMPLETE_REPORT_SECONDS = 30.0
LAST_REPORT_SECONDS = 2.0


class Agent:
    """One worker pod's agent. `run` returns its exit code."""

    def __init__(self, settings: Settings, environment: Mapping[str, str]) -> None:
        self._settings = settings
        self._inbox: Inbox = asyncio.Queue()
        self._core = decisions.Core(settings.worker, settings.incarnation, settings.drain_seconds)
        self._launcher = Launcher(settings, self._inbox, environment)
        self._metrics = TrainerMetrics(settings.namespace, settings.job)
        self._training_log = TrainingLog(None)
        self._started_before = False
        self._told: tuple[object, ...] = ()
        self._leaving = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        """Live until the run is complete, the pod is to go, or the coordinator refuses it for good."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        log.info("agent of worker %d incarnation %d of job %s/%s", *self._identity())
        web = await start_metrics_server(self._metrics, self._settings.pod_address, self._settings.metrics_port)
        try:
            await self._launcher.warm_up()
            async with CoordinatorClient(self._settings) as client:
                self._link(client)
                code = await self._live()
                await self._end_links()
                heard = await self._heartbeat.last(LAST_REPORT_SECONDS if code else COMPLETE_REPORT_SECONDS)
                log.info("exit code=%d state=%s last-report=%s", code, self._core.state, "heard" if heard else "lost")
                return code
        finally:
            await self._end_links()
            await self._launcher.close()
            if web is not None:
                await web.cleanup()

    def _identity(self) -> tuple[int, int, str, str]:
        settings = self._settings
        return settings.worker, settings.incarnation, settings.namespace, settings.job

    def _link(self, client: CoordinatorClient) -> None:
        self._poll = MeshPoll(client, self._hello, self._inbox, self._settings.reject_seconds)
        self._heartbeat = Heartbeat(client, self._report, self._inbox, self._settings.report_seconds, self._announced)
        self._background(self._poll.run())
        self._background(self._heartbeat.run())

    def _background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._inbox.put_nowait(LoopBroke(error))

        task = asyncio.create_task(coroutine)
        task.add_done_callback(ended)
        self._tasks.append(task)

    async def _end_links(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def _hello(self) -> MeshRequest:
        return MeshRequest(
            worker=self._settings.worker,
            incarnation=self._settings.incarnation,
            pod_uid=self._settings.pod_uid,
            generation=self._core.generation,
            address=self._settings.pod_address,
            store_port=self._launcher.store_port,
        )

    def _report(self) -> WorkerReport:
        report = build_report(self._core, time.monotonic(), process_state)
        return report.model_copy(update={"pod_uid": self._settings.pod_uid})

    def _announced(self, generation: int) -> None:
        if generation > self._core.generation:
            self._poll.hurry()

    def _on_signal(self, name: str) -> None:
        self._leaving.set()
        self._inbox.put_nowait(Leave(decisions.EXIT_DRAINED, name))

    async def _live(self) -> int:
        actions: deque[decisions.Action] = deque()
        while True:
            while actions:
                action = actions.popleft()
                if isinstance(action, decisions.Exit):
                    return action.code
                actions.extend(await self._carry_out(action))
                self._tell_changes()
            if not self._core.waits_to_start:
                self._poll.acted(self._core.generation)
            event = await self._next_event()
            actions.extend(self._core.on_tick(time.monotonic()) if event is None else self._handle(event))
            self._tell_changes()

    async def _carry_out(self, action: decisions.Start | decisions.Signal | decisions.Kill) -> list[decisions.Action]:
        match action:
            case decisions.Start():
                return await self._start(action)
            case decisions.Signal(ranks=ranks):
                log.info("asking ranks %s to stop", list(ranks))
                self._launcher.terminate(ranks)
            case decisions.Kill(ranks=ranks):
                log.info("killing ranks %s", list(ranks))
                self._launcher.kill(ranks)
        return []

    def _tell_changes(self) -> None:
        """Report at once what others wait for: a state, a failure, a checkpoint."""
        current = self._core.current
        told = (self._core.state, self._core.checkpoint, current and (current.number, len(current.failures)))
        if told != self._told:
            self._told = told
            self._heartbeat.nudge()

    async def _next_event(self) -> Event | None:
        deadline = self._core.deadline
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return await self._inbox.get()
        except TimeoutError:
            return None

    def _handle(self, event: Event) -> list[decisions.Action]:
        now = time.monotonic()
        match event:
            case MeshArrived(document=document):
                return self._core.on_mesh(document, now)
            case RankTold(generation=generation, rank=rank, message=message):
                actions = self._core.on_message(generation, rank, message, now, _time_of_day())
                self._show(generation, rank, message, now)
                return actions
            case RankExited(generation=generation, rank=rank, code=code, tail=tail):
                log.info("rank ended rank=%d generation=%d code=%d", rank, generation, code)
                self._launcher.gone(rank)
                self._metrics.rank_up(rank, up=False)
                return self._core.on_exit(generation, rank, code, tail, now)
            case Leave(code=code, reason=reason):
                if self._core.leaving is None:
                    log.info("leaving: %s", reason)
                return self._core.on_leave(code, now)
            case LoopBroke(error=error):
                raise error

    async def _start(self, start: decisions.Start) -> list[decisions.Action]:
        document, member = start.document, start.member
        ranks = range(member.first_rank, member.first_rank + member.ranks)
        master = f"{document.master_address}:{document.master_port}"
        log.info(
            "generation %d: ranks %s of %d, store %s", document.generation, list(ranks), document.world_size, master
        )
        self._training_log = TrainingLog(document.run.training.steps if document.run.training else None)
        self._metrics.generation(document.generation, ranks, restart=self._started_before)
        self._started_before = True
        try:
            if not await self._prepared(start):
                return []
        except LaunchError as error:
            log.error("%s", error)
            return self._core.on_spawn_failed(document.generation, ranks[0], str(error), time.monotonic())
        actions: list[decisions.Action] = []
        for rank in ranks:
            try:
                pid = await self._launcher.spawn(start, rank)
            except LaunchError as error:
                log.error("%s", error)
                actions += self._core.on_spawn_failed(document.generation, rank, str(error), time.monotonic())
                break
            log.info("rank started rank=%d generation=%d pid=%d", rank, document.generation, pid)
            self._metrics.rank_up(rank, up=True)
            actions += self._core.on_spawned(document.generation, rank, pid, time.monotonic())
        return actions

    async def _prepared(self, start: decisions.Start) -> bool:
        """Whether the ranks may be started: not if the pod was told to go while torch was still being imported."""
        prepare = asyncio.create_task(self._launcher.prepare(start))
        leave = asyncio.create_task(self._leaving.wait())
        await asyncio.wait({prepare, leave}, return_when=asyncio.FIRST_COMPLETED)
        leave.cancel()
        if not prepare.done():
            prepare.cancel()
            return False
        prepare.result()
        return True

    def _show(self, generation: int, rank: int, message: messages.RankMessage, now: float) -> None:
        """Log and count what a rank of the current generation told."""
        current = self._core.current
        if current is None or current.number != generation:
            return
        match message:
            case messages.StepDone(report=report):
                self._metrics.step(rank, report)
                line = self._training_log.line(report, current.throughput.tokens_per_second, now) if rank == 0 else None
                if line is not None:
                    log.info("%s", line)
            case messages.CheckpointSaved(step=step, path=path, seconds=seconds):
                self._metrics.checkpoint_saved(seconds)
                log.info("checkpoint saved step=%d seconds=%.2f path=%s", step, seconds, path)
            case messages.PhaseDone(name=name, seconds=seconds):
                self._metrics.phase(rank, name, seconds)
                if rank == 0:
                    log.info("phase %s took %.2f s", name, seconds)
            case messages.RankFailed(failure=kind, message=text):
                log.warning("rank failed rank=%d generation=%d kind=%s: %s", rank, generation, kind, text)
            case messages.Running(step=step):
                log.info("rank trains rank=%d generation=%d after-step=%d", rank, generation, step)
            case messages.Finished(outcome=outcome):
                log.info("rank finished rank=%d generation=%d outcome=%s", rank, generation, outcome)


def _time_of_day() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
