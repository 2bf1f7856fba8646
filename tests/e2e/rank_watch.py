"""Every process that is a rank of a job on the embedded cluster: from agents' logs on disk, and the process table."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

STARTED = re.compile(r"rank started rank=(\d+) generation=(\d+) pid=(\d+)")
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class RankProcess:
    """A process that an agent started."""

    rank: int
    generation: int
    pid: int
    born: str
    """Its start time in clock ticks: with `pid` it names one process. Empty if it ended before it was seen."""

    def lives(self) -> bool:
        """Whether it still runs. A zombie does not."""
        return bool(self.born) and _born(self.pid) == self.born


def _born(pid: int) -> str:
    """Return the start time of a process in clock ticks; an empty string if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


@dataclass
class RankWatch:
    """Reads the logs of all pods below a cluster's directory while they run, also of pods that are deleted later."""

    directory: Path
    started: list[RankProcess] = field(default_factory=list)
    most_at_once: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Rank and generation -> the most processes that lived at the same time."""
    _logs: dict[Path, IO[str]] = field(default_factory=dict)

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                self.look()
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for log in self._logs.values():
                log.close()

    def look(self) -> None:
        """Read what agents have logged since the last look, and count the processes that live."""
        with suppress(FileNotFoundError):  # of a pod that is removed now; the next look finds the others
            for path in self.directory.glob("nodes/*/pods/*/logs/*/*.log"):
                if path not in self._logs:
                    self._logs[path] = path.open(errors="replace")
        for log in self._logs.values():
            where = log.tell()
            text = log.read()
            complete = text.rpartition("\n")[0]
            if complete:
                log.seek(where)
                text = log.read(len(complete) + 1)
            else:
                log.seek(where)
            for rank, generation, pid in STARTED.findall(complete):
                self.started.append(RankProcess(int(rank), int(generation), int(pid), _born(int(pid))))
        for key, number in Counter((p.rank, p.generation) for p in self.living()).items():
            self.most_at_once[key] = max(number, self.most_at_once[key])

    def living(self) -> list[RankProcess]:
        """Every rank that runs now."""
        return [process for process in self.started if process.lives()]

    def started_twice(self) -> dict[tuple[int, int], int]:
        """Rank and generation -> the number of processes that ever were this rank, if it is more than one."""
        return {key: n for key, n in Counter((p.rank, p.generation) for p in self.started).items() if n > 1}
