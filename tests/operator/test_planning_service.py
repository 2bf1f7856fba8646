"""Planning blocks nobody: it runs in other processes, has a deadline, and takes turns."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
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
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.planning import planner as planner_module
from meshwright_operator.planning import planning_service, process_client
from meshwright_operator.planning.planner import Planner, PlanPendingError
from meshwright_operator.planning.planning_service import PlanningService
from meshwright_operator.planning.process_client import PlanPreemptedError, ProcessClient
from meshwright_operator.planning.request import PlanFailure, PlanRequest, solve
from meshwright_operator.planning.turns import RecentUse, Turns
from meshwright_operator.scheduling.inventories import Inventories
from tests.operator.support import job, node
from tests.operator.world import World
from tests.patience import patient
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
                async with asyncio.timeout(patient(120)):
                    while await self.woken.get() != key:
                        pass


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Asking]:
    asking = Asking()
    running = asyncio.create_task(asking.service.run())
    yield asking
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


@pytest.fixture(autouse=True)
def planning_processes() -> None:
    """Processes as an operator starts them, not those of other tests."""


@pytest.fixture
async def asking() -> AsyncIterator[Asking]:
    async with serving() as asking:
        yield asking


@pytest.fixture
def no_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expensive plans end only if they are preempted."""
    monkeypatch.setattr(planning_service, "QUICK_SECONDS", 1000.0)
    monkeypatch.setattr(planning_service, "DEADLINE_SECONDS", 1000.0)


async def test_a_process_is_waited_for_however_often_its_end_is_cancelled() -> None:
    """Else its transport is left to an event loop that is closed."""
    service = PlanningService(Inventories(cache_of_h100()), Calibration, OperatorMetrics(), lambda key: None)
    running = asyncio.create_task(service.run())
    await service.prestart()
    client = service._quick.client
    process = client._process
    assert process is not None
    running.cancel()
    while client._ending is None:  # noqa: ASYNC110 - the next turn of the loop
        await asyncio.sleep(0)
    running.cancel()
    client._ending.cancel()  # as kopf does when it stops, with every task that was started after it
    await asyncio.gather(running, return_exceptions=True)
    await service.close()
    assert process.returncode is not None
    assert process.stdout is not None
    assert process.stdout.at_eof()
    assert process._transport.is_closing()  # type: ignore[attr-defined]
    assert client._killed == []


async def test_closing_goes_on_although_the_wait_for_the_end_is_cancelled() -> None:
    client = ProcessClient(0)
    await client.start()
    process = client._process
    assert process is not None
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    assert client._ending is not None
    client._ending.cancel()  # by kopf, while the operator closes already
    await closing
    assert process.returncode is not None
    assert client._killed == []


async def test_a_process_whose_start_is_cancelled_does_not_remain() -> None:
    client = ProcessClient(0)
    starting = asyncio.create_task(client.start())
    while client._starting is None:  # noqa: ASYNC110 - the next turn of the loop
        await asyncio.sleep(0)
    born = client._starting
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await client.close()
    assert born.result().returncode is not None


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
async def test_a_hostile_spec_delays_nobody_and_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_service, "QUICK_SECONDS", 0.3)
    monkeypatch.setattr(planning_service, "DEADLINE_SECONDS", 1.5)
    async with serving() as asking:
        await hostile_spec_ends_at_its_deadline(asking)


async def hostile_spec_ends_at_its_deadline(asking: Asking) -> None:
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
    assert await asking.plans(HONEST, honest)
    assert "ptj_planning_deadlines_exceeded_total 1.0" in asking.metrics.exposition().decode()
    with pytest.raises(PlanError):
        asking.service.plans(HOSTILE, hostile)


def expensive(number: int) -> Any:
    """One of several specs whose plans take minutes."""
    return parse_spec(job("hostile", **{**SLOW, "training": {**SLOW["training"], "steps": 50 + number}}))


