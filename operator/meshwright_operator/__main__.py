"""The command `meshwright-operator`: reads the settings and runs until SIGTERM or SIGINT.

Whatever happens then, it exits within the drain period and `exit_limit.STOP_SECONDS`.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":
    # A container's first process ignores SIGTERM until it has a handler: a pod that is deleted during the imports would
    # end only after its grace period.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

import asyncio
import gc
import logging
import sys

import prometheus_client

from meshwright_operator import exit_limit, logging_config, settings
from meshwright_operator.controller.manager import run
from meshwright_operator.coordinator.credentials import CredentialsError
from meshwright_operator.coordinator.tokens import KeyFileError
from meshwright_operator.documents import DocumentError
from meshwright_operator.http.limits import raise_descriptor_limit
from meshwright_operator.http.server import ListenError
from meshwright_operator.kube.config import KubeConfigError
from meshwright_operator.kube.first_contact import ClusterError

log = logging.getLogger("meshwright_operator")


def main() -> None:
    """Run the operator. Exits with 0 after a signal, 1 if a part failed or did not stop, and 2 for invalid settings."""
    chosen = settings.parse(sys.argv[1:])
    logging_config.configure(chosen.log_level, chosen.log_format)
    # The thousands of objects that are parsed are trees without cycles: searching for cycles would take longer than
    # parsing.
    gc.set_threshold(100_000, 50, 100)
    raise_descriptor_limit()
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    try:
        asyncio.run(_main(chosen))
    except (KubeConfigError, KeyFileError, DocumentError) as error:
        log.error(str(error))
        sys.exit(2)
    except (CredentialsError, ListenError, ClusterError) as error:
        log.error(str(error))
        sys.exit(1)
    except BaseExceptionGroup as group:
        for leaf in _leaves(group):
            log.error("operator failed", extra={"error": f"{type(leaf).__name__}: {leaf}"})
        sys.exit(1)


async def _main(chosen: settings.Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    limit = exit_limit.ExitLimit(loop, chosen.drain_seconds + exit_limit.STOP_SECONDS)

    def stop_in_time() -> None:
        limit.start()
        stop.set()

    def handle_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop_in_time)

    handle_signals()
    try:
        await run(chosen, stop, on_failure=limit.start, handle_signals=handle_signals)
    finally:
        limit.start()  # the event loop and the interpreter wait for tasks and threads that are left


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]


if __name__ == "__main__":
    main()
