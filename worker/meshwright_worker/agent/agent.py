"""The agent's main loop: passes each event to the pure state machine and executes the actions that it returns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshwright.addresses import join_host_port
from meshwright.perplexity import perplexity
from meshwright.protocol.messages import MeshRequest, ReportReply, WorkerReport
from meshwright.protocol.run_config import NativeRun, UnsupportedRun
from meshwright_worker.agent import state_machine as decisions
from meshwright_worker.agent.coordinator_client import CoordinatorClient
from meshwright_worker.agent.coordinator_link import Heartbeat, MeshPoll
from meshwright_worker.agent.events import (
    BackgroundTaskFailed,
    CheckpointRequested,
    Event,
    EventQueue,
    LeaveRequested,
    MeshReceived,
    OutputWritten,
    PauseRequested,
    ProgressLogged,
    RankExited,
    RankMessageReceived,
    ShutdownRequested,
)
from meshwright_worker.agent.failure_evidence import DUMP_SECONDS, EvidenceRecorder
from meshwright_worker.agent.launcher import Launcher, LaunchError
from meshwright_worker.agent.metrics import WorkerMetrics
from meshwright_worker.agent.metrics_server import start_metrics_server
from meshwright_worker.agent.rank_environment import stages_of
from meshwright_worker.agent.rank_process import command_state, process_state
from meshwright_worker.agent.server_process import ServerProcess
from meshwright_worker.agent.settings import Settings
from meshwright_worker.agent.state_machine import build_report
from meshwright_worker.agent.stored_timelines import TimelineWriter
from meshwright_worker.preflight.checks import Pod, run_checks
from meshwright_worker.preflight.host import Host
from meshwright_worker.rank import messages
from meshwright_worker.rank.task import StepReport

log = logging.getLogger(__name__)

# A run is complete only once the operator knows it: a finished pod that did not report would count as lost.
COMPLETE_REPORT_SECONDS = 30.0
LAST_REPORT_SECONDS = 2.0
CLOCK_SECONDS = 10.0
"""Time to wait for the coordinator's first answer, which has its time, before the pod is checked."""

# Minimum interval between lines, so that fast steps do not flood the log.
LINE_SECONDS = 1.0


