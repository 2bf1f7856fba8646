"""What a job's time was spent on, from its status. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from meshwright.api.goodput import GoodputStatus, TimeCause
from meshwright_cli.client.objects import parse_time
from meshwright_cli.text import duration


@dataclass(frozen=True, slots=True)
class Ledger:
    """Seconds by cause, the largest first."""

    seconds: dict[str, float]

    @classmethod
    def of(cls, goodput: GoodputStatus | None, now: datetime) -> Ledger | None:
        """Read a status; the time since the last booking counts for the current cause. None without a status."""
        if goodput is None:
            return None
        seconds = {entry.cause: entry.milliseconds / 1000 for entry in goodput.booked}
        since = parse_time(goodput.since) if goodput.since else None
        if goodput.cause and since is not None:
            seconds[goodput.cause] = seconds.get(goodput.cause, 0.0) + max(0.0, (now - since).total_seconds())
        return cls(dict(sorted(seconds.items(), key=lambda item: -item[1])))

    @property
    def ratio(self) -> float | None:
        """Time of steps that count, divided by all time in which the job was not suspended. None without any."""
        active = sum(value for cause, value in self.seconds.items() if cause != TimeCause.SUSPENDED)
        return self.seconds.get(TimeCause.TRAINING, 0.0) / active if active > 0 else None

    def __str__(self) -> str:
        parts = ", ".join(f"{cause} {duration(value)}" for cause, value in self.seconds.items() if value >= 0.5)
        return f"{100 * self.ratio:.0f}%: {parts}" if self.ratio is not None and parts else parts
