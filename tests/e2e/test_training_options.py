"""Options of `training` that change how numbers are computed or sent: a killed job ends as an undisturbed one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.local_stack import Stage, endless, merged, tiny
from tests.e2e.test_recovery import same

pytestmark = pytest.mark.long

OPTIONS: dict[str, dict[str, Any]] = {
    "varlen": {
        "data": {"packing": "Documents"},
        "training": {"varlenAttention": True},
        "parallelism": {"tensor": 1, "context": 2},
    },
    "gathered": {
        "replicas": 4,
        "training": {"precision": "bf16", "fp8": {"allGather": True}},
        "parallelism": {"tensor": 1, "zeroStage": 3},
    },
}
"""By the job's name."""


@pytest.mark.parametrize("name", OPTIONS)
async def test_a_killed_job_ends_with_the_numbers_of_an_undisturbed_one(stage: Stage, name: str) -> None:
    options = merged(OPTIONS[name], {"training": {"steps": 200}, "parallelism": {"microBatches": 1}})
    await stage.apply(tiny(name, **options))
    await stage.complete(name)
    undisturbed = await stage.saved(name)
    await stage.delete(name)

    resumed = f"{name}-killed"
    # With slow data, since a busy machine may finish the steps before the pod is deleted.
    await stage.apply(endless(resumed, **options))
    await stage.trained(resumed, 25)
    await stage.delete_pod(resumed, 1, 0)
    status = await stage.complete(resumed)
    assert [(r.cause, r.count) for r in status.restarts] == [("PodLost", 1)]
    same(await stage.saved(resumed), undisturbed)
    await stage.delete(resumed)
