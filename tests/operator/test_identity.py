"""One worker, one live pod, one set of ranks: with two operators at once, with stale caches, whatever dies meanwhile.

`World` checks at every moment what must never be: two live pods of a worker, two live sets of ranks of one generation,
a generation announced before it is persisted, a pod of another incarnation in a mesh.
"""

from __future__ import annotations

import random

import pytest

from tests.operator.memory import copied
from tests.operator.support import PODS
from tests.operator.test_gang_races import small
from tests.operator.world import Operator, World
from tests.randomness import seeds


async def trouble(world: World, chance: random.Random) -> None:
    """Something bad, now and then."""
    what = chance.random()
    if what < 0.03 and world.agents:
        world.crash(chance.choice(sorted(world.agents)))
    elif what < 0.06 and world.agents:
        await world.evict(chance.choice(sorted(world.agents)))
    elif what < 0.12:
        operator = chance.choice(world.operators)
        operator.blind = not operator.blind
        if not operator.blind:
            operator.relist()


@pytest.mark.chaos
@pytest.mark.parametrize("seed", seeds(5))
async def test_two_operators_without_a_lease_and_with_stale_caches_never_double_a_rank(seed: int) -> None:
    chance = random.Random(seed)
    world = World(seed, nodes=4, work=10.0)
    world.operators.append(Operator(world))
    world.submit(small("first", 3))
    world.submit(small("second", 2))
    for _ in range(120):
        await world.tick()
        await trouble(world, chance)
    for operator in world.operators:
        operator.blind = False
        operator.relist()
    for _ in range(300):
        if world.true("first", "Complete") and world.true("second", "Complete"):
            break
        await world.tick()
    assert world.true("first", "Complete"), world.status("first")
    assert world.true("second", "Complete"), world.status("second")


async def test_an_operator_that_starts_anew_in_the_middle_of_anything_adopts_what_is_there() -> None:
    for seed in range(10):
        chance = random.Random(seed)
        world = World(seed, nodes=4, work=25.0)
        world.submit(small("first", 4))
        for _ in range(chance.randint(1, 12)):
            await world.tick()
        before = {pod.uid for pod in world.pods()}
        world.cluster.watchers.clear()
        world.operators = [Operator(world)]
        await world.run(20)
        assert before <= {pod.uid for pod in world.pods()}, "a pod was replaced because of it"
        assert world.status("first")["mesh"]["generation"] == 1
        assert world.status("first").get("restartCount") == 0


async def test_a_pod_that_the_cache_has_not_seen_is_not_made_again() -> None:
    world = World(1, nodes=2)
    operator = world.operators[0]
    world.submit(small("known", 2))
    await world.run(8)
    assert world.true("known", "Ready")
    # They lost their label and got it back, and only the first of it has arrived.
    operator.blind = True
    for pod in list(operator.cache.all_pods()):
        world.cluster.update(f"{PODS}/{pod.name}", copied(world.cluster.objects[f"{PODS}/{pod.name}"]))
        operator.cache.remove_pod(pod)
    operator.blind = False
    assert not list(operator.cache.all_pods())
    operator.queue.add(next(iter(operator.cache.jobs)))
    await world.run(5)
    assert {pod.name for pod in world.pods()} == {"known-w0-0", "known-w1-0"}
    assert world.status("known")["mesh"]["generation"] == 1


async def test_a_pod_of_somebody_else_with_the_name_is_told_and_left_alone() -> None:
    world = World(2, nodes=2)
    foreign = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "mine-w1-0", "labels": {}}, "spec": {}}
    world.cluster.watchers.clear()
    world.cluster.put(f"{PODS}/mine-w1-0", foreign)
    world.operators = [Operator(world)]
    world.submit(small("mine", 2))
    await world.run(3)
    assert "Pod mine-w1-0 exists and does not belong to this job" in world.condition("mine", "Ready")["message"]
    assert "mine-w1-0" in {path.rsplit("/", 1)[1] for path in world.cluster.objects}
    assert all(pod.gates for pod in world.pods("mine")), "nothing was started"


async def test_an_operator_that_was_away_for_longer_than_any_time_out_restarts_nobody() -> None:
    world = World(3, nodes=3, work=2000.0)
    world.submit(small("alone", 3, recovery={"hangTimeoutSeconds": 30}))
    await world.run(20)
    assert world.true("alone", "Ready")
    started, pods = list(world.started), {pod.uid for pod in world.pods()}
    world.operators.clear()
    world.cluster.watchers.clear()
    await world.run(900)
    world.operators = [Operator(world)]
    await world.run(300)
    assert world.true("alone", "Ready")
    assert world.started == started, "a rank was started again"
    assert {pod.uid for pod in world.pods()} == pods
    assert world.status("alone")["restartCount"] == 0
