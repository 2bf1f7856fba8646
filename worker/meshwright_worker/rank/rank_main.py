"""The main function of a rank of the built-in runtime: run training, report to the agent, exit with a defined code."""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from types import FrameType
from typing import NoReturn, Protocol

from meshwright.api.checkpoint import Writer
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.rank import failures, messages
from meshwright_worker.rank.task import RankTask, StepReport, Work

EXIT_DONE = 0
EXIT_FAILED = 1
# Modules that need torch are imported by name, in the rank.
IN_MEMORY_MODULE = "meshwright_worker.in_memory.supervisor"
"""Runs the ranks that recover in memory."""
WRITER_MODULE = "meshwright_worker.checkpoint.writer_process"
"""Starts the processes that write checkpoints."""
DUMP_STACKS = signal.SIGUSR2
"""The signal that makes a rank write the stacks of its threads. A fatal signal does too."""
REQUEST_CHECKPOINT = signal.SIGUSR1
"""The signal that asks rank 0 for a checkpoint after the step that runs."""


class CheckpointWriter(Protocol):
    """A process that writes checkpoints."""

    def close(self) -> None:
        """End it."""


class PipeEvents:
    """`RankEvents` over a pipe to the agent. A write blocks while the pipe is full; the agent reads it continuously."""

    def __init__(self, descriptor: int, commands: int = -1) -> None:
        self._descriptor = descriptor
        self.commands = commands
        """The descriptor from which the agent's commands are read."""
        self._stop = self._checkpoint = False
        self.training = False
        """Whether start-up is complete."""

    def phase(self, name: str, seconds: float) -> None:
        """See `RankEvents.phase`."""
        self.send(messages.PhaseDone(name, seconds))

    def running(self, step: int, source: str = "") -> None:
        """See `RankEvents.running`."""
        self.training = True
        self.send(messages.Running(step, source))

    def step(self, report: StepReport) -> None:
        """See `RankEvents.step`."""
        self.send(messages.StepDone(report))

    def at_work(self, work: Work | None = None) -> None:
        """See `RankEvents.at_work`."""
        self.send(messages.AtWork(work))

    def checkpoint(self, step: int, path: str, seconds: float) -> None:
        """See `RankEvents.checkpoint`."""
        self.send(messages.CheckpointSaved(step, path, seconds))

    def stop_requested(self) -> bool:
        """See `RankEvents.stop_requested`."""
        return self._stop

    def take_checkpoint_request(self) -> bool:
        """See `RankEvents.take_checkpoint_request`."""
        requested, self._checkpoint = self._checkpoint, False
        return requested

    def checkpoint_begun(self, step: int) -> None:
        """See `RankEvents.checkpoint_begun`."""
        self.send(messages.CheckpointBegun(step))

    def request_checkpoint(self, signum: int, frame: FrameType | None) -> None:
        """The handler of `REQUEST_CHECKPOINT`."""
        self._checkpoint = True

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM."""
        self._stop = True

    def send(self, message: messages.RankMessage) -> None:
        """Write one complete message, even if it is larger than the pipe's buffer."""
        line = memoryview(messages.encode(message))
        while line:
            line = line[os.write(self._descriptor, line) :]


def run(
    module: str, task: RankTask[NativeRun], environment: Mapping[str, str], descriptor: int, stacks: int, commands: int
) -> NoReturn:
    """Run `module.train(task, events)` in this freshly forked process, then exit. SIGTERM must be blocked on entry.

    Writes events to `descriptor`, and the stacks of its threads to `stacks` when a signal asks for them. A rank that
    recovers in memory runs `IN_MEMORY_MODULE`, which reads the agent's `commands`.

    Exits with `os._exit`: torch's threads sometimes abort an interpreter that shuts down normally, and the agent relies
    on the exit code.
    """
    events = PipeEvents(descriptor, commands)
    # Not to the log: the dump would push the error itself out of the lines by which a failure is classified.
    faulthandler.enable(file=stacks)
    faulthandler.register(DUMP_STACKS, file=stacks)
    signal.signal(signal.SIGTERM, events.request_stop)
    signal.signal(REQUEST_CHECKPOINT, events.request_checkpoint)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.environ.update(environment)
    logging.basicConfig(
        level=logging.INFO if task.rank == 0 else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        force=True,
    )
    code = EXIT_FAILED
    writer = _start_writer(task, (descriptor, stacks, commands))
    try:
        outcome = importlib.import_module(IN_MEMORY_MODULE if task.in_memory else module).train(task, events)
        events.send(messages.Finished(outcome))
        code = EXIT_DONE
    except BaseException as error:  # torch's CheckpointException does not inherit from Exception
        traceback.print_exc()
        kind = failures.classify(error, training=events.training)
        events.send(messages.RankFailed(kind, f"rank {task.rank}: {failures.describe(error)}"))
    finally:
        if writer is not None:
            writer.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _start_writer(task: RankTask[NativeRun], descriptors: tuple[int, ...]) -> CheckpointWriter | None:
    """Fork the process that writes this rank's checkpoints, if the run wants one. Before the rank has threads."""
    checkpoint = task.run.checkpoint
    if checkpoint is None or checkpoint.writer is not Writer.PROCESS:
        return None
    module = importlib.import_module(WRITER_MODULE)
    writer: CheckpointWriter = module.start_writer(descriptors)
    module.set_writer(writer)
    return writer
