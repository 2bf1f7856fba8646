"""Planning blocks nobody: it runs in other processes, has a deadline, and takes turns."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest

from meshwright.api.parsing import InvalidSpecError, parse_spec
from meshwright.planner.cost_model import Calibration
from meshwright.planner.deadline import DEADLINE_EXCEEDED
from meshwright.planner.errors import PlanError
from meshwright.planner.hardware import Hardware
from meshwright.planner.plan import Plan, make_plans
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.metrics.operator_metrics import OperatorMetrics
from meshwright_operator.planning import planner as planner_module
from meshwright_operator.planning import planning_service
from meshwright_operator.planning.planner import Planner, PlanPendingError
from meshwright_operator.planning.planning_service import PlanningService
from meshwright_operator.planning.request import PlanFailure, PlanRequest, solve
from meshwright_operator.planning.turns import Turns
from meshwright_operator.scheduling.inventories import Inventories
from tests.operator.support import job, node
from tests.operator.world import World
from tests.planner.test_deadline import SLOW
from tests.randomness import first_seed, runs

HONEST, HOSTILE = JobKey("honest", "job"), JobKey("hostile", "job")


def h100_nodes(count: int = 4) -> list[dict[str, Any]]:
    nodes = [node(f"n{number}", f"r{number // 4}") for number in range(count)]
    for one in nodes:
        one["metadata"]["labels"]["nvidia.com/gpu.product"] = "NVIDIA-H100-80GB-HBM3"
    return nodes


def cache_of_h100() -> Cache:
    cache = Cache()
    for one in h100_nodes():
        cache.put_node(one)
    return cache


class Asking:
    """A service, and the jobs that it wakes."""

    def __init__(self) -> None:
        self.inventories = Inventories(cache_of_h100())
        self.woken: asyncio.Queue[JobKey] = asyncio.Queue()
        self.metrics = OperatorMetrics()
        self.service = PlanningService(self.inventories, Calibration, self.metrics, self.woken.put_nowait)

    async def plans(self, key: JobKey, spec: Any) -> list[Plan]:
        """What a job's reconciles come to."""
        while True:
            try:
                return self.service.plans(key, spec)
            except PlanPendingError:
                async with asyncio.timeout(120):
                    while await self.woken.get() != key:
                        pass


@pytest.fixture
async def asking() -> AsyncIterator[Asking]:
    asking = Asking()
    running = asyncio.create_task(asking.service.run())
    yield asking
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_a_plan_of_another_process_is_the_same(asking: Asking) -> None:
    spec = parse_spec(job("honest", parallelism={}))
    plans = await asking.plans(HONEST, spec)
    assert plans == make_plans(spec, asking.inventories.empty(spec))
    status = plans[0].to_status()
    with pytest.raises(PlanPendingError):
        asking.service.running_plan(HONEST, spec, status)
    assert await asyncio.wait_for(asking.woken.get(), 120) == HONEST
    assert asking.service.running_plan(HONEST, spec, status).layout == plans[0].layout
    with pytest.raises(PlanError, match="InvalidSpec|model"):
        await asking.plans(HONEST, parse_spec(job("odd", model={"preset": "unknown"})))


@pytest.mark.slow
async def test_a_hostile_spec_delays_nobody_and_ends_at_its_deadline(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning_service, "QUICK_SECONDS", 0.3)
    monkeypatch.setattr(planning_service, "DEADLINE_SECONDS", 1.5)
    hostile = parse_spec(job("hostile", **SLOW))
    loop_time = time.thread_time()
    with pytest.raises(PlanPendingError):
        asking.service.plans(HOSTILE, hostile)
    assert time.thread_time() - loop_time < 0.5, "asking takes no time"
    ending = asyncio.create_task(asking.plans(HOSTILE, hostile))
    await asyncio.sleep(0)
    honest = parse_spec(job("honest", parallelism={}))
    with pytest.raises(PlanPendingError):
        asking.service.plans(HONEST, honest)
    with pytest.raises(PlanError) as error:
        await ending
    assert error.value.reason == DEADLINE_EXCEEDED
    assert asking.service.plans(HONEST, honest), "it was planned meanwhile"
    assert "ptj_planning_deadlines_exceeded_total 1.0" in asking.metrics.exposition().decode()
    with pytest.raises(PlanError):
        asking.service.plans(HOSTILE, hostile)


