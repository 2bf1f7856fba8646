"""Headless Chromium over its DevTools protocol: what a page logs, requests and looks like.

Chromium and axe-core are for tests only. Without them the tests are skipped: `apt-get install chromium`, and
`npm install axe-core` with `MESHWRIGHT_AXE` set to the path of its `axe.min.js`.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.patience import patient

AXE = "MESHWRIGHT_AXE"
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def chromium() -> str:
    """The path of a Chromium, or skip the test."""
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
    )
    if not found:
        pytest.skip("no Chromium on PATH: apt-get install chromium")
    return found


def axe_source() -> str:
    """The source of axe-core, or skip the test."""
    path = os.environ.get(AXE, "")
    if not path or not Path(path).is_file():
        pytest.skip(f"{AXE} is not the path of axe.min.js: npm install axe-core")
    return Path(path).read_text()


@dataclass
class Tab:
    """One page of the browser."""

    _socket: aiohttp.ClientWebSocketResponse
    problems: list[str] = field(default_factory=list)
    """Messages of the console of level error or warning, and exceptions."""
    requests: list[str] = field(default_factory=list)
    """URLs that the page requested."""
    _answers: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    _number: int = 0
    loaded: asyncio.Event = field(default_factory=asyncio.Event)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        number, answer = self._number, asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(patient(60)):
            return await answer

    async def read(self) -> None:
        async for message in self._socket:
            body = message.json()
            if "id" in body:
                answer = self._answers.pop(body["id"])
                if "error" in body:
                    answer.set_exception(RuntimeError(str(body["error"])))
                else:
                    answer.set_result(body.get("result", {}))
            else:
                self._event(body["method"], body["params"])

    def _event(self, method: str, params: Mapping[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded.set()

    async def open(self, url: str, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Open a page and wait until it is loaded."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(patient(60)):
            await self.loaded.wait()

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression, or of the promise that it returns."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    async def screenshot(self, *, full: bool = True) -> bytes:
        """The page, or the part in the window, as a PNG file."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        return base64.b64decode(answer["data"])

    async def pdf(self) -> bytes:
        """The printed page."""
        answer = await self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        return base64.b64decode(answer["data"])

    async def axe(self) -> list[dict[str, Any]]:
        """The faults that axe-core finds serious or critical: rule, help and elements."""
        await self.evaluate(axe_source() + "; true")
        found = await self.evaluate(
            "axe.run(document, {resultTypes: ['violations']}).then((r) => r.violations.map((v) =>"
            " ({id: v.id, impact: v.impact, help: v.help,"
            " nodes: v.nodes.slice(0, 3).map((n) => n.html.slice(0, 200))})))"
        )
        return [fault for fault in found if fault["impact"] in ("serious", "critical")]


@asynccontextmanager
async def tab() -> AsyncIterator[Tab]:
    """A page of a new browser with an empty profile."""
    path = chromium()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            path,
            *ARGUMENTS,
            f"--user-data-dir={profile}",
            "about:blank",
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _port(process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                    targets = await response.json()
                page = next(target for target in targets if target["type"] == "page")
                async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    opened = Tab(socket)
                    reader = asyncio.create_task(opened.read())
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await opened.call(f"{domain}.enable")
                    yield opened
                    reader.cancel()
        finally:
            process.kill()
            await process.wait()


async def _port(process: asyncio.subprocess.Process) -> int:
    assert process.stderr is not None
    async with asyncio.timeout(patient(60)):
        async for line in process.stderr:
            found = re.search(rb"DevTools listening on ws://127\.0\.0\.1:(\d+)/", line)
            if found:
                return int(found.group(1))
    raise RuntimeError("Chromium ended before it listened")
