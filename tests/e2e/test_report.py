"""`meshwright report`, `meshwright open` and the tracker's file of a job that trains and restarts, end to end."""

from __future__ import annotations

import asyncio
import json
import re

import aiohttp
import pytest

from meshwright_local.nodeagent.volumes import claim_directory
from tests.e2e.local_stack import NAMESPACE, eventually, tiny
from tests.e2e.test_command_line import run, started
from tests.patience import patient

pytestmark = pytest.mark.long
NAME = "tracked"


def job():
    return tiny(
        NAME,
        parallelism={"tensor": 1, "pipeline": 2, "microBatches": 2},
        workers={"gpusPerWorker": 1},
        training={"steps": 100000, "tracking": {"jsonLines": True}},
        replicas=1,
    )


async def page_of(url):
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200
        return await response.text()


async def served_url(process):
    """The URL that `meshwright open` prints."""
    while line := (await process.stdout.readline()).decode():
        if found := re.search(r"http://127\.0\.0\.1:\d+/\S+", line):
            return found[0]
    raise AssertionError((await process.stderr.read()).decode())


async def test_report_live_page_and_tracker_of_a_job_that_restarts(stage, tmp_path):
    await stage.apply(job())
    await stage.trained(NAME, 5)
    out = tmp_path / "report.html"

    async def measured():
        await run(stage, "report", NAME, "-o", str(out))
        page = out.read_text()
        # A real API server forwards to no loopback address: then the page says that.
        return page if "Measured timeline of step" in page or "No measured timeline" in page else ""

    page = await eventually("the page has the timeline that the ranks measured", measured)
    assert "Pipeline schedule" in page
    if "Measured timeline of step" in page:
        assert re.search(r"Ranks waited <b>\d+\.\d%</b> of the time", page)

    opened = await started(stage, "meshwright", "open", NAME, "--no-browser", "--port", "0")
    try:
        url = await asyncio.wait_for(served_url(opened), patient(60))
        assert "TP 1 x PP 2 x DP 1" in await page_of(url)
        before = (await stage.status(NAME)).mesh.generation
        await stage.delete_pod(NAME, 1)
        await stage.until(
            NAME, lambda s: s.mesh and s.mesh.generation > before and s.ready_ranks == "2/2", "trains after the restart"
        )
        again = (await stage.status(NAME)).step or 0
        await stage.trained(NAME, again + 10)

        async def restarted():
            return f"generation {before + 1}" in await page_of(url)

        await eventually("the live page shows the restart", restarted)
    finally:
        opened.terminate()
        await opened.wait()

    await run(stage, "suspend", NAME, "--wait", "--timeout", "10m")
    history = await claim_directory(stage.client, NAMESPACE, NAME)
    (file,) = history.glob(f"{NAME}-*/tracking/steps.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [record["step"] for record in records if "event" not in record]
    assert steps == list(range(1, len(steps) + 1)), "each step once, across the restart"
    assert [record["event"] for record in records if "event" in record] == ["Start", "Restart"]
    saved = await stage.saved(NAME)
    assert saved["step"] == steps[-1]
    assert float.fromhex(saved["loss"]) == pytest.approx(records[-1]["loss"])

    await run(stage, "report", NAME, "--history", str(file), "-o", str(out))
    page = out.read_text()
    # The pods are gone: their agents have stored the last timeline on the claim.
    assert "Measured timeline of step" in page
    assert len(list(history.glob(f"{NAME}-*/timeline/stage-*.json"))) == 2
    assert "Loss and throughput" in page
    assert page.count('class="mark') == 2, "the restart, on both curves"
    assert "Suspended" in page
