"""A job whose steps take other than estimated makes the next plan better."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.api.parsing import parse_spec
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.hardware import Hardware
from meshwright.planner.plan import make_plan, make_plans
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.planning.request import PlanRequest
from meshwright_operator.scheduling.calibration import CalibrationLoop
from meshwright_operator.scheduling.scheduler import JobScheduler

H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}


def nodes(count: int = 4) -> list[dict[str, Any]]:
    return [
        {
            "metadata": {"name": f"n{i}", "labels": H100},
            "spec": {},
            "status": {
                "allocatable": {"nvidia.com/gpu": "8", "cpu": "96", "memory": "2Ti", "pods": "110"},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }
        for i in range(count)
    ]


def job(name: str, namespace: str = "train", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": namespace, "uid": name},
        "spec": {
            "replicas": 4,
            "model": {"preset": "llama-3-8b"},
            "data": {"source": "PythonStdlib"},
            "training": {"steps": 1000, "globalBatchSize": 64, "sequenceLength": 8192, "precision": "bf16"},
            "parallelism": {"zeroStage": 2},
            "workers": {"image": "worker", "gpusPerWorker": 8},
        },
        "status": status,
    }


def learning(*jobs: dict[str, Any]) -> tuple[CalibrationLoop, JobScheduler]:
    cache = Cache()
    for obj in nodes():
        cache.put_node(obj)
    for one in jobs:
        cache.jobs[JobKey(one["metadata"]["namespace"], one["metadata"]["name"])] = one
    scheduler = JobScheduler(None, cache, None, ())  # type: ignore[arg-type]  # nothing is placed here
    return CalibrationLoop(cache, scheduler), scheduler


def estimate(scheduler: JobScheduler) -> Any:
    """The estimate of the plan that the next job would get."""
    return next_plan(scheduler).estimate


def next_plan(scheduler: JobScheduler) -> Any:
    """The plan that the next job would get."""
    spec = parse_spec(job("next"))
    return make_plans(spec, scheduler.inventory(spec), scheduler.calibration)[0]


def planned() -> Any:
    return make_plan(parse_spec(job("any")), Inventory.from_objects(nodes(), []))


async def test_live_steps_change_the_next_plan() -> None:
    before = planned()
    status = before.to_status().model_dump(by_alias=True, exclude_none=True)
    slow = round(before.estimate.tokens_per_second / 2)
    learn, scheduler = learning(job("slow", plan=status, step=200, tokensPerSecond=slow))
    await learn.refit()
    after = next_plan(scheduler)
    assert after.estimate is not None
    assert after.estimate.tokens_per_second == pytest.approx(slow, rel=0.1)
    assert after.to_status().estimated_tokens_per_second == pytest.approx(slow, rel=0.1)


def speeds(**by_namespace: list[float]) -> list[dict[str, Any]]:
    """Jobs that run this many times as fast as estimated."""
    before = planned()
    status = before.to_status().model_dump(by_alias=True, exclude_none=True)
    estimated = before.estimate.tokens_per_second
    return [
        job(f"{namespace}-{number}", namespace, plan=status, step=500, tokensPerSecond=round(factor * estimated))
        for namespace, factors in by_namespace.items()
        for number, factor in enumerate(factors)
    ]


async def learned_speed(**by_namespace: list[float]) -> float:
    """How fast the next job's plan is, compared with what the data sheets say."""
    learn, scheduler = learning(*speeds(**by_namespace))
    await learn.refit()
    return float(estimate(scheduler).tokens_per_second / planned().estimate.tokens_per_second)


async def test_three_liars_in_one_namespace_do_not_outvote_two_honest_ones() -> None:
    assert await learned_speed(liar=[0.01] * 3, one=[1.0], two=[1.0]) == pytest.approx(1.0, rel=0.02)
    assert await learned_speed(liar=[50.0] * 30, one=[0.8], two=[0.8]) == pytest.approx(0.8, rel=0.05)