async def test_a_process_that_is_killed_fails_one_plan_only(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_spec(job("honest", parallelism={}))
    await asking.plans(HONEST, spec)
    client = planning_service.ProcessClient(0)
    await client.solve(PlanRequest.new(spec, Hardware()), 1.0)
    process = client._process
    assert process is not None
    process.kill()
    await process.wait()
    assert (await client.solve(PlanRequest.new(spec, Hardware()), 5.0))[0]
    again = client._process
    await client.close()
    assert again is not None
    assert again.returncode is not None, "closing ends the process"


async def test_a_job_that_cannot_be_planned_in_time_has_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_module, "DEADLINE_SECONDS", 0.2)
    solved: list[PlanRequest] = []

    def counting(request: PlanRequest, seconds: float) -> Any:
        solved.append(request)
        return solve(request, seconds)

    monkeypatch.setattr(planner_module, "solve", counting)
    world = World(1, nodes=0)
    for one in h100_nodes():
        world.nodes[one["metadata"]["name"]] = one
        world.operators[0].cache.put_node(one)
    world.submit(job("hostile", **SLOW))
    world.submit(job("honest"))
    await world.run(3)
    condition = world.condition("hostile", "Stalled")
    assert (condition["status"], condition["reason"]) == ("True", DEADLINE_EXCEEDED)
    assert "set `parallelism.tensor`" in condition["message"]
    assert world.condition("honest", "Placed")["status"] == "True"
    hostile = [request for request in solved if "14414400" in request.spec_json]
    for _ in range(20):
        world.operators[0].queue.add(JobKey("default", "hostile"))
        await world.tick(1.0)
    assert len([request for request in solved if "14414400" in request.spec_json]) == len(hostile) == 1


def test_a_plan_that_passed_its_deadline_is_repeated_after_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [0.0], []

    def failing(request: PlanRequest, seconds: float) -> PlanFailure:
        asked.append(now[0])
        return PlanFailure("too long", DEADLINE_EXCEEDED)

    monkeypatch.setattr(planner_module, "solve", failing)
    planner = Planner(Inventories(cache_of_h100()), Calibration, lambda: now[0])
    spec = parse_spec(job("hostile", **SLOW))
    for second in range(0, 20000, 10):
        now[0] = float(second)
        with pytest.raises(PlanError):
            planner.plans(HOSTILE, spec)
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert pauses[:7] == [60, 120, 240, 480, 960, 1920, 3600]
    assert set(pauses[6:]) == {3600.0}, "bounded: the cluster may have changed"


async def test_namespaces_take_turns_and_running_jobs_come_first() -> None:
    turns = Turns()
    requests = [PlanRequest(f'{{"n": {number}}}', Hardware()) for number in range(4)]
    for number, request in enumerate(requests):
        turns.add(JobKey("many", f"job-{number}"), request)
    turns.add(HONEST, requests[0])
    turns.add(JobKey("many", "running"), PlanRequest("{}", Hardware(), "{}"))
    turns.count("many", 5.0, 0.0)
    order = [str((await turns.next(1.0))[0]) for _ in range(6)]
    assert order == ["many/running", "honest/job", *(f"many/job-{number}" for number in range(4))]
    turns.add(HONEST, requests[0])
    turns.discard(HONEST)
    waiting = asyncio.create_task(turns.next(1.0))
    await asyncio.sleep(0)
    turns.add(HOSTILE, requests[1])
    assert (await waiting)[0] == HOSTILE


def admitted(draw: random.Random) -> Any:
    """A random spec that the schema admits, with numbers that have many divisors. None if the schema rejects it."""
    rich = [1, 2, 6, 24, 60, 120, 360, 720, 840, 5040, 55440, 720720, 14414400, 4096, 65536, 1 << 20, 16777216]

    def number(most: int, least: int = 1) -> int:
        return draw.choice([value for value in rich if least <= value <= most])

    heads = number(1024)
    model = {
        "layers": number(1024),
        "hiddenSize": heads * draw.choice([64, 128]),
        "intermediateSize": number(1048576),
        "heads": heads,
        "kvHeads": heads // draw.choice([1, 1, 2]) or 1,
        "vocabSize": number(1048576, 2),
    }
    if draw.random() < 0.3:
        model["mixture"] = {
            "experts": number(4096),
            "perToken": 1,
            "renormalize": False,
            "intermediateSize": number(1048576),
        }
    parallelism = {
        name: draw.choice([1, 2, 4, 8, 60])
        for name in ("tensor", "pipeline", "context", "expert", "microBatches")
        if draw.random() < 0.25
    }
    training = {"steps": 50, "globalBatchSize": number(16777216), "sequenceLength": number(16777216, 8)}
    workers = {"image": "w", "gpusPerWorker": draw.choice([1, 2, 8])}
    with contextlib.suppress(InvalidSpecError):
        return parse_spec(
            job("any", replicas=number(64), model=model, parallelism=parallelism, training=training, workers=workers)
        )
    return None


@pytest.mark.fuzz
@pytest.mark.slow
def test_every_admitted_spec_ends_within_its_deadline() -> None:
    """`make fuzz RUNS=1000` draws 1,000 specs. The deadline is cooperative here: what passes it would be killed."""
    hardware = Hardware.of(Inventories(cache_of_h100()).empty(parse_spec(job("any"))), 2)
    worst: tuple[float, str] = (0.0, "")
    for seed in range(first_seed(), first_seed() + runs(15)):
        spec = admitted(random.Random(seed))
        if spec is None:
            continue
        started = time.thread_time()
        answer = solve(PlanRequest.new(spec, hardware), 0.5)
        took = time.thread_time() - started
        assert answer
        worst = max(worst, (took, f"seed {seed}: {answer if isinstance(answer, PlanFailure) else answer[0].summary}"))
    assert worst[0] < 5.0, worst
