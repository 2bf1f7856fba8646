"""A job that retains its best checkpoint: status and the command line say which one it is, and export it."""

from __future__ import annotations

import json

import pytest

from tests.e2e.local_stack import tiny
from tests.e2e.test_command_line import run

pytestmark = pytest.mark.long
NAME = "best"


async def test_the_best_checkpoint_is_shown_and_exported(stage, tmp_path):
    """Its learning rate is far too high: the model gets worse, and the last checkpoint is not the best."""
    await stage.apply(
        tiny(
            NAME,
            replicas=1,
            workers={"gpusPerWorker": 1},
            parallelism={"tensor": 1, "pipeline": 1, "microBatches": 1},
            data={"heldOut": 0.1},
            training={
                "steps": 12,
                "evaluation": {"everySteps": 2, "samples": 4},
                "optimizer": {"learningRate": 5.0, "warmupSteps": 4},
            },
            checkpoint={"everySteps": 12, "keep": 1, "keepBest": 1},
        )
    )
    status = await stage.complete(NAME)
    (tier,) = status.checkpoint_tiers
    assert tier.best_step is not None
    assert tier.best_step < 12
    entries = json.loads((await run(stage, "checkpoint", "list", NAME, "-o", "json")).out)
    assert [(one["step"], one["best"]) for one in entries] == [(12, False), (tier.best_step, True)]
    best = entries[1]["evaluation_loss"]
    assert best < entries[0]["evaluation_loss"]
    assert f"{best:.6g}" == tier.best_loss
    shown = (await run(stage, "checkpoint", "list", NAME)).out
    assert f"{best:.6g} (best)" in shown
    assert f"step {tier.best_step}, evaluation loss {best:.6g}" in (await run(stage, "status", NAME)).out

    target = tmp_path / "model"
    done = await run(stage, "export", NAME, "--best", "-d", str(target))
    assert f"step {tier.best_step}: " in done.out
    assert json.loads((target / "meshwright-lineage.json").read_text())["step"] == tier.best_step
    copied = await run(stage, "checkpoint", "copy", NAME, str(tmp_path / "copies"), "--best")
    assert f"copied the checkpoint of step {tier.best_step}" in copied.out
    assert (await run(stage, "generate", NAME, "--best", "--tokens", "3")).out
