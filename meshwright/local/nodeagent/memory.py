"""Memory limits without cgroups: a container's processes are measured now and then, and killed when over the limit.

Counted is what a cgroup would count: anonymous and shared memory, each page once however many processes share it (the
proportional set size of `smaps_rollup`). That file is slow to read, so it is read only when the plain sums of
`/proc/PID/status`, which count shared pages several times, exceed the limit. A burst between two looks passes unseen.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from meshwright.local.nodeagent.shim import descendants

CHECK_SECONDS = 2.0


async def until_exceeded(root: int, limit: int) -> int:
    """Return what the descendants of a process use, in bytes, once it is more than `limit`."""
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        used = await asyncio.to_thread(usage, root, limit)
        if used > limit:
            return used


def usage(root: int, limit: int) -> int:
    """Bytes that the descendants of a process use; exact when it matters, an upper bound when that is below `limit`."""
    processes = descendants(root)
    bound = sum(_kib(pid, "status", ("RssAnon:", "RssShmem:")) for pid in processes) * 1024
    if bound <= limit:
        return bound
    return sum(_kib(pid, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) for pid in processes) * 1024


def _kib(pid: int, file: str, fields: tuple[str, ...]) -> int:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        # It ended meanwhile.
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(fields))
