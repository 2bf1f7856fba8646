"""Serving an aiohttp application on an address."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from meshwright_operator.settings import Address


@asynccontextmanager
async def serve_application(application: web.Application, address: Address) -> AsyncIterator[int]:
    """Serves until the block ends; gives the port in use.

    A handler whose client went away is cancelled, so that a long poll never outlives its agent.
    """
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, address.host or None, address.port, reuse_address=True)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
