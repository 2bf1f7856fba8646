"""The agent, the main process of a worker pod: `python -m meshwright_worker`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time

from meshwright.api import labels
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
    sys.exit(asyncio.run(_run(settings)))


async def _run(settings: Settings) -> int:
    return await Agent(settings, dict(os.environ)).run()


def _configure_logging() -> None:
    handler = logging.StreamHandler(sys.stdout)
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


if __name__ == "__main__":
    main()
