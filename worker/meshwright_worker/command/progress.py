"""Turns what a user's command reports into the messages that a rank of the built-in runtime sends. Pure."""

from __future__ import annotations

import math

from meshwright_worker.command.report_line import ReportedStep, ReportedWork
from meshwright_worker.command.saved_checkpoints import place_of
from meshwright_worker.rank import messages
from meshwright_worker.rank.task import LEAST_SECONDS, StepReport, Work

MIN_SECONDS = 0.02
"""Shortest time between two steps that are reported: a command may write thousands of lines a second."""


class CommandProgress:
    """The progress of one rank. The time of a step is measured between two reports.

    Args:
        directory: The checkpoints' directory, if the job has one.
    """

    def __init__(self, directory: str | None = None) -> None:
        self._directory = directory
        self._last: ReportedStep | None = None
        self._last_at = 0.0
        self._left_out: ReportedStep | None = None
        """The newest step, if too little time had passed to report it."""
        self._checkpoint: tuple[int, str] | None = None
        self._load = ""
        self._load_began = self._load_told = 0.0
        """When the load was first reported, and when a message about it was sent last."""

    def load_messages(self, found: ReportedWork, now: float) -> list[messages.RankMessage]:
        """The message about a load; `now` is monotonic seconds. None if too little time has passed since the last."""
        if begins := found.name != self._load:
            self._load, self._load_began = found.name, now
        if not begins and found.done != found.total and now - self._load_told < MIN_SECONDS:
            return []
        self._load_told = now
        given = found.seconds if found.seconds is not None and math.isfinite(found.seconds) else now - self._load_began
        return [messages.AtWork(Work(found.name, found.done, found.total, 1, 1, max(LEAST_SECONDS, given)))]

    def rest(self, now: float) -> list[messages.RankMessage]:
        """The message about the last step, if `messages` left it out; called when the command has ended."""
        last, found, self._left_out = self._last, self._left_out, None
        if found is None or last is None:
            return []
        steps = found.step - last.step
        return [messages.StepDone(_report(found, (now - self._last_at) / steps if steps > 0 else 0.0))]

    def messages(self, found: ReportedStep, now: float) -> list[messages.RankMessage]:
        """The messages about a report; `now` is monotonic seconds."""
        sent: list[messages.RankMessage] = []
        last = self._last
        repeated = last is not None and last.step == found.step and not _adds(found, last)
        if not repeated and (last is None or now - self._last_at >= MIN_SECONDS or _adds(found, last)):
            steps = found.step - last.step if last is not None else 0
            seconds = (now - self._last_at) / steps if steps > 0 else 0.0
            sent.append(messages.StepDone(_report(found, seconds)))
            if last is None or steps != 0:
                self._last_at = now
            self._last, self._left_out = found, None
        elif not repeated:
            self._left_out = found
        if found.checkpoint is not None and self._checkpoint != (found.step, found.checkpoint):
            self._checkpoint = found.step, found.checkpoint
            sent.append(messages.CheckpointSaved(found.step, place_of(self._directory, found.checkpoint), 0.0))
        return sent


def _adds(found: ReportedStep, last: ReportedStep) -> bool:
    """Whether a report about the same step says more than the last one, such as its loss."""
    if found.step != last.step or found.loss is None:
        return False
    return last.loss is None or not (found.loss == last.loss or (math.isnan(found.loss) and math.isnan(last.loss)))


def _report(found: ReportedStep, seconds: float) -> StepReport:
    return StepReport(
        step=found.step,
        loss=found.loss if found.loss is not None else math.nan,
        gradient_norm=math.nan,
        learning_rate=found.learning_rate if found.learning_rate is not None else math.nan,
        tokens=found.tokens or 0,
        samples=0,
        seconds=seconds,
        data_seconds=0.0,
        total_steps=found.total_steps,
        partial=True,
        has_loss=found.loss is not None,
    )
