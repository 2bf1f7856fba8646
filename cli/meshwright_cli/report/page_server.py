"""Serves one page on the loopback address, only to those who know its path.

Any program and any web page on the machine can reach the port. The path therefore has a random token. Requests with
another `Host` are rejected, so that no name that resolves to the loopback address (DNS rebinding) reaches the page.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

LOOPBACK = "127.0.0.1"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@asynccontextmanager
async def served(page: Callable[[], str], port: int = 0) -> AsyncIterator[str]:
    """Serve a page until the context ends.

    Args:
        page: returns the page as it is now.
        port: port of the loopback address; 0 for a free one.

    Yields:
        The URL.

    Raises:
        OSError: the port is in use.
    """
    token = secrets.token_urlsafe(32)
    hosts: set[str] = set()

    async def answer(request: web.BaseRequest) -> web.Response:
        if request.headers.get("Host", "").lower() not in hosts:
            return web.Response(status=403, text="unknown host\n", headers=HEADERS)
        if not hmac.compare_digest(request.path.encode(), f"/{token}/".encode()):
            return web.Response(status=404, text="not found\n", headers=HEADERS)
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, text="only GET\n", headers=HEADERS)
        return web.Response(text=page(), content_type="text/html", charset="utf-8", headers=HEADERS)

    runner = web.ServerRunner(web.Server(answer, access_log=None))
    await runner.setup()
    try:
        site = web.TCPSite(runner, LOOPBACK, port)
        await site.start()
        bound = runner.addresses[0][1]
        hosts |= {f"{LOOPBACK}:{bound}", f"localhost:{bound}"}
        yield f"http://{LOOPBACK}:{bound}/{token}/"
    finally:
        await runner.cleanup()
