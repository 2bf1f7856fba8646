"""The ledger of a job's time through everything that can happen to it: its causes add up to the time on the clock."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from meshwright.api import conditions
from meshwright.api.goodput import TimeCause
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_local.kube.resources import JOBS
from tests.e2e.local_stack import NAMESPACE, Stage, holds, tiny

NAME = "books"
OBSERVED = 5.0
"""Seconds by which a test that polls sees a change too early or too late, at most."""


async def edit(stage: Stage, **spec: Any) -> None:
    await stage.client.patch(JOBS, NAME, {"spec": spec}, NAMESPACE)


async def kill_a_rank(stage: Stage) -> None:
    """kill -9 of rank 3 of the present generation."""
    log = await stage.log("books-w1-0")
    os.kill(int(re.findall(r"rank started rank=3 generation=\d+ pid=(\d+)", log)[-1]), signal.SIGKILL)


async def restart_operator(stage: Stage, seconds: float) -> None:
    """kill -9, and another operator some seconds later."""
    await stage.kill_operator()
    await asyncio.sleep(seconds)
    await stage.start_operator()


def booked(status: ParallelTrainingJobStatus) -> dict[str, float]:
    """Seconds by cause."""
    assert status.goodput is not None
    return {entry.cause: entry.milliseconds / 1000 for entry in status.goodput.booked}


def measured(page: str, metric: str) -> dict[str, float]:
    """The job's series of a metric, by cause."""
    found = re.findall(rf"^{metric}\{{(.*)\}} (\S+)$", page, re.MULTILINE)
    mine = [(labels, value) for labels, value in found if f'job_name="{NAME}"' in labels]
    return {"".join(re.findall(r'cause="(\w+)"', labels)): float(value) for labels, value in mine}


@pytest.mark.long
async def test_the_books_of_an_eventful_job_add_up_to_the_time_on_the_clock(stage: Stage) -> None:
    await stage.apply(tiny("before", replicas=4, training={"steps": 100_000}))
    await stage.until("before", holds(conditions.PLACED), "on all nodes")
    applied = time.time()
    await stage.apply(tiny(NAME, training={"steps": 100_000}))
    await stage.until(NAME, lambda s: s.goodput is not None and s.goodput.cause == TimeCause.QUEUED, "queued")
    await asyncio.sleep(3)
    await stage.delete("before")
    await stage.until(NAME, holds(conditions.PLACED), "placed")
    queued = time.time() - applied

    await stage.trained(NAME, 20)
    await restart_operator(stage, 2)
    await stage.until(NAME, lambda s: s.ready_ranks == "4/4", "training under the next operator")
    await kill_a_rank(stage)
    await restart_operator(stage, 1)
    await stage.until(NAME, lambda s: s.restart_count == 1 and s.ready_ranks == "4/4", "training after the fault")

    await edit(stage, suspend=True)
    await stage.until(NAME, holds(conditions.SUSPENDED), "suspended")
    suspended = time.time()
    await asyncio.sleep(3)
    await edit(stage, suspend=False)
    await stage.until(NAME, lambda s: not holds(conditions.SUSPENDED)(s), "resumed")
    suspended = time.time() - suspended
    await stage.until(NAME, lambda s: s.ready_ranks == "4/4", "training after the suspension")
    step = await stage.trained(NAME, 1)
    await edit(stage, training={"steps": step + 60})
    status = await stage.complete(NAME)

    check_books(status, await stage.client.get(JOBS, NAME, NAMESPACE), queued, suspended)
    seconds, page = booked(status), await stage.scrape(f"{stage.ports.metrics_url}/metrics")
    exported = measured(page, "ptj_job_seconds_total")
    assert {cause: value for cause, value in exported.items() if value} == pytest.approx(seconds, rel=0.01, abs=0.01)
    ratio = seconds[TimeCause.TRAINING] / (sum(seconds.values()) - seconds[TimeCause.SUSPENDED])
    assert measured(page, "ptj_job_goodput_ratio") == {"": pytest.approx(ratio, rel=0.01)}
    await stage.delete(NAME)


def check_books(status: ParallelTrainingJobStatus, job: dict[str, Any], queued: float, suspended: float) -> None:
    """Check the sum, and the causes whose time the test measured itself, in seconds."""
    assert status.completion_time is not None
    created = datetime.fromisoformat(job["metadata"]["creationTimestamp"])
    completed = datetime.fromisoformat(status.completion_time)
    seconds = booked(status)
    assert sum(seconds.values()) == pytest.approx((completed - created).total_seconds(), rel=0.01, abs=1.0), seconds
    assert completed <= datetime.now(UTC)
    assert seconds[TimeCause.QUEUED] == pytest.approx(queued, abs=OBSERVED)
    assert seconds[TimeCause.SUSPENDED] == pytest.approx(suspended, abs=OBSERVED)
    happened = (TimeCause.STARTING, TimeCause.TRAINING, TimeCause.DETECTING, TimeCause.RESTARTING)
    assert all(seconds[cause] > 0 for cause in happened), seconds
    assert TimeCause.RESCALING not in seconds
