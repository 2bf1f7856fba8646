"""Agents of large jobs report less often, and what decisions conclude from a report's age follows that interval."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import aiohttp
import pytest

from meshwright.protocol.messages import AgentState, RankProcess
from meshwright_operator.decide.agents import ReceivedReport
from meshwright_operator.decide.failure_detection import detect
from meshwright_operator.decide.hang_detection import HangRule
from meshwright_operator.decide.report_interval import (
    MAX_REPORT_SECONDS,
    REPORTS_PER_SECOND,
    is_fresh,
    known_idle_seconds,
    report_seconds,
    silent_after,
)
from tests.operator.builders import pod, report
from tests.operator.test_coordinator import mesh_document
from tests.operator.test_hang_detection import observed, received, trains
from tests.operator.test_hostile_clients import served, until


def test_the_interval_grows_with_the_job_and_with_all_jobs_and_is_bounded() -> None:
    assert [report_seconds(workers, workers) for workers in (1, 64, 128, 256, 1024, 100_000)] == [2, 2, 2, 4, 16, 20]
    assert [report_seconds(1, every) for every in (1000, 5000, 100_000)] == [2, 10, MAX_REPORT_SECONDS]
    for workers in (1, 100, 1000, 10_000):
        reports = workers / report_seconds(workers, workers)
        assert reports <= 1.01 * max(64.0, workers / MAX_REPORT_SECONDS), "rounded to tenths"
    assert 10_000 / report_seconds(8, 10_000) <= REPORTS_PER_SECOND


@pytest.mark.parametrize("interval", [2.0, 7.0, MAX_REPORT_SECONDS])
def test_an_agent_that_keeps_its_interval_is_never_out_of_date(interval: float) -> None:
    assert is_fresh(2 * interval, interval), "one report was lost"
    assert silent_after(interval) == max(60.0, 4 * interval)
    assert known_idle_seconds(0.0, interval, interval) <= 2.0, "a rank that trains is not idle between two reports"


async def test_the_coordinator_sets_the_interval_and_stores_it_with_the_report(session: aiohttp.ClientSession) -> None:
    async with served(session) as (stage, _):
        for worker in (0, 700):
            stage.cache.put_pod(pod(worker, owner="u1"))
        await stage.registry.publish(mesh_document(), dict.fromkeys(range(1000), 0), generation=1)
        expected = {0: 2.0, 700: 15.6}
        for worker, seconds in expected.items():
            _, reply = await stage.post("report", report(worker, AgentState.RUNNING).wire())
            assert reply == {"generation": 1, "reportSeconds": seconds}
        reports = stage.registry.agents().reports
        assert {worker: found.interval for worker, found in reports.items()} == expected


async def test_the_agents_of_a_large_gang_that_arrive_together_cost_few_reconciles(
    session: aiohttp.ClientSession,
) -> None:
    async with served(session) as (stage, _):
        for worker in range(40):
            stage.cache.put_pod(pod(worker, owner="u1"))
        await stage.registry.publish(None, dict.fromkeys(range(100_000), 0))
        polls = [asyncio.create_task(stage.poll(worker=worker, wait=30)) for worker in range(40)]
        await until(lambda: len(stage.registry.agents().waiting_agents) == 40)
        seen = len(stage.told)
        assert seen < 40
        await stage.post("report", report(0, AgentState.RUNNING).wire())
        await until(lambda: len(stage.told) > seen)
        assert all(urgent for _, urgent in stage.told), "the last of them is not forgotten"
        for poll in polls:
            poll.cancel()


async def test_a_report_that_is_repeated_is_not_parsed_again(session: aiohttp.ClientSession) -> None:
    async with served(session) as (stage, _):
        await stage.registry.publish(mesh_document(), {0: 0}, generation=1)
        first = report(0, AgentState.RUNNING)
        await stage.post("report", first.wire())
        stored = stage.registry.agents().reports[0].report
        await stage.post("report", first.wire())
        assert stage.registry.agents().reports[0].report is stored
        assert [urgent for _, urgent in stage.told] == [True, False]
        await stage.post("report", report(0, AgentState.RUNNING, ranks=[RankProcess(rank=0, pid=1)]).wire())
        assert stage.registry.agents().reports[0].report is not stored


def test_an_agent_that_reports_rarely_is_not_taken_for_silent_nor_its_ranks_for_hung() -> None:
    ages = dict.fromkeys(range(4), 19.0)
    often = received([trains(w, 3.0) for w in range(4)], ages)
    rarely = replace(often, reports={w: replace(r, interval=20.0) for w, r in often.reports.items()})
    chosen = {"hangTimeoutSeconds": 20}
    assert detect(observed(received=rarely, recovery=chosen)) is None

    def silent(age: float, interval: float) -> bool:
        seen = received([trains(0, 3.0)], {0: age})
        reports: dict[int, ReceivedReport] = {0: replace(seen.reports[0], interval=interval)}
        found = observed(received=replace(seen, reports=reports))
        return HangRule(found).is_silent(found.workers[0])

    assert [silent(age, 2.0) for age in (59.0, 60.0)] == [False, True]
    assert [silent(age, 20.0) for age in (79.0, 80.0)] == [False, True]
