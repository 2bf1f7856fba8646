"""Serves /metrics for Prometheus and /healthz for probes, on the pod's address."""

from __future__ import annotations

import logging

from aiohttp import web

from meshwright.addresses import join_host_port
from meshwright.metrics.exporter import CONTENT_TYPE
from meshwright_worker.agent.metrics import WorkerMetrics

log = logging.getLogger(__name__)


async def start_metrics_server(metrics: WorkerMetrics, address: str, port: int) -> web.AppRunner | None:
    """Serve until the returned runner is cleaned up. Return None if the port is in use: metrics never stop training."""

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", scrape), web.get("/healthz", health)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, port).start()
    except OSError as error:
        log.warning("cannot serve metrics on %s: %s", join_host_port(address, port), error.strerror)
        await runner.cleanup()
        return None
    return runner
