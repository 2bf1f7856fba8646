"""torchft's lighthouse, with which replica groups find each other. The agent of rank 0 runs it as long as it lives."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.api.labels import ENV_LIGHTHOUSE
from meshwright_worker.agent.ports import ReservedPort

log = logging.getLogger(__name__)

PROGRAM = "torchft_lighthouse"
MIN_REPLICAS = "TORCHFT_MIN_REPLICAS"
"""Variable of the pod: the fewest groups that train. With fewer, groups wait."""


class LighthouseError(Exception):
    """The lighthouse cannot be started; the message says why."""


class Lighthouse:
    """A lighthouse, and its port: reserved until it starts, and the same if it is started again."""

    def __init__(self) -> None:
        self._reserved = ReservedPort()
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: int | None = None

    @property
    def port(self) -> int:
        """The port that it uses, or would use."""
        return self._reserved.number

    async def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it, unless it runs. It is a program of the environment in which `command` runs.

        Raises:
            LighthouseError: there is no such program, or it cannot be started.
        """
        if self._process is not None and self._process.returncode is None:
            return
        self.stop()
        read, lifeline = os.pipe2(os.O_CLOEXEC)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *(("-I",) if sys.flags.isolated else ()),
                # The guard dies with this agent.
                *("-m", "meshwright_worker.rank.command_guard", *_command(command, environment, self.port)),
                stdin=read,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            os.close(lifeline)
            raise LighthouseError(f"{PROGRAM} cannot be started: {error}") from error
        except LighthouseError:
            os.close(lifeline)
            raise
        finally:
            os.close(read)
        self._lifeline = lifeline
        log.info("lighthouse of the replica groups started port=%d pid=%d", self.port, self._process.pid)

    def stop(self) -> None:
        """Stop it if it runs, and release its port."""
        self._reserved.release()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


def _command(command: Sequence[str], environment: Mapping[str, str], port: int) -> list[str]:
    """The lighthouse's command line: the program next to the command's, else that on the path."""
    beside = Path(command[0]).parent / PROGRAM if "/" in command[0] else None
    is_beside = beside is not None and os.access(beside, os.X_OK)
    program = str(beside) if is_beside else shutil.which(PROGRAM, path=environment.get("PATH"))
    if program is None:
        raise LighthouseError(
            f"`runtime.framework: TorchFT` needs {PROGRAM} next to {command[0]} or on the PATH of the image: install "
            f"torchft there, or set {ENV_LIGHTHOUSE} in `workers.env`"
        )
    host = "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - groups in other pods connect
    return [program, "--min_replicas", environment.get(MIN_REPLICAS, "1"), "--bind", f"{host}:{port}"]
