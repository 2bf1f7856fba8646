"""The agent, the main process of a worker pod: `python -m meshwright_worker`."""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":
    # A container's first process ignores SIGTERM until it has a handler: a pod that is deleted during the imports would
    # end only after its grace period.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))

import asyncio
import contextlib
import io
import logging
import sys
import time
from typing import NoReturn

from meshwright.api import labels
from meshwright_worker.agent.server_process import ServerProcess, process_environment, runtime_installed

if __name__ == "__main__" and runtime_installed():
    # First of all, because nothing takes longer than the import of torch.
    SERVER: ServerProcess | None = ServerProcess.start(process_environment(os.environ))
else:
    SERVER = None

from meshwright_worker.agent.agent import Agent
from meshwright_worker.agent.settings import Settings, SettingsError, from_environment

EXIT_BAD_SETTINGS = 2


def main() -> None:
    """Run the agent. Exits with 0 when the run is complete, 143 when drained, 1 or 2 on an error."""
    _configure_logging()
    try:
        settings = from_environment(os.environ)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_BAD_SETTINGS)
    # No child process may find the token in its environment.
    os.environ.pop(labels.ENV_TOKEN, None)
    asyncio.run(_run(settings))


async def _run(settings: Settings) -> NoReturn:
    code = await Agent(settings, dict(os.environ), SERVER).run()
    # The pod's exit code is all that remains of it, so nothing may delay or change it: not a thread that waits for a
    # name server, which a normal exit would wait for, nor output that cannot be written.
    with contextlib.suppress(OSError):
        logging.shutdown()
        sys.stdout.flush()
    os._exit(code)


def _configure_logging() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Ranks write any text, and the pod's environment may set an encoding that does not have it.
        sys.stdout.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler(sys.stdout)
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


if __name__ == "__main__":
    main()
