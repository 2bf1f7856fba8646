"""Ranks that run the user's command: each behind a guard (`meshwright_worker.command`) that ends with this agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from meshwright_worker.agent.ranks import LiveRank, open_pipe, signal_process


async def start_command(rank: int, command: Sequence[str], environment: Mapping[str, str]) -> LiveRank:
    """Start `command` with exactly `environment` as the process of `rank`.

    Raises:
        OSError: no process can be started. A command that does not exist is no error here: its rank exits with 127.
    """
    output, output_write = await open_pipe()
    lifeline_read, lifeline = os.pipe2(os.O_CLOEXEC)
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "meshwright_worker.command", *command),
            stdin=lifeline_read,
            stdout=output_write,
            stderr=output_write,
            env=dict(environment),
            start_new_session=True,
        )
    except OSError:
        os.close(lifeline)
        output.close()
        raise
    finally:
        os.close(lifeline_read)
        os.close(output_write)
    held = [lifeline]

    def let_go() -> None:
        """Close the guard's standard input: it kills the command's whole process group and ends."""
        while held:
            os.close(held.pop())

    async def wait() -> int:
        code = await process.wait()
        let_go()
        return code

    def terminate() -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal_process(process.pid, signal.SIGTERM)

    return LiveRank(rank=rank, pid=process.pid, wait=wait, terminate=terminate, kill=let_go, output=output, events=None)