@pytest.mark.usefixtures("no_deadlines")
async def test_the_first_plans_of_a_hostile_namespace_are_preempted_for_others() -> None:
    async with serving() as asking:
        asking.service._use.count("honest", 2.0, time.monotonic())  # It has planned more than the hostile namespace.
        hostile = [JobKey("hostile", f"job-{number}") for number in range(4)]
        for number, key in enumerate(hostile):
            with pytest.raises(PlanPendingError):
                asking.service.plans(key, expensive(number))
        async with asyncio.timeout(patient(60)):
            for tensor in (1, 2):
                assert await asking.plans(HONEST, parse_spec(job("honest", parallelism={"tensor": tensor})))
        with pytest.raises(PlanPendingError) as pending:
            asking.service.plans(JobKey("hostile", "another"), expensive(9))
        assert pending.value.slow, "the namespace's plans wait for each other, not others for them"


@pytest.mark.usefixtures("no_deadlines")
async def test_a_namespace_with_much_use_makes_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_service, "QUICK_SLICE_SECONDS", 1000.0)
    async with serving() as asking:
        asking.service._use.count("hostile", 50.0, time.monotonic())
        asking.service._use.count("honest", 10.0, time.monotonic())
        with pytest.raises(PlanPendingError) as pending:
            asking.service.plans(HOSTILE, expensive(0))
        assert not pending.value.slow
        async with asyncio.timeout(patient(60)):
            for tensor in range(1, planning_service.MAX_PREEMPTIONS + 1):
                assert await asking.plans(HONEST, parse_spec(job("honest", parallelism={"tensor": tensor})))
        assert not asking.service._slow.serves("hostile"), "it begins again in the same process"


@pytest.mark.usefixtures("no_deadlines")
async def test_a_slow_plan_is_preempted_for_a_namespace_that_used_less() -> None:
    async with serving() as asking:
        asking.service._use.count("hostile", 50.0, time.monotonic())
        asking.service._use.count("honest", 10.0, time.monotonic())
        specs = {HOSTILE: expensive(0), HONEST: parse_spec(job("honest", parallelism={}))}
        for spec in specs.values():  # As if both had taken too long in the quick process.
            hardware = asking.inventories.hardware(spec).calibrated(Calibration())
            asking.service._slow_specs[PlanRequest.new(spec, hardware).spec_digest] = None
        with pytest.raises(PlanPendingError) as pending:
            asking.service.plans(HOSTILE, specs[HOSTILE])
        assert pending.value.slow
        async with asyncio.timeout(patient(60)):
            assert await asking.plans(HONEST, specs[HONEST])


async def test_a_preempted_process_makes_the_next_plan() -> None:
    client = ProcessClient(0)
    client.preempt()
    spec = parse_spec(job("honest", parallelism={}))
    hardware = Hardware.of(Inventories(cache_of_h100()).empty(spec), 2)
    await client.solve(PlanRequest.new(spec, hardware), 5.0)
    process = client._process
    client.preempt()
    ending = asyncio.create_task(client.solve(PlanRequest.new(expensive(0), hardware), 1000.0))
    async with asyncio.timeout(patient(60)):
        while client.used() < 0.1 and not ending.done():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.01)
        client.preempt()
        with pytest.raises(PlanPreemptedError) as preempted:
            await ending
        assert preempted.value.cpu_seconds > 0
        assert client.used() == 0
        assert not isinstance((await client.solve(PlanRequest.new(spec, hardware), 5.0))[0], PlanFailure)
    assert client._process is process
    await client.close()


