"""The state of one mesh generation on this worker, computed from its ranks' messages and exits. Pure."""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median

from meshwright.protocol.messages import (
    AgentState,
    CheckpointAnswer,
    CheckpointCommit,
    CheckpointTier,
    Evaluation,
    FailureKind,
    HeldCopy,
    HeldState,
    Phase,
    Progress,
    RankProcess,
    RankWork,
    ResumedFrom,
)
from meshwright_worker.rank import failures, messages
from meshwright_worker.rank.task import Outcome, StepReport, TierReport

THROUGHPUT_STEPS = 20

# 128 + SIGTERM. A command that exits with it reports: I saved and stopped, because this rank or a peer was asked to;
# restart me.
EXIT_STOPPED = 143
MAX_RANK_PHASES = 16
IDLE_SECONDS = 5.0
"""After this time without a message, a report includes the state of a rank's process."""

_SHORTEST_WAIT = 1e-6
"""Shorter waits of a step, in seconds, are not reported."""


class Throughput:
    """Mean step time, tokens per second and FLOP/s over the last steps, so that one slow step has little effect."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=THROUGHPUT_STEPS)

    def add(self, tokens: int, seconds: float, flops: float = 0.0) -> None:
        """Add one step that processed `tokens` tokens with `flops` over the entire job in `seconds`."""
        self._steps.append((tokens, seconds, flops))

    @property
    def step_seconds(self) -> float:
        """Mean time of a step; 0 before the first step."""
        return self._seconds / len(self._steps) if self._steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the entire job; 0 before the first step."""
        return sum(tokens for tokens, _, _ in self._steps) / self._seconds if self._seconds > 0 else 0.0

    @property
    def flops_per_second(self) -> float:
        """Model FLOP/s of the entire job; 0 before the first step."""
        return sum(flops for _, _, flops in self._steps) / self._seconds if self._seconds > 0 else 0.0

    @property
    def _seconds(self) -> float:
        return sum(seconds for _, seconds, _ in self._steps)


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's failure."""

    rank: int
    kind: FailureKind
    message: str


@dataclass(slots=True)
class RankStatus:
    """The known state of one rank."""

    rank: int
    pid: int | None = None
    exit_code: int | None = None
    running: bool = False
    outcome: Outcome | None = None
    step: int | None = None
    phase: str = ""
    phases: list[tuple[str, float]] = field(default_factory=list)
    """Name and seconds of each phase of its start."""
    held: HeldState | None = None
    """The state that its process holds since it has left the generation, or the one before if it waits."""
    waits_to_go_on: bool = False
    """Whether its process is that of the generation before, and has not been told to go on."""
    work: RankWork | None = None
    """How far it is with work that takes long, until it completes that phase."""
    process_state: str = ""
    """State letter of its process when it was last read."""
    compute: deque[float] = field(default_factory=lambda: deque(maxlen=THROUGHPUT_STEPS))
    """Seconds for which it computed in each of the last steps."""
    data: deque[float] = field(default_factory=lambda: deque(maxlen=THROUGHPUT_STEPS))
    """Seconds for which it waited for data in each of the last steps."""
    waited: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=THROUGHPUT_STEPS))
    """Dimension -> seconds for which it waited for communication, in each of the last steps."""
    last_message_at: float = 0.0
    """Time of its last message, or of its start. For a user's command that reports no steps, of its last output."""

    @property
    def compute_seconds(self) -> float | None:
        """Median of the time for which it computed in the last steps; None before the first."""
        return round(median(self.compute), 6) if self.compute else None

    @property
    def data_seconds(self) -> float | None:
        """Mean wait for data in the last steps: a stall may be in few of them. None before the first step."""
        return round(fmean(self.data), 6) if self.data else None

    @property
    def waits(self) -> dict[str, float]:
        """Dimension -> median wait for communication in the last steps, without the shortest ones."""
        names = {name for step in self.waited for name in step}
        medians = {name: median([step.get(name, 0.0) for step in self.waited]) for name in sorted(names)}
        return {name: round(seconds, 6) for name, seconds in medians.items() if seconds >= _SHORTEST_WAIT}

    @property
    def live(self) -> bool:
        """Whether its process runs."""
        return self.pid is not None and self.exit_code is None

    @property
    def busy(self) -> bool:
        """Whether its process runs and takes part in the generation."""
        return self.live and self.held is None


