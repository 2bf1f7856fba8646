"""What plans print for other frameworks is accepted by the frameworks' own parsers, and says the plan's degrees.

`FRAMEWORKS_PYTHON` names an interpreter with the frameworks, `MEGATRON_LM_SOURCE` and `NANOTRON_SOURCE` checkouts.
docs/frameworks.md has the versions.
"""

from __future__ import annotations

import json
import os
import subprocess
from itertools import islice
from pathlib import Path

import pytest

from meshwright.planner.frameworks.registry import TARGETS
from tests.planner.frameworks.plans import Planned, planned

PLANS = 100
SOURCES = {"megatron-lm": "MEGATRON_LM_SOURCE", "nanotron": "NANOTRON_SOURCE"}
READERS = Path(__file__).parent / "readers"


def parsed(name: str, plans: list[Planned], directory: Path) -> list[dict[str, int]]:
    """The degrees that the framework's parser finds."""
    python, source = os.environ.get("FRAMEWORKS_PYTHON"), os.environ.get(SOURCES.get(name, ""), "")
    if python is None or (name in SOURCES and not source):
        pytest.skip(f"set FRAMEWORKS_PYTHON {SOURCES.get(name, '')}")
    launches = "\n".join(
        json.dumps(
            {
                "command": one.launch.command,
                "files": dict(one.launch.files),
                "environment": dict(one.launch.environment),
                "world_size": one.plan.layout.world_size,
            }
        )
        for one in plans
    )
    result = directory / "result.json"
    reader = READERS / f"{name.replace('-', '_')}.py"
    done = subprocess.run(  # noqa: S603 - the interpreter is the tester's
        [python, str(reader), *([source] if source else [])],
        input=launches,
        text=True,
        capture_output=True,
        check=False,
        env={**os.environ, "RESULT": str(result)},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: list[dict[str, int]] = json.loads(result.read_text())
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_the_frameworks_parser_reads_the_degrees_of_the_plan(name: str, tmp_path: Path) -> None:
    plans = list(islice(planned(TARGETS[name]), PLANS))
    found = parsed(name, plans, tmp_path)
    assert len(found) == PLANS
    for one, degrees in zip(plans, found, strict=True):
        strategy, model = one.plan.strategy, one.plan.architecture
        assert model is not None
        expected = {
            "tensor": strategy.tensor,
            "pipeline": strategy.pipeline,
            "context": strategy.context,
            "data": strategy.data,
            "expert": strategy.expert,
            "zero_stage": strategy.zero_stage,
            "virtual_stages": strategy.virtual_stages if strategy.pipeline > 1 else 1,
            "micro_batch_size": strategy.micro_batch_size,
            "micro_batches": strategy.micro_batches,
            "layers": model.layers,
        }
        assert degrees == {field: expected[field] for field in degrees}, one.launch
