"""The ledger of a job's time: books every millisecond to exactly one cause. Pure arithmetic, without a clock.

`advance` returns the next ledger from the stored one and from what was observed, and has no other memory. So an
operator that is killed loses nothing: the next one books the time since the last ledger that was written. The sum of
all booked time is `since` minus the time at which the ledger began, whatever the sequence of observations. If the clock
is set back, nothing is booked until it reaches `since` again.

Time with steps is booked when a step is reported, and not before: what the time after the last step was, training or
the detection of a failure, is known only later.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from meshwright.api.goodput import MAX_TIME_CAUSES, BookedTime, GoodputStatus, TimeCause
from meshwright.api.status import added
from meshwright_operator.decide.gpu_ledger import with_gpu_time
from meshwright_operator.timestamps import format_unix_milliseconds, parse_time, unix_milliseconds

STEPPING = (TimeCause.TRAINING, TimeCause.REDONE_STEPS)
"""Causes of time in which steps run."""

_KNOWN = frozenset(cause.value for cause in TimeCause)


@dataclass(frozen=True, slots=True)
class Steps:
    """How far the current generation is."""

    last: int
    """Its last step."""
    first: int = 0
    """The step that it continued from."""
    seconds: float = 0.0
    """Mean time of a step; 0 if it is not known."""
    stall_seconds: float = 0.0
    """Time that all its steps together stood still for checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a job does at one moment."""

    now: datetime
    cause: str
    """What it spends time on from now on. Empty if it has finished."""
    steps: Steps | None = None
    """The steps of the generation that ran until now. None before its first, and for a user's command, which reports
    none."""
    trains_unseen: bool = False
    """Whether a user's command trains: then time counts without steps."""
    failed: bool = False
    """Whether a generation has just failed."""
    detection_seconds: float = 0.0
    """Time from the first symptom of the failure to now. Only used if steps do not tell it."""
    gpus: int | None = None
    """GPUs of the job's pods from now on. None if they are as many as before."""


def begin(since: datetime, cause: str, furthest_step: int = 0) -> GoodputStatus:
    """The ledger of a job that has none: nothing is booked before `since`."""
    start = format_unix_milliseconds(unix_milliseconds(since))
    return GoodputStatus(cause=cause, since=start, furthest_step=furthest_step)


def advance(old: GoodputStatus, seen: Seen) -> GoodputStatus:
    """The ledger with the time up to what was seen. Unchanged if nothing but the time has changed."""
    return with_gpu_time(old, _advance(old, seen), seen.now, seen.gpus)


def _advance(old: GoodputStatus, seen: Seen) -> GoodputStatus:
    ledger = _repaired(old, seen)
    if not ledger.cause:
        return ledger  # The job had finished.
    if ledger.cause not in STEPPING and (seen.cause in STEPPING or seen.steps is not None):
        ledger = _first_step(ledger, seen)
    if ledger.cause in STEPPING:
        return _steps_on(ledger, seen) if seen.cause in STEPPING else _last_step(ledger, seen)
    if ledger.cause == seen.cause:
        return ledger
    return _turned(ledger, seen, {ledger.cause: _elapsed(ledger, seen)})


def seconds_by_cause(ledger: GoodputStatus, now: datetime) -> dict[str, float]:
    """Seconds by cause, with those from `since` to `now`, which count for the present cause."""
    totals = {entry.cause: entry.milliseconds for entry in ledger.booked}
    since = parse_time(ledger.since)
    if ledger.cause and since is not None:
        totals[ledger.cause] = totals.get(ledger.cause, 0) + max(0, unix_milliseconds(now) - unix_milliseconds(since))
    return {cause: milliseconds / 1000 for cause, milliseconds in totals.items()}


def _first_step(ledger: GoodputStatus, seen: Seen) -> GoodputStatus:
    """Ends a start, some steps ago. If the generation has failed since, the last part of the time was its detection."""
    elapsed, parts = _elapsed(ledger, seen), dict[str, int]()
    if seen.steps is not None:
        ledger = ledger.model_copy(update={"step": min(seen.steps.first, seen.steps.last), "stall_milliseconds": 0})
        parts = _parts(ledger, seen.steps, min(elapsed, _stepping_time(ledger, seen.steps)))
    left = elapsed - sum(parts.values())
    detecting = min(left, _from_seconds(seen.detection_seconds)) if seen.failed else 0
    start = {ledger.cause: left - detecting, TimeCause.DETECTING: detecting}
    return _stepped(_booked(ledger, parts | start), seen)


def _steps_on(ledger: GoodputStatus, seen: Seen) -> GoodputStatus:
    """Books time in which steps run. Without a new step, it waits for the next one."""
    elapsed = _elapsed(ledger, seen)
    if seen.steps is None and seen.trains_unseen:
        return _stepped(_booked(ledger, {TimeCause.TRAINING: elapsed}), seen)
    if seen.steps is None or seen.steps.last == ledger.step:
        return ledger
    return _stepped(_booked(ledger, _parts(ledger, seen.steps, elapsed)), seen)


