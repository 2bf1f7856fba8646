"""A real Prometheus scrapes a job with a killed pod, two rescales and a slow rank: every panel shows data, alerts fire.

With MESHWRIGHT_BOARDS_DATA=DIRECTORY in the environment, the answers are also written there, for pictures of the boards
(`python -m tests.dashboards.pictures`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dashboards.source.alerts import GROUPS
from dashboards.source.rules import Alert, Group, rules_file
from meshwright.api.objects import KubeObject
from meshwright_local.kube.resources import JOBS
from tests.dashboards.boards import NAMES, Target, annotations, filled, targets
from tests.e2e.exporter import recorded_exporter
from tests.e2e.local_stack import NAMESPACE, Stage, eventually, tiny
from tests.e2e.prometheus import PROMETHEUS, Prometheus, Series, configuration, start_prometheus
from tests.e2e.test_elastic import CONSTANT, runs_with, scale

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on the PATH: Debian's package `prometheus`"),
]

NAME, WAITING, LATE = "watched", "waiting", "late"
"""The job of the Job board, one that never gets nodes, and one that gets them after it is made smaller."""
STOPPED_SECONDS, RUNNING_SECONDS = 0.15, 0.05
"""A rank that is stopped for three quarters of the time is four times as slow."""
CLEARLY_SLOWER = 2.0
"""Far above the alert's threshold, and above what the load of the machine does to a rank."""
SHORTENED = "3s"
"""How long an alert's condition must last in this test."""
STEPS_BETWEEN = 20


def watched() -> list[dict[str, Any]]:
    """A job with everything that panels show: stages, experts, evaluation, checkpoints, and another size to come."""
    return tiny(
        NAME,
        model={"layers": 2, "mixture": {"experts": 4, "perToken": 2, "intermediateSize": 32}},
        elastic={"maxReplicas": 2, "replacementSeconds": 5, "pauseSeconds": 10},
        parallelism={"tensor": 1, "pipeline": 2, "microBatches": 2},
        workers={"gpusPerWorker": 1},
        training={
            "steps": 100_000,
            "optimizer": CONSTANT,
            "evaluation": {"everySteps": 20, "samples": 8},
        },
    )


@dataclass
class Run:
    """The run, after its end."""

    prometheus: Prometheus
    start: float
    end: float
    fired: dict[str, list[Any]]

    async def data(self, target: Target, **values: str) -> list[Series]:
        """What Grafana would show of a query."""
        given = {"__rate_interval": "10s", "__range": f"{self.end - self.start:.0f}s"}
        names = {"namespace": NAMESPACE, "job_name": NAME, "cluster": ".*", "instance": ".*"}
        gpus = {"dcgm_namespace": "exported_namespace", "dcgm_pod": "exported_pod"}
        expr = filled(target.expr, {**given, **names, **gpus, **values})
        if target.instant:
            return await self.prometheus.query(expr, self.end)
        return await self.prometheus.query_range(expr, self.start, self.end)


def shortened_rules() -> str:
    """All rules, with a short wait."""
    return rules_file(
        Group(group.name, [replace(r, wait=SHORTENED) if isinstance(r, Alert) else r for r in group.rules])
        for group in GROUPS
    )


@contextlib.asynccontextmanager
async def slowed(pid: int) -> AsyncIterator[None]:
    """Stop a process again and again."""

    async def stop_and_continue() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(STOPPED_SECONDS)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(RUNNING_SECONDS)

    task = asyncio.create_task(stop_and_continue())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ProcessLookupError):
            await task
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def trains_on(stage: Stage, steps: int = STEPS_BETWEEN) -> None:
    """Wait for some further steps."""
    step = (await stage.status(NAME)).step or 0
    await stage.until(NAME, lambda s: (s.step or 0) >= step + steps, f"past step {step + steps}", 300)


async def last_rank(stage: Stage) -> int:
    """The process of the job's last rank, in its newest pod."""
    pod = (await stage.pod(NAME, 3))["metadata"]["name"]
    return int(re.findall(r"rank started rank=3 generation=\d+ pid=(\d+)", await stage.log(pod))[-1])


