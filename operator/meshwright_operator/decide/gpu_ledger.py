"""GPU time in the ledger of a job's time: time multiplied by the GPUs of the job's pods. Pure arithmetic.

The number of GPUs changes at other moments than the cause of the time. So the ledger has the GPU time since the last
booking, up to the last change of the number, and the number since then. Each booking divides it between the causes
that get time, in proportion to their time. The sum of all GPU time is exact, also through restarts of the operator.
"""

from __future__ import annotations

from datetime import datetime

from meshwright.api.goodput import GoodputStatus, gpu_milliseconds_by_cause
from meshwright.api.status import added
from meshwright_operator.timestamps import format_unix_milliseconds, parse_time, unix_milliseconds


def with_gpu_time(old: GoodputStatus, new: GoodputStatus, now: datetime, gpus: int | None) -> GoodputStatus:
    """Return `new`, which has booked time that `old` had not, with the GPU time of it.

    `gpus` is the number of GPUs from now on; None if it has not changed. Nothing changes if no time was booked and the
    number is the same.
    """
    before = {entry.cause: entry.milliseconds for entry in old.booked}
    parts = {entry.cause: entry.milliseconds - before.get(entry.cause, 0) for entry in new.booked}
    parts = {cause: part for cause, part in parts.items() if part > 0}
    number = old.gpus if gpus is None else gpus
    if number is None or (not parts and number == old.gpus and old.gpus_since is not None):
        return new
    unbooked = unbooked_gpu_milliseconds(old, now)
    since = max(unix_milliseconds(now), unix_milliseconds(parse_time(old.gpus_since) or now))
    changes: dict[str, object] = {
        "gpus": number,
        "gpus_since": format_unix_milliseconds(since),
        "gpu_milliseconds": None if parts else (unbooked or None),
    }
    if parts and unbooked:
        shares = _divided(unbooked, parts)
        changes["booked"] = [
            entry.model_copy(update={"gpu_milliseconds": added(entry.gpu_milliseconds or 0, shares[entry.cause])})
            if entry.cause in shares
            else entry
            for entry in new.booked
        ]
    return new.model_copy(update=changes)


def gpu_seconds_by_cause(ledger: GoodputStatus, until: datetime) -> dict[str, float]:
    """GPU seconds by cause, with those since the last booking, which count for the present cause."""
    totals = gpu_milliseconds_by_cause(ledger, _since_change(ledger, until))
    return {cause: milliseconds / 1000 for cause, milliseconds in totals.items()}


def unbooked_gpu_milliseconds(ledger: GoodputStatus, now: datetime) -> int:
    """GPU time since the last booking. If the clock was set back, up to the last change of the number."""
    return (ledger.gpu_milliseconds or 0) + (ledger.gpus or 0) * _since_change(ledger, now)


def _since_change(ledger: GoodputStatus, now: datetime) -> int:
    since = parse_time(ledger.gpus_since)
    return 0 if since is None else max(0, unix_milliseconds(now) - unix_milliseconds(since))


def _divided(total: int, parts: dict[str, int]) -> dict[str, int]:
    """Divide a total in proportion to the parts, without losing a millisecond."""
    whole, passed, given = sum(parts.values()), 0, 0
    shares: dict[str, int] = {}
    for cause, part in parts.items():
        passed += part
        upto = total * passed // whole
        shares[cause], given = upto - given, upto
    return shares
