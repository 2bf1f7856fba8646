"""Simulated worker agents that report phases, progress, checkpoints, evaluations, exit codes and lost peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.protocol.messages import (
    AgentState,
    CheckpointCommit,
    Evaluation,
    FailureKind,
    Phase,
    Progress,
    RankProcess,
    WorkerReport,
)
from meshwright.protocol.run_config import NativeRun
from tests.operator.world import Agent, Operator

if TYPE_CHECKING:
    from tests.golden.operator.machine import Machine

COMMAND_SECONDS = 60.0
GOING_ON = (AgentState.RUNNING, AgentState.STARTING)


@dataclass
class Worker(Agent):
    """The agent of one pod."""

    machine: Machine | None = None
    exit_code: int | None = None
    message: str = ""
    letter: str = ""
    """State letter (proc(5)) that its ranks report while they hang."""
    starts_in: float = 0.0
    evaluated: int | None = None
    committed: tuple[int, str] | None = None

    @property
    def first_rank(self) -> int:
        """The first rank of this worker in its current generation."""
        members = self.document.members if self.document is not None else []
        return next((m.first_rank for m in members if m.worker == self.pod.worker), 0)

    @property
    def ranks(self) -> int:
        """The number of ranks of this worker."""
        members = self.document.members if self.document is not None else []
        return next((m.ranks for m in members if m.worker == self.pod.worker), 1)

    def fail(self, kind: FailureKind, code: int | None, message: str) -> None:
        """Fails one of its ranks."""
        if self.state in GOING_ON:
            self.state, self.failure, self.exit_code, self.message = AgentState.FAILED, kind, code, message

    def notice(self) -> None:
        """Reacts to the deletion of its pod and to lost peers."""
        assert self.machine is not None
        path = f"/api/v1/namespaces/default/pods/{self.pod.name}"
        obj = self.machine.cluster.objects.get(path)
        if obj is not None and "deletionTimestamp" in obj["metadata"] and self.state in GOING_ON:
            self.state = AgentState.DRAINING
        if obj is not None and obj["spec"].get("nodeName") in self.machine.down:
            self.silent = True
        if self.state is not AgentState.RUNNING or self.document is None or self.hung:
            return
        for member in self.document.members:
            peer = self._peer(member.worker)
            if peer is self or peer is None and self._ended_well(member.worker, member.incarnation):
                continue
            if peer is None or peer.generation != self.generation or peer.state is AgentState.FAILED:
                self.fail(FailureKind.PEER_LOST, None, f"lost the connection to worker {member.worker}")
                return
            if peer.state is AgentState.DRAINING:
                self.state = AgentState.IDLE
                return

    def train(self, seconds: float, work: float) -> None:
        assert self.machine is not None
        if self.state is AgentState.STARTING:
            self.starts_in -= seconds
            if self.starts_in <= 0:
                self.state = AgentState.RUNNING
            return
        run = self.document.run if self.document is not None else None
        training = run.training if isinstance(run, NativeRun) else None
        super().train(seconds, float(training.steps) if training is not None else COMMAND_SECONDS)
        if training is None or run is None or self.first_rank or self.state not in (*GOING_ON, AgentState.COMPLETE):
            return
        step = int(self.trained)
        if run.checkpoint is not None:
            whole = step // run.checkpoint.interval * run.checkpoint.interval
            if whole > self.machine.saved.get(self.uid, 0):
                self.machine.saved[self.uid] = whole
                self.committed = (whole, self.machine.now.strftime("%Y-%m-%dT%H:%M:%SZ"))
        if training.evaluation is not None and step >= training.evaluation.every_steps:
            self.evaluated = step // training.evaluation.every_steps * training.evaluation.every_steps

    def talk(self, operator: Operator) -> None:
        before = self.generation
        super().talk(operator)
        if self.generation != before:
            assert self.machine is not None
            self.state, self.starts_in = AgentState.STARTING, self.machine.starting
            self.trained = float(self.machine.saved.get(self.uid, 0))
            self.exit_code, self.message, self.letter = None, "", ""

    def report(self) -> WorkerReport:
        native = self.document is not None and isinstance(self.document.run, NativeRun)
        live = self.state in (*GOING_ON, AgentState.FAILED) and self.document is not None
        reports = native and self.state in (*GOING_ON, AgentState.COMPLETE) and not self.first_rank
        trains = reports and self.state is not AgentState.STARTING and self.trained >= 1
        return WorkerReport(
            worker=self.pod.worker,
            incarnation=self.pod.incarnation,
            pod_uid=self.pod.uid,
            generation=self.generation,
            state=self.state,
            failure=self.failure,
            message=self.message,
            ranks=self._processes(native) if live else [],
            progress=self._progress() if trains else None,
            checkpoint=self._checkpoint() if reports else None,
            evaluation=self._evaluation() if trains else None,
            phases=self._phases(trains) if reports else [],
        )

    def _processes(self, native: bool) -> list[RankProcess]:
        running = self.state is not AgentState.STARTING
        return [
            RankProcess(
                rank=self.first_rank + number,
                pid=100 + number,
                exit_code=self.exit_code if number == 0 else None,
                step=int(self.trained) if native and running and self.trained >= 1 else None,
                phase=("load" if running else "spawn") if native else "",
                idle_seconds=self.idle,
                state=self.letter if self.hung else "",
            )
            for number in range(self.ranks)
        ]

    def _progress(self) -> Progress:
        step = int(self.trained)
        assert self.document is not None
        assert isinstance(self.document.run, NativeRun)
        training = self.document.run.training
        tokens = float(training.global_batch_size * training.sequence_length)
        samples = step * training.global_batch_size
        return Progress(step=step, loss=8.0 / (step + 1), tokens_per_second=tokens, step_seconds=1.0, samples=samples)

    def _checkpoint(self) -> CheckpointCommit | None:
        if self.committed is None:
            return None
        step, moment = self.committed
        return CheckpointCommit(step=step, time=moment, path=f"/meshwright/checkpoints/{self.pod.job}/step-{step}")

    def _evaluation(self) -> Evaluation | None:
        return None if self.evaluated is None else Evaluation(step=self.evaluated, loss=9.0 / (self.evaluated + 1))

    def _phases(self, trains: bool) -> list[Phase]:
        done = [Phase(name="spawn", seconds=0.5), Phase(name="rendezvous", seconds=0.25), Phase(name="load", seconds=1)]
        return [*done, Phase(name="first-step", seconds=1.5)] if trains else done[:2]

    def _peer(self, worker: int) -> Agent | None:
        assert self.machine is not None
        found = (a for a in self.machine.agents.values() if a.uid == self.uid and a.pod.worker == worker)
        return next(found, None)

    def _ended_well(self, worker: int, incarnation: int) -> bool:
        assert self.machine is not None
        path = f"/api/v1/namespaces/default/pods/{self.pod.job}-w{worker}-{incarnation}"
        obj = self.machine.cluster.objects.get(path)
        return obj is not None and obj["status"].get("phase") == "Succeeded"