async def test_a_process_that_is_killed_fails_one_plan_only(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_spec(job("honest", parallelism={}))
    await asking.plans(HONEST, spec)
    client = ProcessClient(0)
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
    use = RecentUse()
    turns = Turns(use)
    requests = [PlanRequest(f'{{"n": {number}}}', Hardware()) for number in range(4)]
    for number, request in enumerate(requests):
        turns.add(JobKey("many", f"job-{number}"), request)
    turns.add(HONEST, requests[0])
    turns.add(JobKey("many", "running"), PlanRequest("{}", Hardware(), "{}"))
    use.count("many", 5.0, 0.0)
    order = [str((await turns.next(1.0))[0]) for _ in range(6)]
    assert order == ["many/running", "honest/job", *(f"many/job-{number}" for number in range(4))]
    turns.add(HONEST, requests[0])
    turns.discard(HONEST)
    assert not turns.wait_for("honest")
    waiting = asyncio.create_task(turns.next(1.0))
    await asyncio.sleep(0)
    turns.add(HOSTILE, requests[1])
    assert (await waiting)[0] == HOSTILE


async def test_a_rival_is_of_another_namespace_that_used_less() -> None:
    use = RecentUse()
    use.count("honest", 2.0, 0.0)
    turns = Turns(use)
    request = PlanRequest("{}", Hardware())
    turns.add(HOSTILE, request)
    turns.add(HONEST, request)
    await turns.rival("hostile", 3.0, 0.0)
    waiting = asyncio.create_task(turns.rival("hostile", 1.0, 0.0))
    await asyncio.sleep(0)
    turns.add(JobKey("hostile", "another"), request)
    await asyncio.sleep(0.01)
    assert not waiting.done(), "not for its own namespace, nor for one that used more"
    assert turns.take("hostile") == [(HOSTILE, request), (JobKey("hostile", "another"), request)]
    turns.add(JobKey("hostile", "running"), PlanRequest("{}", Hardware(), "{}"))
    await waiting


def admitted(draw: random.Random) -> Any:
    """A random spec that the schema admits, with numbers that have many divisors. None if the schema rejects it."""
    rich = [1, 2, 6, 24, 60, 120, 360, 720, 840, 5040, 55440, 720720, 14414400, 4096, 65536, 1 << 20, 16777216]

    def number(most: int, least: int = 1) -> int:
        return draw.choice([value for value in rich if least <= value <= most])

    heads = number(1024)
    model: dict[str, Any] = {
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


async def test_the_first_plan_does_not_wait_for_the_imports_of_a_process(asking: Asking) -> None:
    async def started() -> None:
        while asking.service._quick.client._process is None:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)

    await asyncio.wait_for(started(), patient(10))
    process = asking.service._quick.client._process
    await asking.plans(HONEST, parse_spec(job("honest")))
    assert asking.service._quick.client._process is process


async def test_a_process_that_cannot_be_started_early_is_started_for_the_first_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_client.sys, "executable", "/nowhere/python")
    async with serving() as asking:
        await asyncio.sleep(0.1)
        monkeypatch.undo()
        assert await asking.plans(HONEST, parse_spec(job("honest")))


async def test_a_process_that_was_started_early_is_used_once_plans_are_made_or_stopped() -> None:
    asking = Asking()
    await asking.service.prestart()
    process = asking.service._quick.client._process
    assert process is not None
    running = asyncio.create_task(asking.service.run())
    assert await asking.plans(HONEST, parse_spec(job("honest")))
    assert asking.service._quick.client._process is process
    running.cancel()
    await asyncio.wait([running])
    unused = Asking()
    await unused.service.prestart()
    process = unused.service._quick.client._process
    assert process is not None
    await unused.service.close()
    assert process.returncode is not None


async def test_closing_waits_for_a_process_whose_plan_was_cancelled() -> None:
    """Its pipes would otherwise be open when the event loop ends."""
    client = ProcessClient(0)
    hardware = Hardware.of(Inventories(cache_of_h100()).empty(parse_spec(job("honest", parallelism={}))), 2)
    solving = asyncio.create_task(client.solve(PlanRequest.new(expensive(0), hardware), 1000.0))
    async with asyncio.timeout(patient(60)):
        while client.used() < 0.1:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.01)
    process = client._process
    solving.cancel()
    await asyncio.wait([solving])
    await client.close()
    assert process is not None
    assert process.returncode == -signal.SIGKILL
