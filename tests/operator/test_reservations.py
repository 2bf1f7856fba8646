"""What a waiting job reserves: nodes chosen for it, after two minutes, and only if it can ever fit."""

from __future__ import annotations

from typing import Any

from meshwright_operator.decide.placement_outcome import Granted, NotGranted
from tests.operator.queueing import Tenants
from tests.operator.test_gang_races import small
from tests.operator.world import World

ONE_GPU: dict[str, Any] = {
    "parallelism": {"tensor": 1, "pipeline": 1, "microBatches": 1},
    "workers": {"image": "meshwright/worker", "gpusPerWorker": 1},
}


async def test_a_waiting_job_reserves_only_the_nodes_that_it_would_use() -> None:
    tenants = Tenants(20)
    for number in range(20):
        half = tenants.request(f"half{number}", 1, **ONE_GPU)
        tenants.run(half, {0: f"n{number}"})
    assert isinstance(await tenants.ask(tenants.request("large", 2, waited=130)), NotGranted)
    answers = [await tenants.ask(tenants.request(f"late{number}", 1, **ONE_GPU)) for number in range(20)]
    assert [isinstance(answer, Granted) for answer in answers] == [True] * 18 + [False] * 2
    assert "reserved for job default/large" in str(answers[-1])


async def test_a_job_that_has_not_waited_long_reserves_nothing() -> None:
    tenants = Tenants(3)
    await tenants.start("running", 2)
    assert isinstance(await tenants.ask(tenants.request("large", 2, waited=110)), NotGranted)
    await tenants.start("small", 1)


async def test_a_reservation_stays_on_its_nodes_until_the_job_starts() -> None:
    tenants = Tenants(4)
    for name in "abcd":
        await tenants.start(name, 1)
    large = tenants.request("large", 2, waited=130)
    await tenants.ask(large)
    others = 0
    for name in "dcba":
        tenants.end(name)
        await tenants.freed()
        if isinstance(await tenants.ask(large), Granted):
            break
        others += isinstance(await tenants.ask(tenants.request(f"small-{name}", 1)), Granted)
    else:
        raise AssertionError("the large job never started")
    assert others == 2, "the two nodes that it did not reserve"


async def test_one_job_of_a_namespace_reserves_at_a_time() -> None:
    tenants = Tenants(8)
    await tenants.start("running", 6)
    for name in ("team/a", "team/b", "team/c"):
        assert isinstance(await tenants.ask(tenants.request(name, 3, waited=500)), NotGranted)
    tenants.end("running", worker=0)
    tenants.end("running", worker=1)
    tenants.end("running", worker=2)
    assert "team/a" in await tenants.freed()
    await tenants.start("small", 2)
    await tenants.start("team/a", 3)


async def test_a_job_that_does_not_fit_an_empty_cluster_reserves_nothing() -> None:
    tenants = Tenants(4)
    await tenants.start("running", 2)
    assert isinstance(await tenants.ask(tenants.request("giant", 6, priority=9, waited=10**6)), NotGranted)
    await tenants.start("small", 2)


async def test_a_withdrawn_job_releases_its_reservation() -> None:
    tenants = Tenants(4)
    await tenants.start("running", 2)
    large = tenants.request("large", 4, waited=130)
    assert isinstance(await tenants.ask(large), NotGranted)
    assert isinstance(await tenants.ask(tenants.request("small", 2)), NotGranted)
    tenants.scheduler.withdraw(large.uid)
    assert await tenants.freed() == ["default/small"]


async def test_spares_are_at_most_as_many_as_the_jobs_workers() -> None:
    world = World(12, nodes=14, work=10**6)
    world.submit(small("greedy", 1, recovery={"spareNodes": 64}))
    await world.run(20)
    assert len(world.status("greedy")["placement"]["spares"]) == 1
    world.submit(small("other", 12))
    await world.run(10)
    assert world.true("other", "Placed")
