"""`stageBalance: Measured` with real ranks: a slow stage of a pipeline gets fewer layers, and losses stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.local_stack import Stage, tiny
from tests.e2e.test_memory_recovery import events_of
from tests.e2e.test_recovery import uid_of

NAME = "balance"

pytestmark = pytest.mark.long

SLOW = '''
import os, sys, time

class Slow:
    """Lets each layer of worker 1 take 20 ms longer: as much as a layer takes on a busy machine."""

    def find_spec(self, name, path=None, target=None):
        if name == "meshwright_worker.trainer.trainer":
            from meshwright_worker.models.decoder import Block
            forward = Block.forward
            def slow(*arguments, **options):
                time.sleep(0.02)
                return forward(*arguments, **options)
            Block.forward = slow
        return None

if os.environ.get("MESHWRIGHT_WORKER_INDEX") == "1":
    sys.meta_path.insert(0, Slow())
'''


def pipeline(balance: str, steps: int) -> dict[str, Any]:
    return {
        "replicas": 1,
        "model": {"layers": 8},
        "parallelism": {"tensor": 1, "pipeline": 2, "stageBalance": balance},
        "workers": {"gpusPerWorker": 1},
        "training": {"steps": steps},
        "checkpoint": {"everySteps": 50},
    }


async def test_a_slow_stage_gets_fewer_layers(stage: Stage, tmp_path: Path) -> None:
    steps = 150
    tmp_path.joinpath("sitecustomize.py").write_text(SLOW)
    slow = {"gpusPerWorker": 1, "env": [{"name": "PYTHONPATH", "value": str(tmp_path)}]}
    await stage.apply(tiny(NAME, **{**pipeline("Measured", steps), "workers": slow}))
    uid = await uid_of(stage, NAME)
    status = await stage.complete(NAME)
    assert status.plan is not None
    assert status.plan.measured_layers is not None
    assert status.plan.measured_layers[0] > 4
    assert sum(status.plan.measured_layers) == 8
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
