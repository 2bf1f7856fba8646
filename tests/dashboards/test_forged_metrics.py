"""A real Prometheus that scrapes a worker pod as the chart says, and does not believe it what it says about others."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from aiohttp import web

from meshwright_cli.child_processes import Programs
from tests.e2e.prometheus import JOB_LABEL, PROMETHEUS, start_prometheus, workers
from tests.patience import patient

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on the PATH: Debian's package `prometheus`")

FORGED = """
ptj_step{namespace="victim",job_name="other",rank="0"} 7
ptj_job_gpu_seconds_total{namespace="victim",job_name="other",cause="Training"} 1e9
ptj_rank_up{pod="other-w0-0",rank="1"} 0
"""


async def test_a_pod_writes_no_metrics_about_jobs_of_others(tmp_path: Path) -> None:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=FORGED, headers={"Content-Type": "text/plain; version=0.0.4"})

    application = web.Application()
    application.router.add_get("/metrics", metrics)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        where = {"namespace": "tenant", "pod": "mine-w0-0", JOB_LABEL: "mine"}
        targets = [{"targets": [f"127.0.0.1:{runner.addresses[0][1]}"], "labels": where}]
        document = {"global": {"scrape_interval": "1s"}, "scrape_configs": [workers({"static_configs": targets})]}
        async with Programs() as programs:
            prometheus = await start_prometheus(programs, tmp_path, document)
            deadline = time.monotonic() + patient(30)
            while not (found := await prometheus.query('{__name__=~"ptj_.*"}', time.time())):
                assert time.monotonic() < deadline, "nothing was scraped"
                await asyncio.sleep(0.2)
    finally:
        await runner.cleanup()
    labels = [dict(series.labels) for series in found]
    assert len(labels) == 3
    assert {(one["namespace"], one["job_name"]) for one in labels} == {("tenant", "mine")}
    assert {one["pod"] for one in labels} == {"mine-w0-0"}
    assert not any("victim" in one.values() for one in labels)