@dataclass(slots=True)
class MeshGeneration:
    """The local ranks of one generation. Times are monotonic seconds."""

    number: int
    first_rank: int
    count: int
    uses_builtin_runtime: bool
    """Whether ranks run the built-in runtime, which reports events. The user's command only starts and exits."""
    started: float
    since: int = field(init=False)
    """The generation in which its ranks were started. Ranks of a replica group go on in later ones."""
    in_memory: bool = False
    """Whether its ranks hold their state when it is interrupted."""
    ranks: dict[int, RankStatus] = field(init=False)
    failures: list[Failure] = field(default_factory=list)
    failed_at: float | None = None
    ending: bool = False
    """Ranks were asked to stop: an exit from now on is not a failure."""
    paused: bool = False
    """They were asked by the coordinator, and the pod stays."""
    latest: StepReport | None = None
    total_steps: int | None = None
    """Steps of the run, for a user's command."""
    evaluation: Evaluation | None = None
    """The newest evaluation with a finite loss (JSON cannot encode others). Only the worker of rank 0 has it."""
    throughput: Throughput = field(default_factory=Throughput)
    checkpoint: CheckpointCommit | None = None
    checkpoint_request: CheckpointAnswer | None = None
    """The last request for a checkpoint, and the step after which it is taken. Only the worker of rank 0 has it."""
    resumed_from: ResumedFrom | None = None
    """The checkpoint of another run that its ranks have begun from."""
    tiers: list[CheckpointTier] = field(default_factory=list)
    """Where checkpoints are saved. Only the worker of rank 0 has it."""
    phases: list[Phase] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.since = self.number
        self.ranks = {rank: RankStatus(rank) for rank in range(self.first_rank, self.first_rank + self.count)}

    def has_ranks_of(self, generation: int) -> bool:
        """Whether its ranks are those of a generation: they were started in it, or went on in it."""
        return self.since <= generation <= self.number

    def go_on(self, generation: int, now: float) -> None:
        """Let its ranks go on in another generation. A rank may have waited for those that restart."""
        self.number = generation
        for view in self.ranks.values():
            view.last_message_at = now

    def record_spawn(self, rank: int, pid: int, now: float) -> None:
        """Record that the process of `rank` runs. A command counts as training from now on, since it sends no
        messages.
        """
        view = self.ranks[rank]
        view.pid = pid
        view.held, view.waits_to_go_on = None, False
        view.last_message_at = now
        view.running = not self.uses_builtin_runtime
        if all(other.pid is not None and not other.waits_to_go_on for other in self.ranks.values()):
            self.phases.append(Phase(name="spawn", seconds=now - self.started))

    def take_over(self, rank: int, before: RankStatus, now: float) -> None:
        """Count the process that held its state as `before` as this rank's. If a rank of this worker cannot be started,
        it holds its state for the next generation.
        """
        view = self.ranks[rank]
        view.pid, view.held, view.waits_to_go_on, view.last_message_at = before.pid, before.held, True, now

    def rank_of_process(self, pid: int) -> int | None:
        """The rank whose process has this id; None if no rank that runs has it."""
        return next((view.rank for view in self.ranks.values() if view.live and view.pid == pid), None)

    def record_spawn_failure(self, rank: int, message: str, now: float) -> None:
        """Record that the process of `rank` could not be started."""
        self._record_failure(Failure(rank, FailureKind.ERROR, message), now)

    def record_rejected_run(self, message: str, now: float) -> None:
        """Record that this image cannot execute the run, so that no rank is started."""
        self._record_failure(Failure(self.first_rank, FailureKind.REJECTED, message), now)

    def record_message(self, rank: int, message: messages.RankMessage, now: float, time_of_day: str) -> None:
        """Record a message of `rank`. `time_of_day` is in RFC 3339 format."""
        view = self.ranks[rank]
        view.last_message_at = now
        self._record_rank_progress(view, message)
        view.work = _work_of(message, view.work)
        match message:
            case messages.Running(step=step, source=source):
                view.running = True
                self.resumed_from = ResumedFrom(step=step, path=source) if source else None
            case messages.Finished(outcome=outcome):
                view.outcome = outcome
            case messages.Held(step=step, reduced=reduced, copies=copies):
                found = [HeldCopy(rank=of, step=at) for of, at in copies]
                view.held = HeldState(step=step, reduced=reduced, copies=found or None)
            case messages.RankFailed(failure=kind, message=text):
                if not self.ending:
                    self._record_failure(Failure(rank, kind, text), now)
            case messages.CheckpointSaved(step=step, path=path):
                self.checkpoint = CheckpointCommit(step=step, time=time_of_day, path=path)
            case messages.CheckpointBegun(step=step):
                if self.checkpoint_request is not None:
                    self.checkpoint_request = self.checkpoint_request.model_copy(update={"step": step})
            case messages.PhaseDone(name=name, seconds=seconds) if rank == 0:
                self.phases.append(Phase(name=name[:32], seconds=seconds))
            case messages.StepDone(report=report) if rank == self.first_rank:
                self._record_latest(report)
                self._record_evaluation(report)
                if report.tiers is not None:
                    self.tiers = [_tier_of(tier) for tier in report.tiers]

    def record_output(self, rank: int, now: float) -> None:
        """Record that the command of `rank` wrote output: its only sign of progress, unless it reports its steps."""
        if self.ranks[rank].step is None:
            self.ranks[rank].last_message_at = now

    def record_logged(self, rank: int, report: StepReport) -> None:
        """Record a step that was found in the log of a command. It is shown, and does not show that the rank is alive
        for longer than its output does.
        """
        self.ranks[rank].work = None
        if rank == self.first_rank:
            self._record_latest(report)

    def _record_latest(self, report: StepReport) -> None:
        if not report.has_loss and self.latest is not None:  # a line about a step may come before the one with its loss
            report = replace(report, loss=self.latest.loss, has_loss=self.latest.has_loss)
        self.total_steps = report.total_steps or self.total_steps
        self.latest = report
        if report.seconds > 0:  # a command's first report of a start has no time, nor has a second one about a step
            self.throughput.add(report.tokens, report.seconds, report.model_flops)

    def _record_evaluation(self, report: StepReport) -> None:
        loss = report.evaluation_loss
        if self.first_rank == 0 and loss is not None and math.isfinite(loss):
            self.evaluation = Evaluation(step=report.step, loss=loss)

    def _record_rank_progress(self, view: RankStatus, message: messages.RankMessage) -> None:
        """Record the progress of each rank: a hang shows in the ranks, not in the job's progress."""
        match message:
            case messages.PhaseDone(name=name):
                view.phase = name[:32]
                if len(view.phases) < MAX_RANK_PHASES:
                    view.phases.append((view.phase, message.seconds))
            case messages.StepDone(report=report):
                view.step = report.step
                if report.times is not None and 0 < report.times.compute < math.inf:
                    view.compute.append(report.times.compute)
                    view.waited.append(report.times.waits)
                    view.data.append(report.data_seconds)

    def record_exit(self, rank: int, code: int, tail: Sequence[str], now: float) -> None:
        """Record that the process of `rank` exited with `code` (negative: the signal that killed it); `tail` is its
        last output.
        """
        view = self.ranks[rank]
        view.exit_code = code
        view.running = False
        if not self.uses_builtin_runtime:
            view.outcome = self._command_outcome(code)
        is_explained = view.outcome is not None or any(failure.rank == rank for failure in self.failures)
        if not is_explained and not self.ending:
            kind, text = _kind_of_exit(code, tail), _describe_exit(rank, code, tail)
            if not self.uses_builtin_runtime and failures.is_invalid_command(code, tail):
                kind, text = FailureKind.INVALID_INPUT, f"`runtime.command` cannot run: {text}"
            self._record_failure(Failure(rank, kind, text), now)

    def _command_outcome(self, code: int) -> Outcome | None:
        if self.ending:
            return Outcome.STOPPED
        return {0: Outcome.COMPLETE, EXIT_STOPPED: Outcome.STOPPED}.get(code)

    def takes_request(self, request: str) -> bool:
        """Whether rank 0 is here, trains with the built-in runtime, and was not asked for this checkpoint before."""
        first = self.ranks.get(0)
        known = self.checkpoint_request is not None and self.checkpoint_request.request == request
        trains = first is not None and first.live and first.running and not self.ending
        return self.uses_builtin_runtime and trains and not known

    def record_pause(self) -> None:
        """Record that all ranks of the job are asked to stop. A peer that was lost has stopped before this worker's
        ranks were asked, so that it is not a failure.
        """
        self.paused = True
        if all(failure.kind is FailureKind.PEER_LOST for failure in self.failures):
            self.failures.clear()
            self.failed_at = None

    def _record_failure(self, failure: Failure, now: float) -> None:
        self.failures.append(failure)
        self.failed_at = now if self.failed_at is None else self.failed_at

    @property
    def live(self) -> list[int]:
        """Ranks whose processes run."""
        return [view.rank for view in self.ranks.values() if view.live]

    @property
    def busy(self) -> list[int]:
        """Ranks whose processes run and take part in the generation."""
        return [view.rank for view in self.ranks.values() if view.busy]

    @property
    def can_save(self) -> bool:
        """Whether its ranks may have a step to save, and peers to save it with. Unknown for the user's command."""
        steps = all(view.step is not None for view in self.ranks.values())
        return not self.uses_builtin_runtime or (steps and not self.failures)

    @property
    def failure(self) -> Failure | None:
        """The failure that explains best: the first that is not a lost peer, else the first."""
        root_causes = [failure for failure in self.failures if failure.kind is not FailureKind.PEER_LOST]
        return next(iter(root_causes or self.failures), None)

    @property
    def state(self) -> AgentState:
        """The state of the ranks only: draining is part of the agent's state."""
        views = list(self.ranks.values())
        if self.busy:
            all_running = all(view.running or view.outcome for view in views)
            return AgentState.RUNNING if all_running else AgentState.STARTING
        if self.failures:
            return AgentState.FAILED
        if all(view.outcome is Outcome.COMPLETE for view in views):
            return AgentState.COMPLETE
        if any(view.pid is None or view.waits_to_go_on for view in views):
            return AgentState.STARTING
        return AgentState.IDLE

    def processes(self, now: float, read_process_state: Callable[[int], str]) -> list[RankProcess]:
        """Return the ranks' processes for the report. `read_process_state` is called for ranks that have been idle."""
        processes_report = []
        for view in self.ranks.values():
            if view.pid is None:
                continue
            idle = max(0.0, now - view.last_message_at) if view.live else 0.0
            view.process_state = read_process_state(view.pid) if idle >= IDLE_SECONDS else ""
            processes_report.append(
                RankProcess(
                    rank=view.rank,
                    pid=view.pid,
                    exit_code=view.exit_code,
                    step=view.step,
                    phase=view.phase,
                    idle_seconds=round(idle, 3),
                    state=view.process_state,
                    compute_seconds=view.compute_seconds,
                    held=view.held if view.live and (self.failures or not view.waits_to_go_on) else None,
                    data_seconds=view.data_seconds,
                    waits=view.waits,
                    work=view.work if view.live else None,
                )
            )
        return processes_report

    @property
    def progress(self) -> Progress | None:
        """Training progress, from the worker of rank 0; None on other workers and before the first step.

        Without a loss if it is not finite, as in a step that is skipped: JSON cannot encode it.
        """
        if self.first_rank != 0 or self.latest is None:
            return None
        has_loss = math.isfinite(self.latest.loss)
        return Progress(
            step=self.latest.step,
            loss=self.latest.loss if has_loss else 0.0,
            has_loss=has_loss,
            total_steps=self.total_steps,
            tokens_per_second=self.throughput.tokens_per_second,
            step_seconds=self.throughput.step_seconds,
            samples=self.latest.samples,
            checkpoint_stall_seconds=self.latest.checkpoint_stall_seconds,
            mfu=self.throughput.flops_per_second / peak if (peak := self.latest.peak_flops) else None,
        )


def _tier_of(tier: TierReport) -> CheckpointTier:
    texts = {"place": tier.place[:1024], "reason": tier.reason[:512], "error": tier.error[:1024]}
    return CheckpointTier(**{**asdict(tier), **texts})


def _work_of(message: messages.RankMessage, before: RankWork | None) -> RankWork | None:
    """What a rank is at work on after a message: any but one that says so ends it."""
    if not isinstance(message, messages.AtWork):
        return None
    return RankWork(**asdict(message.work)) if message.work is not None else before


def _describe_exit(rank: int, code: int, tail: Sequence[str]) -> str:
    # A command that exits with 0 is done. Only a rank of the built-in runtime can exit with 0 without finishing.
    return failures.describe_exit(rank, code, tail) if code else f"rank {rank} exited without finishing the run"


def _kind_of_exit(code: int, tail: Sequence[str]) -> FailureKind:
    if code == -signal.SIGABRT:  # gloo's own threads abort the process when a connection breaks under them
        return failures.classify_output("\n".join(tail))
    return failures.classify_output(failures.error_line(tail)) if code > 0 else FailureKind.ERROR