async def faults(stage: Stage, prometheus: Prometheus, fired: dict[str, list[Any]]) -> None:
    """The life of the job: a killed pod, another size and back, and a slow rank."""

    async def fires(alert: str) -> bool:
        fired.update(await prometheus.firing())
        return alert in fired

    async def straggles(rank: str) -> bool:
        await fires("PTJStraggler")
        found = await prometheus.query(f'ptj_rank_straggler_ratio{{job_name="{NAME}",rank="{rank}"}}', time.time())
        ranks = [alert["rank"] for alert in (await prometheus.firing()).get("PTJStraggler", [])]
        return ranks == [rank] and [series.values[-1][1] > CLEARLY_SLOWER for series in found] == [True]

    await stage.until(NAME, runs_with(2), "training with 2 replicas", 300)
    await trains_on(stage)
    await stage.client.patch(JOBS, LATE, {"spec": {"replicas": 1}}, NAMESPACE)
    await stage.complete(LATE, 300)
    await stage.delete_pod(NAME, 1, grace_seconds=0)
    await eventually("PTJJobRestarted fires", lambda: fires("PTJJobRestarted"), 120)
    await stage.until(NAME, runs_with(2), "training again", 300)
    await trains_on(stage)
    for replicas in (1, 2):
        await scale(stage, NAME, replicas)
        await stage.until(NAME, runs_with(replicas), f"training with {replicas} replicas", 300)
        await trains_on(stage)
    async with slowed(await last_rank(stage)):
        await eventually("PTJStraggler fires for rank 3 only", lambda: straggles("3"), 300)
    await trains_on(stage, 2)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def run(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Run]:
    """The job's life, with all that Prometheus has seen of it."""
    directory = tmp_path_factory.mktemp("prometheus")
    rules = directory / "rules.yaml"
    rules.write_text(shortened_rules())
    pods: list[KubeObject] = []

    async def follow_pods() -> None:
        while True:
            pods[:] = await stage.pods(NAME)
            await asyncio.sleep(0.5)

    fired: dict[str, list[Any]] = {}
    async with recorded_exporter(NAMESPACE, lambda: pods, NAME) as exporter:
        operator = f"127.0.0.1:{stage.ports.metrics}"
        document = configuration(operator, exporter, rules)
        prometheus = await start_prometheus(stage.programs, directory, document)
        start = time.time()
        following = asyncio.create_task(follow_pods())
        try:
            await stage.apply(watched())
            await stage.apply(tiny(WAITING, replicas=32, training={"globalBatchSize": 64}))
            await stage.apply(tiny(LATE, replicas=4, training={"steps": 10}))
            await faults(stage, prometheus, fired)
        finally:
            following.cancel()
        yield Run(prometheus, start, time.time(), fired)
        await prometheus.program.stop()
    for name in (NAME, WAITING, LATE):
        await stage.delete(name)


@pytest.fixture(autouse=True)
def tidy() -> None:
    """Replaces the fixture that deletes all jobs after each test: this run is used by all of them."""


async def test_prometheus_scrapes_every_worker_pod(run: Run) -> None:
    up = await run.prometheus.query_range("sum by (job) (up)", run.start, run.end)
    most = {series.labels["job"]: max(value for _, value in series.values) for series in up}
    assert most == {"operator": 1, "workers": 4, "dcgm": 1, "dcgm-honored": 1}
    pods = await run.prometheus.query_range("max by (pod) (ptj_rank_up)", run.start, run.end)
    assert {series.labels["pod"] for series in pods} >= {f"{NAME}-w0-0", f"{NAME}-w1-0", f"{NAME}-w1-1"}


@pytest.mark.parametrize("name", NAMES)
async def test_every_query_of_every_panel_returns_data(run: Run, name: str) -> None:
    found = [(target, await run.data(target)) for target in targets(name)]
    write(name, run, found, [(mark, await run.data(mark)) for mark in annotations(name)])
    assert [str(target) for target, series in found if not series] == []
    assert len(found) > 25


async def test_panels_of_gpus_show_data_with_honored_labels_too(run: Run) -> None:
    gpus = [target for target in targets("job") if "dcgm" in target.expr]
    for target in gpus:
        series = await run.data(target, dcgm_namespace="namespace", dcgm_pod="pod")
        assert {found.labels["pod"] for found in series} >= {f"{NAME}-w0-0", f"{NAME}-w1-1"}, target
    assert len(gpus) == 8


async def test_restarts_and_rescales_are_marked(run: Run) -> None:
    marks = {mark.panel: await run.data(mark) for mark in annotations("job")}
    assert {series.labels["cause"] for series in marks["Failures"]} == {"PodLost"}
    assert {series.labels["cause"] for series in marks["Rescales"]} == {"Rescaled"}
    assert marks["Planned restarts"] == []


async def test_the_killed_pod_and_the_slow_rank_fire_their_alerts(run: Run) -> None:
    restarted, straggler = run.fired["PTJJobRestarted"], run.fired["PTJStraggler"]
    assert [(alert["namespace"], alert["job_name"]) for alert in restarted] == [(NAMESPACE, NAME)]
    assert restarted[0]["description"].startswith(f"{NAMESPACE}/{NAME} has restarted 1 times")
    assert [(alert["job_name"], alert["rank"]) for alert in straggler] == [(NAME, "3")]
    assert not {"PTJRestartLoop", "PTJLossNaN", "PTJOperatorDown", "PTJPolicyInvalid", "PTJWatchStale"} & set(run.fired)


async def test_the_rescale_is_seen_in_the_size_of_the_job(run: Run) -> None:
    (series,) = await run.prometheus.query_range(f'ptj_job_replicas{{job_name="{NAME}"}}', run.start, run.end)
    sizes = [value for _, value in series.values]
    assert [size for n, size in enumerate(sizes) if n == 0 or sizes[n - 1] != size] == [2, 1, 2]


Answers = list[tuple[Target, list[Series]]]


def starts(series: Series) -> list[float]:
    """When a mark begins: its value lasts for a minute, and grows with another event in that time."""
    before = [(0.0, 0.0), *series.values]
    pairs = zip(before, series.values, strict=False)
    return [time for (earlier, last), (time, value) in pairs if value > last or time > earlier + 5]


def write(name: str, run: Run, found: Answers, marks: Answers) -> None:
    """Keep the answers, if somebody wants to draw them."""
    directory = os.environ.get("MESHWRIGHT_BOARDS_DATA")
    if directory:
        answers = [
            {
                "panel": target.panel,
                "legend": target.legend,
                "instant": target.instant,
                "series": [{"labels": dict(s.labels), "values": list(s.values)} for s in series],
            }
            for target, series in found
        ]
        times = {mark.panel: [time for found in series for time in starts(found)] for mark, series in marks}
        document = {"start": run.start, "end": run.end, "answers": answers, "marks": times}
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / f"{name}.json").write_text(json.dumps(document))
