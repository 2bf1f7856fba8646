"""The job as plain lines, for pipes and CI logs. Pure: returns what is new since the last call."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright_cli.demo.snapshot import Snapshot
from meshwright_cli.demo.text import clock

PROGRESS_INTERVAL_SECONDS = 5.0


@dataclass(slots=True)
class LineWriter:
    """Prints each event once, and progress after a change, at most every few seconds."""

    printed_events: set[tuple[str, str]] = field(default_factory=set)
    printed_progress: str = ""
    printed_at: float = float("-inf")

    def lines(self, now: Snapshot, elapsed: float) -> list[str]:
        """The lines to print at `elapsed` seconds after the start."""
        out = []
        for event in now.events:
            if (event.uid, event.note) not in self.printed_events:
                self.printed_events.add((event.uid, event.note))
                out.append(f"[{clock(elapsed):>5}] {event.reason}: {event.note}")
        text = progress(now)
        if text != self.printed_progress and elapsed - self.printed_at >= PROGRESS_INTERVAL_SECONDS:
            self.printed_progress, self.printed_at = text, elapsed
            out.append(f"[{clock(elapsed):>5}] {text}")
        return out


def progress(now: Snapshot) -> str:
    """The progress of the job in one line."""
    status = now.status
    parts = [f"{now.state:<12}", f"ranks {status.ready_ranks or '-'}", f"generation {now.generation}"]
    if now.wanted_replicas > now.replicas > 0:
        parts.append(f"replicas {now.replicas} of {now.wanted_replicas}")
    if now.total_steps:
        parts.append(f"step {now.step}/{now.total_steps}")
    if now.loss is not None:
        parts.append(f"loss {now.loss:.4f}")
    if status.tokens_per_second:
        parts.append(f"{status.tokens_per_second:,} tokens/s")
    if status.eta_seconds is not None:
        parts.append(f"ETA {clock(status.eta_seconds)}")
    if status.checkpoint:
        parts.append(f"checkpoint {status.checkpoint.step}")
    return "  ".join(parts)
