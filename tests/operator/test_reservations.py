"""What a waiting job reserves: nodes chosen for it, after two minutes, and only if it can ever fit."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from meshwright.models.presets import PRESETS
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cost.frameworks import FRAMEWORKS
from meshwright.planner.cost.memory import worst_stage
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright.planner.cost_model import Calibration
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement.fit_error import fit_error
from meshwright.planner.plan import Plan
from meshwright_operator.decide.gang_actions import Size
from meshwright_operator.decide.placement_outcome import Granted, NotGranted
from meshwright_operator.scheduling.reservations import choose_nodes, placement_for
from tests.operator.queueing import Tenants
from tests.operator.test_gang_races import small
from tests.operator.world import World
from tests.planner.builders import inventory, node, plan_of

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


async def test_only_the_smallest_size_explains_why_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    explained: list[int] = []

    def explain(plan: Plan, *args: Any, **kwargs: Any) -> DoesNotFitError:
        explained.append(plan.layout.data)
        return fit_error(plan, *args, **kwargs)

    monkeypatch.setattr(sys.modules["meshwright.planner.placement.place"], "fit_error", explain)
    tenants = Tenants(3)
    wide = tenants.request("elastic", 8)
    sizes = tuple(
        Size(replace(wide.plan, strategy=replace(wide.plan.strategy, data=data)), {n: n for n in range(data)}, {})
        for data in (8, 6, 4, 2)
    )
    asked = replace(wide, sizes=sizes)
    found = placement_for(asked, tenants.scheduler.inventory(wide.spec), tenants.scheduler.calibration)
    assert (found.plan.layout.data, len(found.nodes), explained) == (2, 2, [])
    with pytest.raises(DoesNotFitError, match="1 GPU missing|2 GPUs missing"):
        placement_for(
            replace(asked, sizes=sizes[:3]), tenants.scheduler.inventory(wide.spec), tenants.scheduler.calibration
        )
    assert explained == [4]


def chosen(plan: Plan, nodes: Inventory, busy: dict[str, int] | None = None) -> tuple[str, ...]:
    request = replace(Tenants(1).request("large", 1), plan=plan, other_plans=())
    return choose_nodes(request, nodes, busy or {}, Calibration())


def test_a_reservation_skips_nodes_that_no_worker_may_use() -> None:
    """The first two are the least busy, but one is cordoned, and a rank does not fit on the GPUs of the other."""
    strategy = Strategy(2, 1, 1)
    memory = worst_stage(Workload(PRESETS["llama-3-8b"], 8192, 1), strategy, FRAMEWORKS["meshwright"])
    plan = replace(plan_of(2, 1, 1, 2), memory=memory)
    nodes = inventory(
        node("n0", gpus=2, unschedulable=True, memory_mib=1_000_000),
        node("n1", gpus=2, memory_mib=1000),
        node("n2", gpus=2, memory_mib=1_000_000),
    )
    assert chosen(plan, nodes, {"n2": 2}) == ("n2",)


def test_a_reservation_counts_complete_tensor_groups_of_each_domain() -> None:
    """Three workers are in one domain, and only one is in the others: a group of two workers needs both in one."""
    places = [("a", "a0"), ("b", "b0"), ("c", "c0"), ("c", "c1"), ("c", "c2"), ("d", "d0"), ("d", "d1")]
    nodes = inventory(*(node(name, gpus=4, domain=domain) for domain, name in places))
    assert chosen(plan_of(8, 1, 1, 4), nodes) == ("c0", "c1")
    assert chosen(plan_of(8, 1, 2, 4), nodes) == ("c0", "c1", "d0", "d1")
    assert chosen(plan_of(8, 1, 3, 4), nodes) == (), "two groups at most"
