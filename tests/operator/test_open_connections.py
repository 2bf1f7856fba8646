"""While it leads, the operator keeps its connections open: the pods of a gang do not wait for handshakes."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import Configuration

from meshwright_operator.kube.client import KubeClient
from meshwright_operator.operator_metrics import OperatorMetrics
from tests.patience import patient

IN_FLIGHT = 4


async def test_calls_use_the_connections_that_were_opened_before() -> None:
    opened: dict[object, str] = {}
    all_open = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        opened.setdefault(request.transport, request.path)
        if len(opened) == IN_FLIGHT:
            all_open.set()
        await all_open.wait()
        return web.json_response({})

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(application) as server:
        configuration = Configuration()
        configuration.host = str(server.make_url("")).rstrip("/")
        client = KubeClient(configuration, OperatorMetrics(), max_in_flight=IN_FLIGHT)
        keeping = asyncio.create_task(client.keep_connections())
        async with asyncio.timeout(patient(5)):
            await all_open.wait()
            await asyncio.gather(*(client.create("/api/v1/pods", {}) for _ in range(20)))
        keeping.cancel()
        await client.close()
    assert list(opened.values()) == ["/version"] * IN_FLIGHT
