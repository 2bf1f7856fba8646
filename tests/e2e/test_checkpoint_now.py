"""`meshwright checkpoint now` on ranks that train: they save after their step, and train on."""

from __future__ import annotations

import pytest

from tests.e2e.local_stack import tiny
from tests.e2e.test_command_line import run

pytestmark = pytest.mark.long
NAME = "saves-now"


async def test_a_job_saves_when_it_is_asked(stage):
    await stage.apply(tiny(NAME, training={"steps": 100_000}, checkpoint={"everySteps": 90_000}))
    await stage.trained(NAME, 5)
    done = await run(stage, "checkpoint", "now", NAME, "--timeout", "10m")
    status = await stage.status(NAME)
    first = status.checkpoint_request
    assert status.checkpoint is not None
    assert (first.state, first.step) == ("Saved", status.checkpoint.step)
    assert first.step > 5
    assert f"{NAME} saved the checkpoint of step {first.step:,}" in done.out
    await stage.trained(NAME, first.step + 5)
    await run(stage, "checkpoint", "now", NAME, "--timeout", "10m")
    status = await stage.status(NAME)
    assert status.checkpoint.step == status.checkpoint_request.step > first.step + 4
    assert (status.mesh.generation, status.restart_count) == (1, 0)
    events = (await run(stage, "events", NAME)).out
    assert f"Saved the checkpoint of step {first.step} (request {first.request})" in events

    await run(stage, "suspend", NAME, "--wait", "--timeout", "10m")
    refused = await run(stage, "checkpoint", "now", NAME, "--timeout", "10m", code=1)
    assert "the job is suspended. The latest checkpoint is that of step" in refused.err