def _last_step(ledger: GoodputStatus, seen: Seen) -> GoodputStatus:
    """Books the end of a generation: its last steps and, if it failed, the time from the last one to the verdict."""
    elapsed = _elapsed(ledger, seen)
    trained = elapsed
    if seen.failed and seen.steps is not None and seen.steps.seconds > 0:
        trained = min(elapsed, _stepping_time(ledger, seen.steps))
    elif seen.failed:
        trained = max(0, elapsed - _from_seconds(seen.detection_seconds))
    parts: dict[str, int] = {TimeCause.TRAINING: trained}
    if seen.steps is not None or ledger.step is not None:
        steps = seen.steps or Steps(last=ledger.step or 0)
        parts = _parts(ledger, steps, trained)
        ledger = ledger.model_copy(update={"furthest_step": max(ledger.furthest_step, steps.last)})
    return _turned(ledger, seen, parts | {TimeCause.DETECTING: elapsed - trained})


def _parts(ledger: GoodputStatus, steps: Steps, trained: int) -> dict[str, int]:
    """Divides time with steps: stalls, steps that had been done before, and steps that count."""
    stall = min(trained, max(0, _from_seconds(steps.stall_seconds) - ledger.stall_milliseconds))
    before = ledger.step if ledger.step is not None else steps.last
    done = max(0, steps.last - before)
    again = max(0, min(steps.last, ledger.furthest_step) - before)
    share = again / done if done else float(before < ledger.furthest_step)
    redone = round((trained - stall) * share)
    return {
        TimeCause.CHECKPOINT_STALL: stall,
        TimeCause.REDONE_STEPS: redone,
        TimeCause.TRAINING: trained - stall - redone,
    }


def _stepping_time(ledger: GoodputStatus, steps: Steps) -> int:
    """How long the steps since the last booked one took, with the stalls between them."""
    done = max(0, steps.last - ledger.step) if ledger.step is not None else 0
    stall = max(0, _from_seconds(steps.stall_seconds) - ledger.stall_milliseconds)
    return _from_seconds(done * steps.seconds) + stall


def _stepped(ledger: GoodputStatus, seen: Seen) -> GoodputStatus:
    """The ledger after the steps up to the last one are booked."""
    changes: dict[str, object] = {"since": _later(ledger, seen), "cause": TimeCause.TRAINING.value}
    if seen.steps is not None:
        last, furthest = seen.steps.last, max(ledger.furthest_step, seen.steps.last)
        stall = max(ledger.stall_milliseconds, _from_seconds(seen.steps.stall_seconds))
        changes |= {"step": last, "furthest_step": furthest, "stall_milliseconds": stall}
        if last < furthest:
            changes["cause"] = TimeCause.REDONE_STEPS.value
    return ledger.model_copy(update=changes)


def _turned(ledger: GoodputStatus, seen: Seen, parts: dict[str, int]) -> GoodputStatus:
    """The ledger after a change to a cause without steps."""
    changes = {"since": _later(ledger, seen), "cause": str(seen.cause), "step": None, "stall_milliseconds": 0}
    return _booked(ledger, parts).model_copy(update=changes)


def _booked(ledger: GoodputStatus, parts: dict[str, int]) -> GoodputStatus:
    """The ledger with more time. Causes that only a later version knows are kept."""
    totals = {entry.cause: entry.milliseconds for entry in ledger.booked}
    gpus = {entry.cause: entry.gpu_milliseconds for entry in ledger.booked}
    for cause, milliseconds in parts.items():
        if milliseconds > 0:
            totals[str(cause)] = added(totals.get(str(cause), 0), milliseconds)
    others = [cause for cause in totals if cause not in _KNOWN]
    kept = {*_KNOWN, *others[: MAX_TIME_CAUSES - len(_KNOWN)]}
    entries = [
        BookedTime(cause=cause, milliseconds=total, gpu_milliseconds=gpus.get(cause))
        for cause, total in totals.items()
        if cause in kept
    ]
    return ledger.model_copy(update={"booked": entries})


def _repaired(ledger: GoodputStatus, seen: Seen) -> GoodputStatus:
    """The ledger, with a cause and a time: a damaged status may lack them."""
    changes: dict[str, object] = {}
    if parse_time(ledger.since) is None:
        changes["since"] = format_unix_milliseconds(unix_milliseconds(seen.now))
    if not ledger.cause:
        changes["cause"] = str(seen.cause)
    return ledger.model_copy(update=changes) if changes else ledger


def _elapsed(ledger: GoodputStatus, seen: Seen) -> int:
    """Milliseconds since the last booking; 0 if the clock was set back."""
    since = parse_time(ledger.since)
    return 0 if since is None else max(0, unix_milliseconds(seen.now) - unix_milliseconds(since))


def _later(ledger: GoodputStatus, seen: Seen) -> str:
    """The time up to which all time is booked. It never goes back, so that no time is booked twice."""
    since = parse_time(ledger.since) or seen.now
    return format_unix_milliseconds(max(unix_milliseconds(since), unix_milliseconds(seen.now)))


def _from_seconds(seconds: float) -> int:
    """Seconds of a report in milliseconds; 0 for NaN and below 0, at most a year."""
    return round(min(seconds, 3.2e7) * 1000) if seconds > 0 else 0
