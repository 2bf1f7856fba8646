"""`stageBalance: Measured` with real ranks: the slow stage of a pipeline gets fewer layers, and losses stay the same."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.e2e.local_stack import Stage, tiny
from tests.e2e.test_dashboards import slowed
from tests.e2e.test_memory_recovery import events_of
from tests.e2e.test_recovery import uid_of

NAME = "balance"

pytestmark = pytest.mark.long


def pipeline(balance: str, steps: int) -> dict[str, Any]:
    return {
        "replicas": 1,
        "model": {"layers": 8},
        "parallelism": {"tensor": 1, "pipeline": 2, "stageBalance": balance},
        "workers": {"gpusPerWorker": 1},
        "training": {"steps": steps},
        "checkpoint": {"everySteps": 50},
    }


async def test_a_slow_stage_gets_fewer_layers(stage: Stage) -> None:
    steps = 400
    await stage.apply(tiny(NAME, **pipeline("Measured", steps)))
    uid = await uid_of(stage, NAME)
    await stage.trained(NAME, 1)
    (pid,) = re.findall(r"rank started rank=1 generation=1 pid=(\d+)", await stage.log(f"{NAME}-w1-0"))
    async with slowed(int(pid)):
        status = await stage.until(
            NAME, lambda s: s.plan is not None and s.plan.measured_layers is not None, "its stages are measured"
        )
    assert status.plan is not None
    assert status.plan.measured_layers is not None
    assert status.plan.measured_layers[0] > 4
    assert sum(status.plan.measured_layers) == 8

    status = await stage.complete(NAME)
    assert [(r.cause, r.count) for r in status.restarts] == [("Rebalanced", 1)]
    assert status.restarts_toward_limit == 0
    (message,) = (await events_of(stage, uid))["Rebalanced"]
    assert "Layers of the stages: " in message
    measured = await stage.saved(NAME)
    await stage.delete(NAME)

    await stage.apply(tiny(NAME, **pipeline("Flops", steps)))
    await stage.complete(NAME)
    undisturbed = await stage.saved(NAME)
    await stage.delete(NAME)
    assert [measured[key] for key in ("step", "samples", "digest")] == [
        undisturbed[key] for key in ("step", "samples", "digest")
    ]
    assert float.fromhex(measured["loss"]) == pytest.approx(float.fromhex(undisturbed["loss"]), rel=1e-4)