class Agent:
    """One worker pod's agent. `run` returns its exit code."""

    def __init__(self, settings: Settings, environment: Mapping[str, str], server: ServerProcess | None = None) -> None:
        """`server` is a fork server that was started already, if any."""
        self._settings = settings
        self._event_queue: EventQueue = asyncio.Queue()
        self._state_machine = decisions.AgentStateMachine(
            settings.worker, settings.incarnation, settings.pod_uid, settings.drain_seconds
        )
        self._launcher = Launcher(settings, self._event_queue, environment, server)
        self._environment = environment
        self._metrics = WorkerMetrics(settings.namespace, settings.job)
        self._evidence = EvidenceRecorder(settings, environment)
        self._timelines = TimelineWriter(settings.checkpoint_dir)
        self._training_log = TrainingLog(None)
        # Collectives between GPUs cannot be left reliably.
        self._holds_state = not Host().has_gpus
        self._started_before = False
        self._last_reported: tuple[object, ...] = ()
        self._shutdown_requested = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        """Run until the run is complete, the pod is asked to stop, or the coordinator rejects it permanently."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        log.info("agent of worker %d incarnation %d of job %s/%s", *self._identity())
        web = await start_metrics_server(self._metrics, self._settings.pod_address, self._settings.metrics_port)
        try:
            await self._launcher.warm_up()
            async with CoordinatorClient(self._settings) as client:
                self._start_coordinator_tasks(client)
                code = await self._main_loop()
                await self._cancel_background_tasks()
                await self._evidence.flush()
                await self._timelines.flush()
                delivered = await self._heartbeat.send_final_report(
                    LAST_REPORT_SECONDS if code else COMPLETE_REPORT_SECONDS
                )
                log.info(
                    "exit code=%d state=%s last-report=%s",
                    code,
                    self._state_machine.state,
                    "delivered" if delivered else "lost",
                )
                return code
        finally:
            await self._cancel_background_tasks()
            await self._launcher.close()
            if web is not None:
                await web.cleanup()

    def _identity(self) -> tuple[int, int, str, str]:
        settings = self._settings
        return settings.worker, settings.incarnation, settings.namespace, settings.job

    def _start_coordinator_tasks(self, client: CoordinatorClient) -> None:
        self._heartbeat = Heartbeat(
            client,
            self._build_report,
            self._event_queue,
            self._settings.report_seconds,
            self._on_reply,
            self._on_delivered,
        )
        self._poll = MeshPoll(
            client,
            self._build_mesh_request,
            self._event_queue,
            self._settings.reject_seconds,
            self._heartbeat.report_now,
        )
        self._start_background_task(self._poll.run())
        self._start_background_task(self._announce_prepared())
        self._start_background_task(self._heartbeat.run())
        self._start_background_task(self._check_pod(client))

    def _start_background_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        def on_done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._event_queue.put_nowait(BackgroundTaskFailed(error))

        task = asyncio.create_task(coroutine)
        task.add_done_callback(on_done)
        self._tasks.append(task)

    async def _cancel_background_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def _build_mesh_request(self) -> MeshRequest:
        return MeshRequest(
            worker=self._settings.worker,
            incarnation=self._settings.incarnation,
            pod_uid=self._settings.pod_uid,
            generation=self._state_machine.generation,
            address=self._settings.pod_address,
            store_port=self._launcher.store_port,
            lighthouse_port=self._launcher.lighthouse_port,
            preparing=self._launcher.preparing,
            holds_state=self._holds_state,
        )

    async def _announce_prepared(self) -> None:
        """Tell the coordinator when ranks can start at once. A job that grows waits for it."""
        if self._launcher.preparing:
            await self._launcher.prepared()
            if self._state_machine.generation == 0:
                self._poll.repeat()

    async def _check_pod(self, client: CoordinatorClient) -> None:
        """Check the pod, and report what was found. The checks stop nothing: the operator decides."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOCK_SECONDS):
                await client.answered.wait()
        settings = self._settings
        pod = Pod(
            needs=settings.needs,
            checkpoint_dir=Path(settings.checkpoint_dir) if settings.checkpoint_dir else None,
            library_path=self._environment.get("LD_LIBRARY_PATH", ""),
            clock_skew=client.clock_skew,
        )
        try:
            found = await asyncio.to_thread(run_checks, pod)
        except Exception:  # a check that raises says nothing about the pod
            log.exception("the checks of the pod failed")
            return
        for one in found.findings:
            log.warning("preflight check=%s: %s. Fix: %s", one.check, one.message, one.fix)
        self._state_machine.preflight = found
        self._heartbeat.report_now()

    def _build_report(self) -> WorkerReport:
        current = self._state_machine.current
        runs_command = current is not None and not current.uses_builtin_runtime
        read_state = command_state if runs_command else process_state
        now = time.monotonic()
        report = build_report(self._state_machine, now, read_state)
        message = self._evidence.mask(report.message)
        return report.model_copy(update={"message": message[:2048], "evidence": self._evidence.for_report(now)})

    def _on_reply(self, reply: ReportReply) -> None:
        if reply.generation > self._state_machine.generation:
            self._poll.wake()
        current = self._state_machine.current
        if current is not None and reply.generation == current.number:
            times = {view.rank: view.compute_seconds for view in current.ranks.values() if view.live}
            self._metrics.compute_times(times, reply.median_compute_seconds)
        if reply.pause is not None:
            self._event_queue.put_nowait(PauseRequested(reply.pause))
        if reply.leave is not None:
            self._event_queue.put_nowait(LeaveRequested(reply.leave))
        if reply.checkpoint_request is not None:
            self._event_queue.put_nowait(CheckpointRequested(reply.generation, reply.checkpoint_request))

    def _on_delivered(self, report: WorkerReport) -> None:
        if report.checkpoint is not None:
            self._launcher.checkpoint_delivered(report.checkpoint.path)

    def _on_signal(self, name: str) -> None:
        self._shutdown_requested.set()
        self._event_queue.put_nowait(ShutdownRequested(decisions.EXIT_DRAINED, name))

    async def _main_loop(self) -> int:
        actions: deque[decisions.Action] = deque()
        while True:
            while actions:
                action = actions.popleft()
                if isinstance(action, decisions.ExitAgent):
                    return action.code
                actions.extend(await self._execute(action))
                self._report_changes()
            if not self._state_machine.has_pending_start:
                self._poll.mark_applied(self._state_machine.generation)
            event = await self._next_event()
            actions.extend(self._state_machine.on_tick(time.monotonic()) if event is None else self._handle(event))
            self._report_changes()

    async def _execute(
        self,
        action: decisions.StartRanks
        | decisions.LeaveRanks
        | decisions.RequestCheckpoint
        | decisions.TerminateRanks
        | decisions.DumpStacks
        | decisions.KillRanks,
    ) -> list[decisions.Action]:
        match action:
            case decisions.StartRanks():
                return await self._start(action)
            case decisions.LeaveRanks(generation=generation, ranks=ranks):
                log.info("ranks %s leave generation %d and hold their state", list(ranks), generation)
                self._launcher.leave(ranks, generation)
            case decisions.RequestCheckpoint():
                log.info("asking rank 0 for a checkpoint after its current step")
                self._launcher.request_checkpoint()
            case decisions.TerminateRanks(ranks=ranks):
                log.info("asking ranks %s to stop", list(ranks))
                self._launcher.terminate(ranks)
            case decisions.DumpStacks(ranks=ranks, named=named):
                await self._dump_stacks(ranks, named)
            case decisions.KillRanks(ranks=ranks):
                log.info("killing ranks %s", list(ranks))
                self._launcher.kill(ranks)
        return []

    async def _dump_stacks(self, ranks: tuple[int, ...], named: int | None) -> None:
        """Record what ranks do that make no progress, before they are killed."""
        current = self._state_machine.current
        if current is None:
            return
        log.warning("ranks %s make no progress: recording their stacks", list(ranks))
        current.processes(time.monotonic(), process_state if current.uses_builtin_runtime else command_state)
        self._launcher.dump_stacks(ranks)
        await self._launcher.stacks_written(ranks, DUMP_SECONDS)
        self._evidence.ranks_hung(current, self._launcher.written, time.monotonic(), named)

    def _report_changes(self) -> None:
        """Report at once what others wait for: a new state, a failure, a checkpoint."""
        current = self._state_machine.current
        reportable = (
            self._state_machine.state,
            self._state_machine.checkpoint,
            current and (current.number, len(current.failures), current.paused, current.checkpoint_request),
            current and len(current.live) - len(current.busy),
            current and [bool(tier.error) for tier in current.tiers],
            self._evidence.for_report(time.monotonic()),
        )
        if reportable != self._last_reported:
            self._last_reported = reportable
            self._heartbeat.report_now()

    async def _next_event(self) -> Event | None:
        deadline = self._state_machine.deadline
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return await self._event_queue.get()
        except TimeoutError:
            return None

    def _handle(self, event: Event) -> list[decisions.Action]:
        now = time.monotonic()
        match event:
            case MeshReceived(document=document):
                return self._state_machine.on_mesh(document, now)
            case RankMessageReceived(generation=generation, rank=rank, message=message):
                actions = self._state_machine.on_message(generation, rank, message, now, _time_of_day())
                if isinstance(message, messages.RankFailed):
                    self._record_failure(generation, rank, now)
                self._record_message(generation, rank, message, now)
                return actions
            case OutputWritten(generation=generation, rank=rank):
                return self._state_machine.on_output(generation, rank, now)
            case ProgressLogged(generation=generation, rank=rank, report=report):
                actions = self._state_machine.on_logged(generation, rank, report, now)
                self._record_step(generation, rank, report, now)
                return actions
            case RankExited(generation=generation, rank=rank, code=code, tail=tail, pid=pid):
                log.info("rank exited rank=%d generation=%d code=%d", rank, generation, code)
                self._launcher.remove(pid)
                self._metrics.rank_up(rank, up=False)
                self._timelines.write(self._metrics.timelines.get(rank))
                actions = self._state_machine.on_exit(generation, rank, code, tail, now, pid)
                self._record_failure(generation, rank, now)
                return actions
            case PauseRequested() | LeaveRequested() | CheckpointRequested():
                return self._handle_request(event, now)
            case ShutdownRequested(code=code, reason=reason):
                if self._state_machine.exit_code_on_shutdown is None:
                    log.info("shutting down: %s", reason)
                return self._state_machine.on_shutdown(code, now)
            case BackgroundTaskFailed(error=error):
                raise error

    def _handle_request(
        self, event: PauseRequested | LeaveRequested | CheckpointRequested, now: float
    ) -> list[decisions.Action]:
        match event:
            case PauseRequested(generation=generation):
                return self._pause(generation, now)
            case LeaveRequested(generation=generation):
                return self._state_machine.on_leave(generation, now)
            case CheckpointRequested(generation=generation, request=request):
                return self._state_machine.on_checkpoint_request(generation, request, now)

    def _record_failure(self, generation: int, rank: int, now: float) -> None:
        current = self._state_machine.current
        if current is not None and current.has_ranks_of(generation):
            self._evidence.rank_failed(current, rank, self._launcher.written(rank), now)

    def _pause(self, generation: int, now: float) -> list[decisions.Action]:
        """Every reply in a pause has it: log the first."""
        current = self._state_machine.current
        paused_before = current is None or current.paused
        actions = self._state_machine.on_pause(generation, now)
        if current is not None and current.paused and not paused_before:
            log.info("generation %d is paused: its ranks stop, and this pod waits for the next generation", generation)
        return actions

    async def _start(self, start: decisions.StartRanks) -> list[decisions.Action]:
        document, member = start.document, start.member
        ranks = range(member.first_rank, member.first_rank + member.ranks)
        master = join_host_port(document.master_address, document.master_port)
        self._launcher.take_over(start)
        log.info(
            "generation %d: ranks %s of %d, store %s", document.generation, list(ranks), document.world_size, master
        )
        if isinstance(document.run, UnsupportedRun):
            log.error("%s", document.run.reason)
            return self._state_machine.on_rejected_run(document.generation, document.run.reason, time.monotonic())
        self._training_log = TrainingLog(document.run.training.steps if isinstance(document.run, NativeRun) else None)
        stages = stages_of(document.run, ranks)
        self._metrics.generation(document.generation, ranks, restart=self._started_before, stages=stages)
        self._started_before = True
        try:
            if not await self._prepare_unless_shutdown(start):
                return []
        except LaunchError as error:
            log.error("%s", error)
            return self._state_machine.on_spawn_failed(document.generation, ranks[0], str(error), time.monotonic())
        actions: list[decisions.Action] = []
        for rank in ranks:
            try:
                resumes = rank in start.resumed
                pid = self._launcher.resume(start, rank) if resumes else await self._launcher.spawn(start, rank)
            except LaunchError as error:
                log.error("%s", error)
                actions += self._state_machine.on_spawn_failed(document.generation, rank, str(error), time.monotonic())
                break
            how = "goes on" if resumes else "started"
            log.info("rank %s rank=%d generation=%d pid=%d", how, rank, document.generation, pid)
            self._metrics.rank_up(rank, up=True)
            actions += self._state_machine.on_spawned(document.generation, rank, pid, time.monotonic())
        return actions

    async def _prepare_unless_shutdown(self, start: decisions.StartRanks) -> bool:
        """Prepare to start the ranks. Return False if the pod was asked to stop while torch was still being
        imported.
        """
        prepare = asyncio.create_task(self._launcher.prepare(start))
        shutdown = asyncio.create_task(self._shutdown_requested.wait())
        await asyncio.wait({prepare, shutdown}, return_when=asyncio.FIRST_COMPLETED)
        shutdown.cancel()
        if not prepare.done():
            prepare.cancel()
            return False
        prepare.result()
        return True

    def _record_message(self, generation: int, rank: int, message: messages.RankMessage, now: float) -> None:
        """Log and count a message from a rank of the current generation."""
        current = self._state_machine.current
        if current is None or not current.has_ranks_of(generation):
            return
        match message:
            case messages.StepDone(report=report):
                self._record_step(generation, rank, report, now)
            case messages.CheckpointSaved(step=step, path=path, seconds=seconds):
                if current.uses_builtin_runtime:
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
            case messages.Held(step=step, seconds=seconds):
                log.info("rank holds its state rank=%d step=%d left-in=%.4f s", rank, step, seconds)
            case messages.Finished(outcome=outcome):
                log.info("rank finished rank=%d generation=%d outcome=%s", rank, generation, outcome)

    def _record_step(self, generation: int, rank: int, report: StepReport, now: float) -> None:
        current = self._state_machine.current
        if current is None or not current.has_ranks_of(generation):
            return
        self._metrics.step(rank, report)
        if rank == 0 and current.uses_builtin_runtime:
            line = self._training_log.line(report, current.throughput.tokens_per_second, now)
            if line is not None:
                log.info("%s", line)


def _time_of_day() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class TrainingLog:
    """Selects the steps that the pod's log shows, for `kubectl logs -f`.

    These are the first of a generation, the last of the run, else at most one per second.
    """

    def __init__(self, total_steps: int | None) -> None:
        self._total = total_steps
        self._last: float | None = None

    def line(self, report: StepReport, tokens_per_second: float, now: float) -> str | None:
        """Return the line for this step, or None; `now` is monotonic seconds."""
        due = self._last is None or now - self._last >= LINE_SECONDS or report.step == self._total
        evaluated = report.evaluation_loss
        due = due or evaluated is not None
        if not due:
            return None
        self._last = now
        step = f"{report.step}/{self._total}" if self._total else str(report.step)
        return (
            f"step {step} loss={report.loss:.4f} lr={report.learning_rate:.3g} grad_norm={report.gradient_norm:.3g}"
            f" tokens/s={tokens_per_second:.0f}"
            + (f" step_seconds={report.seconds:.3f}" if report.seconds else "")
            + (f" eval_loss={evaluated:.4f} perplexity={perplexity(evaluated):.4g}" if evaluated is not None else "")
        )
