"""What the operator's connection to the API server does when that restarts, is overloaded, or has another clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from meshwright_operator.kube import informer as module
from meshwright_operator.kube import resync as resync_module
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.client import ApiError, KubeClient, _retry_after
from meshwright_operator.kube.informer import LONGEST_PAUSE_SECONDS, Informer, Watched
from meshwright_operator.kube.resync import FAILED_SHARE, FIRST_RESYNC_SECONDS, Resync
from meshwright_operator.kube.watch_liveness import WatchLiveness
from meshwright_operator.kube.workqueue import WorkQueue
from meshwright_operator.operator_metrics import OperatorMetrics
from tests.operator.test_operator_parts import Server, with_cluster

LIST_SECONDS = 5.0


class End(Exception):
    """The story is over."""


class Time:
    """A clock that moves only when somebody sleeps."""

    def __init__(self, most: int) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []
        self._most = most

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        if len(self.pauses) == self._most:
            raise End


def use(clock: Time, patched: pytest.MonkeyPatch, where: Any) -> None:
    """Let a module sleep on this clock."""
    patched.setattr(where, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": clock.sleep}))
    patched.setattr(where, "time", SimpleNamespace(**{**vars(time), "monotonic": clock.monotonic}))


class Refusing(KubeClient):
    """An API server that ends every watch at once with this error."""

    def __init__(self, error: ApiError) -> None:
        self._error = error

    @asynccontextmanager
    async def stream(self, path: str, query: Mapping[str, str], idle: float) -> AsyncIterator[Any]:
        raise self._error
        yield


async def pauses(error: ApiError, patched: pytest.MonkeyPatch, most: int) -> tuple[list[float], int]:
    """The pauses of a watch that ends with this error each time, and how often its objects were listed."""
    clock, listed = Time(most), 0
    use(clock, patched, module)
    patched.setattr(module, "random", SimpleNamespace(uniform=lambda low, high: 1.0))

    async def relist() -> str:
        nonlocal listed
        listed += 1
        clock.now += LIST_SECONDS
        return "7"

    watched = Watched(path="/api/v1/pods", listed_version=lambda: "5", relist=relist, apply=lambda event: None)
    watch = Informer(Refusing(error), watched, WatchLiveness(OperatorMetrics(), 60.0), 1.0)
    with pytest.raises(End):
        await watch.run()
    return clock.pauses, listed


async def test_a_storm_of_expired_versions_lists_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each listing takes longer than a watch that counts as a good one."""
    found, listed = await pauses(ApiError(410, "Expired", "too old"), monkeypatch, 12)
    assert found[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert found[-1] == LONGEST_PAUSE_SECONDS
    assert listed == 11


async def test_a_watch_waits_as_long_as_the_server_asks_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    found, listed = await pauses(ApiError(429, "TooManyRequests", "later", 7.0), monkeypatch, 3)
    assert found == [7.0] * 3
    assert listed == 0, "its version is still good"
    found, _ = await pauses(ApiError(503, "Unavailable", "later", 9000.0), monkeypatch, 2)
    assert found == [LONGEST_PAUSE_SECONDS] * 2


async def test_a_failed_listing_is_repeated_sooner_than_a_complete_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, results = Time(4), [ApiError(410, "Expired", "the continue token"), None]
    use(clock, monkeypatch, resync_module)
    resync = Resync(
        KubeClient(Configuration(), OperatorMetrics()), Cache(), WorkQueue[JobKey](), OperatorMetrics(), (), 100.0
    )

    async def listing() -> None:
        if (error := results.pop(0) if results else None) is not None:
            raise error

    monkeypatch.setattr(resync, "jobs", listing)
    monkeypatch.setattr(resync, "relist", listing)
    with pytest.raises(End):
        await resync.run()
    assert clock.pauses == [FIRST_RESYNC_SECONDS, 100.0 * FAILED_SHARE, 100.0, 100.0]


@pytest.mark.parametrize("ahead", [-3600, 0, 3600])
def test_a_date_in_retry_after_counts_from_the_servers_clock(ahead: int) -> None:
    server = datetime.now(UTC) + timedelta(seconds=ahead)
    later = format_datetime(server + timedelta(seconds=30), usegmt=True)
    assert _retry_after(later, format_datetime(server, usegmt=True)) == 30.0
    assert _retry_after("12", "") == 12.0
    assert _retry_after("soon", "now") is None
    assert _retry_after("", "") is None


async def test_an_expired_token_is_read_again_for_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's token is replaced in its file; the library reads it again through this hook."""
    server, tokens = Server((401, {"reason": "Unauthorized"}), (200, {"ok": True})), ["old", "new"]

    async def call(client: KubeClient) -> None:
        async def read(configuration: Configuration) -> None:
            configuration.api_key["BearerToken"] = f"Bearer {tokens.pop(0)}"

        monkeypatch.setattr(client._configuration, "refresh_api_key_hook", read)
        with pytest.raises(ApiError, match="401"):
            await client.get("/api/v1/x")
        assert await client.get("/api/v1/x") == {"ok": True}

    await with_cluster(server, call)
    assert tokens == []
