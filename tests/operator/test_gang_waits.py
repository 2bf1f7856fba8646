"""Pods that are refused, do not start or are not scheduled: a clear condition, a bounded wait, then a retry."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright_operator.controller.pod_control import rejection_reason
from meshwright_operator.decide.placement_outcome import retry_pause
from meshwright_operator.kube.client import ApiError
from tests.operator.test_gang_races import small
from tests.operator.world import World

QUOTA = (
    'pods "x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=2, '
    "used: requests.nvidia.com/gpu=4, limited: requests.nvidia.com/gpu=4"
)
DENIED = 'admission webhook "policy.example" denied the request: no'
ENDS = 'services "x" is forbidden: unable to create new content in namespace team because it is being terminated'
LIMIT = 'pods "x" is forbidden: maximum cpu usage per Pod is 1, but limit is 8'


@pytest.mark.parametrize(
    ("code", "message", "reason"),
    [
        (403, QUOTA, "QuotaExceeded"),
        (403, LIMIT, "PodsForbidden"),
        (403, ENDS, "NamespaceTerminating"),
        (400, DENIED, "AdmissionDenied"),
        (500, 'failed calling webhook "policy.example": timeout', "AdmissionUnavailable"),
        (422, "Pod is invalid: spec.tolerations[0].key: Invalid value", "PodsInvalid"),
        (409, "pods already exists", None),
        (409, 'Operation cannot be fulfilled on pods "webhook-w0-0": the object has been modified', None),
        (503, "the server is currently unable to handle the request", None),
        (0, "connection refused", None),
    ],
)
def test_a_refusal_is_told_in_one_word(code: int, message: str, reason: str | None) -> None:
    assert rejection_reason(ApiError(code, "", message)) == reason


def test_the_pause_between_attempts_doubles_to_ten_minutes() -> None:
    assert [retry_pause(n) for n in (1, 2, 3, 6, 7, 1000)] == [15, 30, 60, 480, 600, 600]


def refuse_after(world: World, allowed: int, error: ApiError) -> None:
    """A quota of so many pods."""

    def refuse(path: str, body: dict[str, Any]) -> ApiError | None:
        live = [pod for pod in world.pods() if not pod.terminal]
        return error if path.endswith("/pods") and len(live) >= allowed else None

    world.cluster.refuse = refuse


async def test_a_quota_lets_no_half_a_gang_stay() -> None:
    world = World(1, nodes=4)
    refuse_after(world, 2, ApiError(403, "Forbidden", QUOTA))
    world.submit(small("big", 4))
    held = []
    for _ in range(12):
        await world.tick()
        held.append(len([pod for pod in world.pods("big") if not pod.deleting]))
    assert max(held) <= 2
    assert held[-1] == 0, "what the quota allowed is given back"
    placed = world.condition("big", "Placed")
    assert (placed["status"], placed["reason"]) == ("False", "QuotaExceeded")
    assert "exceeded quota" in placed["message"]
    assert world.condition("big", "Ready")["reason"] == "QuotaExceeded"
    assert world.true("big", "Reconciling")
    assert world.status("big")["mesh"]["attempts"] == 1
    world.submit(small("fits", 2))
    await world.run(8)
    assert world.true("fits", "Ready"), "others use what is left"
    world.cluster.refuse = lambda path, body: None
    await world.run(120)
    assert world.true("big", "Complete")


async def test_attempts_that_are_refused_again_and_again_become_rare() -> None:
    world = World(2, nodes=2)
    refuse_after(world, 0, ApiError(400, "", DENIED))
    world.submit(small("denied", 2))
    await world.run(1500)
    attempts = world.status("denied")["mesh"]["attempts"]
    assert 5 <= attempts <= 8
    assert world.operators[0].notes.reasons("denied").count("PlacementFailed") == attempts
    assert world.condition("denied", "Placed")["reason"] == "AdmissionDenied"
    assert "attempt" in world.condition("denied", "Placed")["message"]
    assert world.status("denied").get("restartCount") == 0


async def test_an_image_that_cannot_be_pulled_holds_nothing_for_ever() -> None:
    world = World(3, nodes=2)
    world.broken_image = True
    world.submit(small("typo", 2))
    await world.run(20)
    assert world.condition("typo", "Ready")["reason"] == "ImagePullBackOff", "reported within seconds"
    assert "Check `spec.workers.image`" in world.condition("typo", "Ready")["message"]
    await world.run(50)
    assert len(world.pods("typo")) == 2
    await world.run(240)
    assert world.pods("typo") == [], "given up after five"
    placed = world.condition("typo", "Placed")
    assert (placed["status"], placed["reason"]) == ("False", "ImagePullBackOff")
    assert "no such image" in placed["message"]
    assert "GangReleased" in world.operators[0].notes.reasons("typo")
    await world.run(20)
    assert len(world.pods("typo")) == 2, "tried again"
    await world.run(60)
    assert world.pods("typo") == [], "and given up sooner"
    world.broken_image = False
    await world.run(100)
    assert world.true("typo", "Complete")


async def test_a_job_goes_elsewhere_when_the_scheduler_does_not_take_its_pods() -> None:
    world = World(4, nodes=3)
    world.unschedulable = {"n0"}
    world.submit(small("moved", 2))
    await world.run(60)
    assert world.condition("moved", "Placed")["status"] == "True"
    await world.run(70)
    assert world.condition("moved", "Placed")["reason"] == "Unschedulable", "the scheduler had two minutes"
    await world.run(60)
    assert world.true("moved", "Complete")
    assert {entry["node"] for entry in world.status("moved")["placement"]["workers"]} == {"n1", "n2"}


async def test_survivors_are_held_half_a_minute_and_then_let_go() -> None:
    world = World(5, nodes=2, work=500.0)
    world.submit(small("pair", 2))
    await world.run(20)
    assert world.true("pair", "Ready")
    refuse_after(world, 1, ApiError(403, "Forbidden", QUOTA))
    world.crash("pair-w1-0")
    await world.run(20)
    assert [pod.name for pod in world.pods("pair")] == ["pair-w0-0"]
    await world.run(20)
    assert world.pods("pair") == []
    world.cluster.refuse = lambda path, body: None
    await world.run(60)
    status = world.status("pair")
    assert (status["mesh"]["generation"], status["mesh"]["cause"]) == (2, "PodLost")
    assert status["restarts"] == [{"cause": "PodLost", "count": 1}]
    assert status["mesh"]["attempts"] == 0, "it runs: what was is forgotten"


async def test_another_spec_is_tried_at_once() -> None:
    world = World(6, nodes=2)
    refuse_after(world, 0, ApiError(422, "Invalid", "bad"))
    world.submit(small("edited", 2))
    await world.run(200)
    assert world.status("edited")["mesh"]["attempts"] >= 3
    world.cluster.refuse = lambda path, body: None
    path = next(path for path in world.cluster.objects if path.endswith("/edited"))
    obj = world.cluster.objects[path]
    obj["spec"]["workers"]["image"] = "better"
    obj["metadata"]["generation"] += 1
    world.cluster.update(path, obj)
    await world.run(6)
    assert world.true("edited", "Ready")


async def test_agents_that_nobody_hears_end_the_attempt() -> None:
    world = World(7, nodes=2)
    world.mute = True
    world.submit(small("mute", 2))
    await world.run(590)
    assert world.true("mute", "Placed")
    await world.run(25)
    assert world.condition("mute", "Placed")["reason"] == "AgentsUnreachable"
    assert world.pods("mute") == []


async def test_a_refused_secret_keeps_no_gang_behind_its_gates() -> None:
    world = World(8, nodes=2)
    error = ApiError(403, "Forbidden", 'secrets "s" is forbidden: exceeded quota: count/secrets')
    world.cluster.refuse = lambda path, body: error if path.endswith("/secrets") else None
    world.submit(small("secretless", 2))
    await world.run(12)
    assert world.pods("secretless") == []
    assert world.condition("secretless", "Placed")["reason"] == "QuotaExceeded"
    assert "token Secret" in world.condition("secretless", "Placed")["message"]
    world.cluster.refuse = lambda path, body: None
    await world.run(60)
    assert world.true("secretless", "Complete")
