"""Scripts of other frameworks lose a pod and resume: every later loss is that of a run that nothing disturbs.

`FRAMEWORKS_PYTHON` names an interpreter with the frameworks. With `FRAMEWORKS_RESULTS=examples/frameworks/results.json`
the results are written down, and `python -m tests.e2e.framework_table` puts them into docs/frameworks.md.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.e2e import framework_numbers as numbers
from tests.e2e import framework_runs as runs

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
STEPS, SAVED = 40, 10


def interpreter(example: str) -> str:
    """The interpreter with the framework; skips if there is none."""
    python = os.environ.get("FRAMEWORKS_PYTHON")
    if python is None:
        pytest.skip("set FRAMEWORKS_PYTHON")
    modules = runs.MODULES[example]
    found = subprocess.run(  # noqa: S603 - the interpreter is the tester's
        [python, "-c", f"import {modules}"], capture_output=True, check=False, env={**os.environ, **runs.ENVIRONMENT}
    )
    if found.returncode != 0:
        pytest.skip(f"{python} does not have {modules}")
    return python


@pytest.mark.parametrize("case", runs.CASES, ids=lambda case: str(case.name))
async def test_an_example_loses_a_pod_and_resumes(stage, case, tmp_path):
    python, name = interpreter(case.example), case.name
    undisturbed = await runs.undisturbed(case, python, tmp_path)
    expected = runs.final_loss(undisturbed)
    await stage.apply(runs.objects(case, python, pause=1.0))
    async with numbers.History(stage, name) as history:
        await stage.trained(name, SAVED + 2, seconds=600)
        await stage.until(name, lambda status: (status.tokens_per_second or 0) > 0, "measuring its throughput")
        await stage.delete_pod(name, 1, grace_seconds=0)
        status = await stage.complete(name, seconds=900)
    output = await stage.log((await stage.pod(name, 0))["metadata"]["name"])
    resumed, loss = runs.resumed_after(output), runs.final_loss(output)
    assert 0 < resumed < STEPS, "it resumed from a checkpoint of its own"
    assert runs.what_runs(output) == case.runs
    assert numbers.losses(output) == numbers.losses(undisturbed), "the loss of every step is exact"
    assert loss == expected, "the final loss is exact"
    assert (status.step, status.total_steps) == (STEPS, STEPS)
    assert "PodLost" in {restart.cause for restart in status.restarts}
    numbers.compare(history.shown, output)
    assert status.checkpoint.step % SAVED == 0
    ranks = runs.ranks_of(case)
    runs.record(runs.Result(name, case.example, runs.pins(case.example), case.runs, ranks, resumed, expected, loss))
    await stage.delete(name)