async def test_one_namespace_moves_a_constant_only_a_little() -> None:
    assert await learned_speed(liar=[0.001] * 9) >= 0.49
    assert await learned_speed(liar=[1000.0] * 9) <= 2.05


async def test_two_namespaces_move_it_as_far_as_both_say() -> None:
    assert await learned_speed(liar=[0.001], honest=[1.0]) == pytest.approx(1.0, rel=0.05)
    assert await learned_speed(liar=[0.001], honest=[0.8]) >= 0.75
    assert await learned_speed(one=[0.3], two=[0.3], three=[0.3]) == pytest.approx(0.3, rel=0.2)
    assert await learned_speed(one=[0.001], two=[0.001], three=[0.001]) >= 0.24


async def test_a_restarted_operator_learns_the_same() -> None:
    status = planned().to_status().model_dump(by_alias=True, exclude_none=True)
    jobs = [job(f"j{i}", plan=status, step=100 + i, tokensPerSecond=20_000 + 500 * i) for i in range(5)]
    first, one = learning(*jobs)
    second, other = learning(*reversed(jobs))
    await first.refit()
    await first.refit()
    await second.refit()
    assert estimate(one) == estimate(other) != planned().estimate


async def test_jobs_that_say_nothing_teach_nothing() -> None:
    status = planned().to_status().model_dump(by_alias=True, exclude_none=True)
    broken = job("broken", plan=status, step=100, tokensPerSecond=10)
    broken["spec"] = {"replicas": "many"}
    unknown = job("unknown", plan=status, step=100, tokensPerSecond=10)
    unknown["spec"]["model"] = {"preset": "no-such-model"}
    padded = job("padded", plan=status, step=100, tokensPerSecond=10)
    padded["spec"]["data"] = {"claimName": "v", "format": "PromptCompletion"}
    early = job("early", plan=status, step=2, tokensPerSecond=10)
    ended = job("ended", plan=status, step=1000)
    twisted = [
        job(f"twisted{number}", plan={**status, **wrong}, step=100, tokensPerSecond=10)
        for number, wrong in enumerate(({"tensor": 0}, {"pipeline": 999}, {"microBatches": 0}, {"data": 10**9}))
    ]
    learn, scheduler = learning(broken, unknown, padded, early, ended, *twisted, job("new"))
    await learn.refit()
    assert estimate(scheduler) == planned().estimate


async def test_a_measurement_that_varies_a_little_changes_no_plan_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Other constants mean another digest of the hardware: the plans of all waiting jobs would be made again."""
    caplog.set_level("INFO", "meshwright_operator.scheduling.calibration")
    before = planned()
    status = before.to_status().model_dump(by_alias=True, exclude_none=True)
    # Its half is still beyond what the measurements of one namespace can reach: a factor of 2.
    slow = round(before.estimate.tokens_per_second * 0.75)
    measured = job("a", plan=status, step=2000)
    learn, scheduler = learning(measured)
    waiting, digests = parse_spec(job("waits")), []
    hardware = Hardware.of(scheduler.inventory(waiting), 8)
    for speed in (slow, slow + 10, slow - 10, round(slow * 1.01), slow // 2):
        measured["status"]["tokensPerSecond"] = speed
        await learn.refit()
        digests.append(PlanRequest.new(waiting, hardware.calibrated(scheduler.calibration)).digest)
    assert len(set(digests[:4])) == 1
    assert digests[4] != digests[3]
    assert [record.message for record in caplog.records] == ["recalibrated"] * 2


async def test_many_small_changes_add_up_to_a_large_one() -> None:
    before = planned()
    status = before.to_status().model_dump(by_alias=True, exclude_none=True)
    full = before.estimate.tokens_per_second
    measured = job("a", plan=status, step=2000)
    learn, scheduler = learning(measured)
    for percent in range(100, 69, -1):
        measured["status"]["tokensPerSecond"] = round(full * percent / 100)
        await learn.refit()
    assert estimate(scheduler).tokens_per_second == pytest.approx(0.7 * full, rel=0.1)
