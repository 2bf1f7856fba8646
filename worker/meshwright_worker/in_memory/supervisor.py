"""The main thread of a rank that recovers in memory: it enters no collective, so that it can always hear its agent.

It runs one generation after the other. Between two of them the rank holds its state and waits for the agent's command.
It leaves a generation when the agent says so, or when a connection breaks. A rank without a complete state has nothing
to hold: its process ends with the error, as every rank's does without recovery in memory.
"""

from __future__ import annotations

import os
import select
import signal
import time

from meshwright.protocol.messages import FailureKind
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.in_memory.copies import HostCopies
from meshwright_worker.in_memory.gate import Held
from meshwright_worker.in_memory.generation import Generation
from meshwright_worker.rank import commands, failures, messages
from meshwright_worker.rank.rank_main import PipeEvents
from meshwright_worker.rank.task import Outcome, RankTask
from meshwright_worker.trainer.train import open_run

_CHUNK = 1 << 16


def train(task: RankTask[NativeRun], events: PipeEvents) -> Outcome:
    """Run this rank in the task's generation, and in those in which the agent lets it go on.

    Raises:
        Exception: as `meshwright_worker.trainer.train.train`; `StuckError` if a rendezvous cannot be left.
    """
    return Supervisor(task, events).run()


class Supervisor:
    """Runs generations, and holds the state between them."""

    def __init__(self, task: RankTask[NativeRun], events: PipeEvents) -> None:
        self._task, self._events = task, events
        self._commands = events.commands
        self._line = b""
        self._held: Held | None = None
        self._copies = HostCopies()
        self._generation: Generation | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> Outcome:
        """Run until the run is complete, or the rank is asked to stop."""
        # A signal must wake the wait for a command.
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._opened = open_run(self._task, self._events)
        self._begin(self._task)
        while True:
            for command in self._next_commands():
                self._obey(command)
            if self._generation is not None and self._generation.ended:
                outcome = self._end(self._generation)
                if outcome is not None:
                    return outcome
            if self._generation is None and self._events.stop_requested():
                return Outcome.STOPPED

    def _begin(self, task: RankTask[NativeRun]) -> None:
        # The generation holds the state from now on, and drops the older copy once it has a new one.
        held, self._held = self._held, None
        self._generation = Generation(task, self._events, self._opened, held, self._copies, self._wake)
        self._generation.start()

    def _wake(self) -> None:
        os.write(self._wake_write, b"\0")

    def _next_commands(self) -> list[commands.Command]:
        """Wait for commands, a signal, or the end of the generation's thread."""
        ready, _, _ = select.select([self._wake_read, self._commands], [], [])
        if self._wake_read in ready:
            os.read(self._wake_read, _CHUNK)
        if self._commands not in ready:
            return []
        chunk = os.read(self._commands, _CHUNK)
        if not chunk:
            raise ConnectionError("the agent has closed the pipe of its commands")
        *lines, self._line = (self._line + chunk).split(b"\n")
        return [commands.decode(line) for line in lines]

    def _obey(self, command: commands.Command) -> None:
        match command:
            case commands.Leave(generation):
                if self._generation is not None and self._generation.task.generation == generation:
                    self._leave(self._generation)
            case commands.Resume(task, environment):
                os.environ.update(environment)
                if task.run.training != self._task.run.training:
                    # Another number of replicas may have another batch, by which inputs are divided.
                    self._opened = open_run(task, self._events)
                self._task = task
                self._begin(task)

    def _end(self, generation: Generation) -> Outcome | None:
        """Handle the end of a generation's thread. Return the outcome if the process ends too."""
        generation.join()
        if generation.error is None:
            if generation.outcome is Outcome.COMPLETE or self._events.stop_requested():
                return generation.outcome
            # A peer was asked to stop, and all ranks have stopped after the same step.
            self._events.send(messages.Finished(Outcome.STOPPED))
            self._leave(generation)
            return None
        kind = failures.classify(generation.error, training=self._events.training)
        if kind is not FailureKind.PEER_LOST or generation.memory_gate.held is None:
            raise generation.error
        text = f"rank {generation.task.rank}: {failures.describe(generation.error)}"
        self._events.send(messages.RankFailed(kind, text))
        self._leave(generation)
        return None

    def _leave(self, generation: Generation) -> None:
        started = time.monotonic()
        self._held = generation.leave()
        self._generation = None
        if self._held is None:
            raise ConnectionError("connection closed: the generation is over, and this rank has no state to hold")
        state, reduced = self._held.state, self._held.reduced
        seconds = time.monotonic() - started
        number = reduced.number if reduced is not None else None
        self._events.send(messages.Held(state.step, number, seconds, self._copies.complete()))
