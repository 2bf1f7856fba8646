"""`meshwright open`: the page follows the job, and only those who know its path get it."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from meshwright.api.parsing import parse_status
from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.errors import NotFoundError
from meshwright_cli.client.kubeconfig import Connection
from meshwright_cli.report.history import History
from meshwright_cli.report.live import LiveReport, seen
from meshwright_cli.report.page_server import served
from tests.cli.browser import chromium, tab
from tests.cli.report_samples import history_lines, manifest, nodes, running_job, write


class Api:
    """An API server that has one job, its nodes, and no events."""

    def __init__(self, *, nodes_allowed: bool = True) -> None:
        cluster = nodes()
        self.job: dict[str, Any] | None = running_job(manifest(), cluster)
        self.nodes = cluster if nodes_allowed else None

    async def answer(self, request: web.BaseRequest) -> web.Response:
        if request.path.endswith("/nodes"):
            if self.nodes is None:
                return self._error(403, "Forbidden", 'nodes is forbidden: User "ann" cannot list resource "nodes"')
            return web.json_response({"items": self.nodes, "metadata": {}})
        if request.path.endswith("/events"):
            return web.json_response({"items": [], "metadata": {}})
        if request.path.endswith("/paralleltrainingjobs/llama-70b") and self.job is not None:
            return web.json_response(self.job)
        if request.path.endswith("/paralleltrainingjobs"):
            return web.json_response({"items": [], "metadata": {}})
        return self._error(404, "NotFound", 'paralleltrainingjobs.meshwright.dev "absent" not found')

    def _error(self, status: int, reason: str, message: str) -> web.Response:
        body = {"kind": "Status", "reason": reason, "message": message, "code": status, "details": {"name": "absent"}}
        return web.json_response(body, status=status)


@asynccontextmanager
async def client_of(api: Api) -> AsyncIterator[AsyncClient]:
    runner = web.ServerRunner(web.Server(api.answer, access_log=None))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        connection = Connection(f"http://127.0.0.1:{runner.addresses[0][1]}", namespace="research")
        async with AsyncClient(server=connection) as client:
            yield client
    finally:
        await runner.cleanup()


async def fetch(
    url: str, host: str | None = None, path: str | None = None, method: str = "GET"
) -> tuple[int, str, Any]:
    """(status, body, headers) of a request with this `Host` header."""

    def request() -> tuple[int, str, Any]:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        connection.putrequest(method, path or parts.path, skip_host=True)
        connection.putheader("Host", host or parts.netloc)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, response.read().decode(), response.headers

    return await asyncio.to_thread(request)


async def test_the_page_is_served_under_its_path_only():
    async with served(lambda: "<p>page</p>") as url:
        parts = urlsplit(url)
        assert parts.hostname == "127.0.0.1"
        assert len(parts.path) > 40
        status, body, headers = await fetch(url)
        assert (status, body) == (200, "<p>page</p>")
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Frame-Options"] == "DENY"
        assert (await fetch(url, host=f"localhost:{parts.port}"))[0] == 200
        for path in ("/", "/report", parts.path[:-2] + "x/", parts.path + "more", "/favicon.ico"):
            assert (await fetch(url, path=path))[0] == 404, path
        assert (await fetch(url, method="POST"))[0] == 405


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1.evil.example", "[::1]"])
async def test_another_host_is_rejected_even_with_the_path(host: str):
    async with served(lambda: "secret") as url:
        status, body, _ = await fetch(url, host=host)
        assert status == 403
        assert "secret" not in body


async def test_each_start_has_another_path():
    async with served(str) as one, served(str) as other:
        assert urlsplit(one).path != urlsplit(other).path


async def test_the_page_follows_the_job():
    api = Api()
    async with client_of(api) as client:
        report = LiveReport(client, "llama-70b")
        await report.update()
        assert 'data-refresh="5"' in report.page
        assert "612" in report.page
        assert api.job is not None
        api.job["status"] |= {"step": 700, "loss": "2.0100"}
        await report.update()
        assert "2.0100" in report.page
        assert "Throughput" in report.page  # two steps make curves
        api.job = None
        await report.update()
        assert "Not updated since then" in report.page
        assert "2.0100" in report.page


async def test_a_user_who_may_not_read_nodes_gets_the_rest():
    async with client_of(Api(nodes_allowed=False)) as client:
        report = LiveReport(client, "llama-70b")
        await report.update()
        assert "the nodes cannot be read" in report.page
        assert "Where the ranks are" in report.page


async def test_a_job_that_does_not_exist_ends_the_command():
    async with client_of(Api()) as client:
        with pytest.raises(NotFoundError):
            await LiveReport(client, "absent").update()


async def test_the_tracker_s_file_has_the_curves(tmp_path: Path):
    async with client_of(Api()) as client:
        report = LiveReport(client, "llama-70b", write(tmp_path / "h.jsonl", history_lines()))
        await report.update()
        assert report.page.count("<figure") == 2


def test_a_new_generation_is_marked_and_repeated_steps_replace_earlier_ones():
    def status(step: int, generation: int) -> Any:
        mesh = {"generation": generation, "cause": "PodLost"}
        return parse_status({"status": {"step": step, "loss": f"{step / 10}", "tokensPerSecond": 5, "mesh": mesh}})

    history, generation = History(), 0
    for step, current in ((10, 1), (20, 1), (20, 1), (14, 2), (30, 2)):
        history, generation = seen(history, generation, status(step, current))
    assert [point.step for point in history.points] == [10, 14, 30]
    assert [(mark.step, mark.name) for mark in history.marks] == [(20, "PodLost")]
    assert generation == 2


@pytest.mark.slow
async def test_the_served_page_updates_itself_in_a_browser():
    chromium()
    api = Api()
    async with client_of(api) as client:
        report = LiveReport(client, "llama-70b")
        await report.update()
        async with served(lambda: report.page) as url, tab() as opened:
            await opened.open(url)
            await opened.evaluate("document.querySelector('input[value=tensor]').click()")
            assert api.job is not None
            api.job["status"]["step"] = 777
            await report.update()
            shown = "document.querySelector('.tiles .value').textContent"
            while await opened.evaluate(shown) != "777":  # noqa: ASYNC110 - the page polls
                await asyncio.sleep(0.2)
            assert await opened.evaluate("document.querySelector('.dimensions input:checked').value") == "tensor"
            assert opened.problems == []
            assert {request for request in opened.requests if not request.startswith("data:")} == {url}
