"""Ranks that run the user's command, each under a guard (`meshwright_worker.rank.command_guard`) that dies with this
agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from meshwright_worker.agent.rank_process import RankHandle, open_pipe, signal_process


async def start_command(rank: int, command: Sequence[str], environment: Mapping[str, str]) -> RankHandle:
    """Start `command` with exactly `environment` as the process of `rank`.

    Raises:
        OSError: no process can be started. If the command does not exist, this does not raise: its rank exits with 127.
    """
    output, output_write = await open_pipe()
    lifeline_read, lifeline = os.pipe2(os.O_CLOEXEC)
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "meshwright_worker.rank.command_guard", *command),
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
    open_descriptors = [lifeline]

    def kill_guard() -> None:
        """Close the guard's standard input: it then kills every process of the command and exits."""
        while open_descriptors:
            os.close(open_descriptors.pop())

    async def wait() -> int:
        code = await process.wait()
        kill_guard()
        return code

    def terminate() -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal_process(process.pid, signal.SIGTERM)

    return RankHandle(
        rank=rank, pid=process.pid, wait=wait, terminate=terminate, kill=kill_guard, output=output, events=None
    )
