"""When checkpoints are due, on which tier. Rank 0 decides by its clock, and tells all ranks in the step's all-reduce.

What it tells is one number: `REQUEST`, `BUSY`, and a bit for each tier with an interval in time that is due. Intervals
in steps need no decision: every rank counts. While a save is in progress no other one begins (`BUSY`): a slow store
delays checkpoints, and not training. Only a pipeline without flushes waits, see `CheckpointRequests.drains`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from meshwright.protocol.messages import FailureHistory
from meshwright.rules.checkpoint_interval import auto_interval
from meshwright_worker.checkpoint.listing import Listing
from meshwright_worker.checkpoint.ranking import is_among_best, ranked
from meshwright_worker.checkpoint.store import Tier
from meshwright_worker.rank.task import TierReport

log = logging.getLogger(__name__)

REQUEST, BUSY, _FIRST_TIER = 1, 2, 4
MEASURE_SECONDS = 60.0
"""With `Auto`: time until the first save of a generation, whose times are measured."""
PATIENCE_SECONDS = 30.0
"""For how long steps wait for the save in progress if a save after a number of steps is due."""
LISTING_SECONDS = 1.0
"""For how long steps wait, after an evaluation, until its listing of the checkpoints has ended."""
_MEASUREMENTS = 5


def tier_bit(tier: int) -> int:
    """The bit that says that a tier is due."""
    return _FIRST_TIER << tier


def due_after(tiers: Sequence[Tier], step: int) -> list[int]:
    """The tiers with an interval in steps that are due after `step`."""
    intervals = enumerate(tier.interval.steps for tier in tiers)
    return [number for number, every in intervals if every is not None and step % every == 0]


def _losses_of(tier: Tier) -> dict[int, float | None]:
    """Step -> evaluation loss of the checkpoints on a tier, if it retains the best. Empty if they cannot be read: then
    each evaluation is one of the best, and costs a save.
    """
    try:
        return tier.store.evaluation_losses() if tier.retention.best is not None else {}
    except OSError as error:
        log.warning("the evaluation losses in %s cannot be read: %s", tier.store, error)
        return {}


@dataclass(slots=True)
class _TierState:
    """What rank 0 knows of a tier."""

    report: TierReport
    since: float
    """When its interval began, by the clock."""
    durable: deque[float] = field(default_factory=lambda: deque(maxlen=_MEASUREMENTS))
    """Seconds until recent saves were complete."""
    losses: dict[int, float | None] = field(default_factory=dict)
    """Step -> evaluation loss of the checkpoints that are complete. Empty if none is retained for that."""
    saving: dict[int, float] = field(default_factory=dict)
    """The same of the one that is being saved."""
    listing: Listing | None = None
    """Says which of `losses` are still there."""

    def show_best(self) -> None:
        """Put the best of the complete checkpoints into the report."""
        best = next(iter(ranked(self.losses)), None)
        loss = self.losses[best] if best is not None else None
        self.report = replace(self.report, best_step=best, best_loss=loss)


class CheckpointSchedule:
    """The decisions of rank 0 in one mesh generation.

    Args:
        tiers: where checkpoints are saved.
        history: the job's failures so far.
        clock: monotonic seconds.
        wall: seconds since 1970.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        history: FailureHistory,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._tiers, self._history, self._clock, self._wall = tiers, history, clock, wall
        self._began = self._step_began = clock()
        self._states = [
            _TierState(TierReport(str(tier.store), tier.interval.steps, tier.interval.seconds), self._began)
            for tier in tiers
        ]
        self._stalls: deque[float] = deque(maxlen=_MEASUREMENTS)
        self._steps: deque[float] = deque(maxlen=9)
        self._save_began: float | None = None
        self._impatient = False
        self._changed = True

    def resumed(self, step: int) -> None:
        """Training goes on after `step`. On a tier without that step, the interval began with its newest checkpoint."""
        now, wall = self._clock(), self._wall()
        for tier, state in zip(self._tiers, self._states, strict=True):
            state.since = now
            state.losses = _losses_of(tier)
            state.show_best()
            try:
                newest = max(tier.store.steps(), default=None)
                saved_at = tier.store.saved_at(newest) if newest is not None else None
            except OSError as error:
                log.warning("the checkpoints in %s cannot be listed: %s", tier.store, error)
                continue
            if newest is not None:
                state.report = replace(state.report, step=newest, saved_at=saved_at)
            if step > 0 and newest != step:
                state.since = now - max(0.0, wall - saved_at) if saved_at is not None else float("-inf")
        self._update_intervals()

    def overdue(self, step: int) -> list[int]:
        """The tiers that lack the checkpoint of their last interval in steps before or at `step`, as `resumed` has
        found: a save that a failure interrupts is not lost with ranks that go on from memory.
        """
        intervals = ((number, state, self._tiers[number].interval.steps) for number, state in enumerate(self._states))
        return [
            number
            for number, state, every in intervals
            if every is not None and step >= every and (state.report.step or 0) < step - step % every
        ]

    def wait_before(self, step: int, busy: bool, wait: Callable[[float], bool]) -> None:
        """Let a save in progress end before a step after which another one is due, if that does not take long.

        `wait` waits for some seconds, and returns whether the save has ended.
        """
        if due_after(self._tiers, step):
            self._wait_for_save(busy, wait)

    def _wait_for_save(self, busy: bool, wait: Callable[[float], bool]) -> bool:
        """Let a save in progress end, for a limited time and only once. Whether none is in progress."""
        if busy and not self._impatient and wait(PATIENCE_SECONDS):
            return True
        self._impatient = self._impatient or busy
        return not busy

    def list_best(self) -> None:
        """Begin to list the checkpoints on the tiers that retain the best: somebody may have removed one of them."""
        for tier, state in zip(self._tiers, self._states, strict=True):
            if state.losses and tier.retention.best is not None and (state.listing is None or not state.listing.busy):
                state.listing = Listing(tier.store, state.losses)

    def forget_removed(self) -> None:
        """Leave out the losses of checkpoints that the last `list_best` has not found any more: the next evaluation
        does not compete with them, and no report names them.
        """
        for state in self._states:
            missing = state.listing.missing(LISTING_SECONDS) if state.listing is not None else None
            if missing is None:
                continue
            state.listing = None
            for step in missing:
                state.losses.pop(step, None)
            best = state.report.best_step
            state.show_best()
            if best != state.report.best_step:
                log.warning("the best checkpoint in %s, of step %s, has been removed", state.report.place, best)
                self._changed = True

    def best_tiers(self, step: int, loss: float, busy: bool, wait: Callable[[float], bool]) -> list[int]:
        """The tiers on which the checkpoint of `step`, with this evaluation loss, is among the best and not there yet.
        Empty if a save in progress does not end in time: the next step changes the parameters.
        """
        best = [
            number
            for number, (tier, state) in enumerate(zip(self._tiers, self._states, strict=True))
            if tier.retention.best is not None
            and step not in state.losses
            and is_among_best(step, loss, state.losses | state.saving, tier.retention.best)
        ]
        if best and not self._wait_for_save(busy, wait):
            log.warning("no checkpoint of step %d with evaluation loss %.6g: a save is still in progress", step, loss)
            return []
        return best

    def flags(self, busy: bool) -> int:
        """What rank 0 tells the others in the step that begins now. `busy`: a save is in progress."""
        now = self._clock()
        if self._step_began > self._began:
            self._steps.append(now - self._step_began)
        self._step_began = now
        if busy:
            self._mark_slow(now)
            return BUSY
        ends = now + 1.5 * self._step_seconds  # the nearest end of a step
        due = (number for number, state in enumerate(self._states) if self._is_due(number, ends - state.since))
        return sum(tier_bit(number) for number in due)

    def _is_due(self, number: int, passed: float) -> bool:
        seconds = self._states[number].report.interval_seconds
        least = MEASURE_SECONDS if seconds is None else seconds
        return self._tiers[number].interval.steps is None and passed >= least

    def _mark_slow(self, now: float) -> None:
        """Report a save that delays another one."""
        began = self._save_began
        for state in self._states:
            seconds = state.report.interval_seconds
            overdue = seconds is not None and now - state.since > 2 * seconds + PATIENCE_SECONDS
            if (self._impatient or overdue) and state.report.saving_since is None and began is not None:
                state.report = replace(state.report, saving_since=self._wall() - (now - began))
                self._changed = True

    def begun(self, tiers: Sequence[int], stall_seconds: float, losses: Mapping[int, float] | None = None) -> None:
        """A save on these tiers has begun; steps stood still for `stall_seconds`. `losses`: step and evaluation loss of
        what is saved, if it was evaluated.
        """
        self._save_began = self._clock()
        self._stalls.append(stall_seconds)
        for number in tiers:
            self._states[number].since = self._save_began
            if self._tiers[number].retention.best is not None:
                self._states[number].saving = dict(losses or {})

    def saved(self, tier: Tier, step: int, seconds: float) -> None:
        """A checkpoint is complete on a tier, `seconds` after its save there began."""
        state = self._state_of(tier)
        state.durable.append(seconds)
        state.losses |= state.saving
        state.saving = {}
        state.report = replace(
            state.report, step=step, saved_at=self._wall(), error="", failing_since=None, saving_since=None
        )
        state.show_best()
        self._ended()

    def failed(self, tier: Tier, message: str) -> None:
        """A save on a tier has failed. It is tried again when the tier is due again."""
        state = self._state_of(tier)
        state.saving = {}
        since = state.report.failing_since
        state.report = replace(
            state.report, error=message, saving_since=None, failing_since=self._wall() if since is None else since
        )
        self._ended()

    def not_needed(self, tier: Tier) -> None:
        """A save on a tier has ended without a checkpoint, because there are later ones."""
        self._state_of(tier).saving = {}
        self._ended()

    def _ended(self) -> None:
        self._impatient = False
        self._update_intervals()
        self._changed = True

    def reports(self) -> tuple[TierReport, ...] | None:
        """The tiers, if anything about them has changed since the last call."""
        changed, self._changed = self._changed, False
        return tuple(state.report for state in self._states) if changed else None

    def _state_of(self, tier: Tier) -> _TierState:
        return self._states[next(number for number, one in enumerate(self._tiers) if one is tier)]

    @property
    def _step_seconds(self) -> float:
        return median(self._steps) if self._steps else 0.0

    def _update_intervals(self) -> None:
        """Compute the intervals with `Auto` again, from what is measured so far."""
        trained = self._history.trained_seconds + self._clock() - self._began
        for tier, state in zip(self._tiers, self._states, strict=True):
            if not tier.interval.is_auto:
                continue
            if not self._stalls or not state.durable:
                reason = f"Auto: the first save is measured, after {MEASURE_SECONDS:.0f} s"
                state.report = replace(state.report, reason=reason)
                continue
            found = auto_interval(
                stall_seconds=median(self._stalls),
                durable_seconds=median(state.durable),
                step_seconds=self._step_seconds,
                nodes=self._history.nodes,
                failures=self._history.failures,
                trained_seconds=trained,
            )
            state.report = replace(state.report, interval_seconds=found.seconds, reason=found.reason)
