"""A proxy between the operator and the API server: counts what is asked, and lets watches go silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import web

HOP_BY_HOP = ("host", "content-length", "transfer-encoding", "connection", "content-encoding", "accept-encoding")


@dataclass(frozen=True)
class Request:
    """One request that passed."""

    method: str
    path: str
    watch: bool = False

    @property
    def writes(self) -> bool:
        return self.method != "GET"

    @property
    def right(self) -> tuple[str, str, str] | None:
        """Group, resource and verb, as roles name them; None for what is not about a resource."""
        parts = self.path.strip("/").split("/")
        group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1] if len(parts) > 1 else "", parts[3:])
        if rest[:1] == ["namespaces"] and len(rest) > 2:
            rest = rest[2:]
        if not rest:
            return None
        read = "watch" if self.watch else "get" if len(rest) > 1 else "list"
        verb = {"GET": read, "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[self.method]
        return group, "/".join([rest[0], *rest[2:3]]), verb


class Proxy:
    """Forwards everything, over plain HTTP on this side."""

    def __init__(self, target: str, session: aiohttp.ClientSession) -> None:
        self.url = ""
        self.requests: list[Request] = []
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._target = target
        self._session = session
        self._era = 0
        self.refuse_once = ""
        """The end of a path: the next PATCH of it is answered with a conflict."""

    def freeze(self) -> None:
        """From now on watches are accepted and stay silent."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Watches flow again."""
        self._flowing.set()

    def break_watches(self) -> None:
        """The watches of this moment go half-open: they stay connected and nothing comes through, ever."""
        self._era += 1

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Proxy]:
        application = web.Application(client_max_size=1 << 24)
        application.router.add_route("*", "/{path:.*}", self._forward)
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        watch, era = request.query.get("watch") == "true", self._era
        self.requests.append(Request(request.method, request.path, watch))
        if self.refuse_once and request.method == "PATCH" and request.path.endswith(self.refuse_once):
            self.refuse_once = ""
            return web.json_response({"reason": "Conflict", "message": "the object has been modified"}, status=409)
        if watch:
            await self._flowing.wait()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_BY_HOP}
        async with self._session.request(
            request.method,
            self._target + request.path_qs,
            data=await request.read() or None,
            skip_auto_headers=("Content-Type",),
            headers=headers,
            ssl=False,
            timeout=aiohttp.ClientTimeout(total=None),
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers=_kept(answer))
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                if watch:
                    await self._flowing.wait()
                if watch and era != self._era:
                    await asyncio.Event().wait()
                await response.write(chunk)
            await response.write_eof()
            return response


def _kept(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {k: v for k, v in answer.headers.items() if k.lower() not in HOP_BY_HOP}
