"""Scripts of other frameworks lose a pod and resume: the final loss is that of a run that nothing disturbed.

`FRAMEWORKS_PYTHON` names an interpreter with the frameworks. With `FRAMEWORKS_RESULTS=examples/frameworks/results.json`
the results are written down, and `python -m tests.e2e.framework_table` puts them into docs/frameworks.md.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.e2e import framework_runs as runs

pytestmark = pytest.mark.long
STEPS, SAVED = 40, 10


def interpreter(name: str) -> str:
    """The interpreter with the framework; skips if there is none."""
    python = os.environ.get("FRAMEWORKS_PYTHON")
    if python is None:
        pytest.skip("set FRAMEWORKS_PYTHON")
    found = subprocess.run([python, "-c", f"import {runs.MODULES[name]}"], capture_output=True, check=False)  # noqa: S603
    if found.returncode != 0:
        pytest.skip(f"{python} does not have {runs.MODULES[name]}")
    return python


@pytest.mark.parametrize("name", runs.NAMES)
async def test_an_example_loses_a_pod_and_resumes(stage, name, tmp_path):
    python = interpreter(name)
    expected = runs.final_loss(await runs.undisturbed(name, python, tmp_path))
    await stage.apply(runs.objects(name, python, pause=0.4))
    await stage.trained(name, SAVED + 2, seconds=600)
    await stage.until(name, lambda status: (status.tokens_per_second or 0) > 0, "measuring its throughput")
    await stage.delete_pod(name, 1, grace_seconds=0)
    status = await stage.complete(name, seconds=900)
    output = await stage.log((await stage.pod(name, 0))["metadata"]["name"])
    resumed, loss = runs.resumed_after(output), runs.final_loss(output)
    assert 0 < resumed < STEPS, "it resumed from a checkpoint of its own"
    assert loss == expected, "the final loss is exact"
    assert (status.step, status.total_steps) == (STEPS, STEPS)
    assert "PodLost" in {restart.cause for restart in status.restarts}
    assert float(status.loss) == pytest.approx(float(loss), rel=1e-3), "LOSS is the script's own number"
    assert status.checkpoint.step % SAVED == 0
    runs.record(runs.Result(name, runs.pins(name), runs.what_runs(output), resumed, expected, loss))
    await stage.delete(name)
