"""The process of the fork server, which the agent starts before anything else.

This module imports only the standard library: torch is being imported while the agent imports its own modules, instead
of after them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Mapping

from meshwright.api import labels
from meshwright_worker.agent.home import user_variables

RUNTIME_MODULE = "meshwright_worker.trainer.train"
_POLL_SECONDS = 0.02


def process_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that every process of a rank inherits: the pod's environment without the agent's token.

    As with torchrun, each rank uses one thread unless the pod's environment sets another number: ranks share the pod's
    cores. A user id without a name or a home directory gets both.
    """
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **inherited, **user_variables(inherited)}
    environment.pop(labels.ENV_TOKEN, None)
    return environment


def runtime_installed() -> bool:
    """Whether this agent can run Meshwright's runtime. One that was injected into the user's image cannot."""
    return importlib.util.find_spec("torch") is not None


class ServerProcess:
    """A fork server that was started, and the agent's end of its socket."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._process = process
        self.channel = channel

    @classmethod
    def start(cls, environment: Mapping[str, str], module: str = RUNTIME_MODULE) -> ServerProcess:
        """Start the process. Call in the main thread: the kernel kills the server when the thread ends."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        arguments = (str(theirs.fileno()), str(os.getpid()), module)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "meshwright_worker.rank.fork_server", *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=dict(environment),
            )
        return cls(process, ours)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill it, and with it every rank that it forked."""
        self._process.kill()

    async def wait(self) -> int:
        """Wait until it has exited, and return its exit code (negative: the signal that killed it)."""
        while (code := self._process.poll()) is None:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(_POLL_SECONDS)
        return code
