"""Manifests of frameworks that were not run: they are valid, and the frameworks' own parsers accept what they ask for.

`FRAMEWORKS_PYTHON` names an interpreter with the frameworks, `MEGATRON_LM_SOURCE` and `NANOTRON_SOURCE` checkouts, and
`VERL_SOURCE` the directory of verl's package.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.api.labels import CHECKPOINT_MOUNT, KIND
from meshwright.api.parsing import parse_spec
from meshwright.crd.manifest_check import check_manifest
from meshwright.planner.frameworks.of_spec import target_of
from meshwright.planner.frameworks.planning import launch_of
from meshwright.planner.frameworks.target import Launch
from meshwright.planner.plan import make_plans
from tests.planner.frameworks.plans import Planned, cluster
from tests.planner.frameworks.test_parsers import READERS, parsed

DIRECTORY = Path(__file__).parents[3] / "examples" / "frameworks"
FILES = sorted(DIRECTORY.glob("*.yaml"))


def items(name: str) -> dict[str, dict[str, Any]]:
    """The objects of a manifest, by kind."""
    return {item["kind"]: item for item in yaml.safe_load_all((DIRECTORY / f"{name}.yaml").read_text())}


def world_size(spec: dict[str, Any]) -> int:
    """The ranks of a job with a command."""
    degrees = spec["parallelism"]
    ranks: int = spec["replicas"] * degrees["tensor"] * degrees["pipeline"]
    return ranks


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.stem))
def test_a_manifest_is_valid_and_says_that_it_was_not_run(path: Path) -> None:
    assert "No GPU has run this example" in path.read_text().split("\n---")[0].split("apiVersion")[0]
    found = items(path.stem)
    if KIND in found:
        assert not check_manifest(found[KIND])
        assert found[KIND]["metadata"]["name"] == path.stem
    else:
        assert {"Deployment", "Service"} == set(found)


def test_nanotrons_configuration_has_the_degrees_of_the_job() -> None:
    found = items("nanotron")
    spec, config = found[KIND]["spec"], yaml.safe_load(found["ConfigMap"]["data"]["nanotron.yaml"])
    asked = config["parallelism"]
    assert (asked["tp"], asked["pp"], asked["dp"]) == (
        spec["parallelism"]["tensor"],
        spec["parallelism"]["pipeline"],
        spec["replicas"],
    )
    assert config["checkpoints"]["checkpoints_path"] == CHECKPOINT_MOUNT
    assert asked["context_parallel_size"] == asked["expert_parallel_size"] == 1


def test_the_script_of_colossal_ai_is_python() -> None:
    compile(items("colossal-ai")["ConfigMap"]["data"]["train.py"], "train.py", "exec")


@pytest.mark.long
@pytest.mark.parametrize("name", ["megatron-lm", "torchtitan"])
def test_the_parser_accepts_the_command_with_the_flags_of_the_plan(name: str, tmp_path: Path) -> None:
    spec = parse_spec(items(name)[KIND])
    target = target_of(spec)
    assert target is not None
    plan = make_plans(spec, cluster(), max_plans=1, target=target)[0]
    assert plan.architecture is not None
    assert spec.runtime.command is not None
    planned = launch_of(spec, plan.architecture, plan.strategy, target)
    words = (*spec.runtime.command, *planned.flags)
    launch = Launch(words, environment=planned.environment)
    (degrees,) = parsed(name, [Planned(plan, launch)], tmp_path)
    assert (degrees["tensor"], degrees["pipeline"]) == (plan.strategy.tensor, plan.strategy.pipeline)


@pytest.mark.long
def test_nanotrons_parser_accepts_its_configuration(tmp_path: Path) -> None:
    found = items("nanotron")
    spec = found[KIND]["spec"]
    (degrees,) = read("nanotron", found["ConfigMap"]["data"], world_size(spec), tmp_path)
    assert (degrees["tensor"], degrees["pipeline"], degrees["zero_stage"]) == (2, 1, 1)


def read(name: str, files: dict[str, str], ranks: int, directory: Path) -> list[dict[str, Any]]:
    """What a reader finds in files, without a plan."""
    python, source = os.environ.get("FRAMEWORKS_PYTHON"), os.environ.get("NANOTRON_SOURCE")
    if python is None or source is None:
        pytest.skip("set FRAMEWORKS_PYTHON and NANOTRON_SOURCE")
    launch = {"command": [], "files": files, "environment": {}, "world_size": ranks}
    return run([python, str(READERS / f"{name}.py"), source], json.dumps(launch), directory)


@pytest.mark.long
def test_verl_composes_the_configuration_of_the_command(tmp_path: Path) -> None:
    python, source = os.environ.get("FRAMEWORKS_PYTHON"), os.environ.get("VERL_SOURCE")
    if python is None or source is None:
        pytest.skip("set FRAMEWORKS_PYTHON and VERL_SOURCE")
    spec = items("verl")[KIND]["spec"]
    program, overrides = spec["runtime"]["command"][:3], spec["runtime"]["command"][3:]
    assert program == ["python", "-m", "verl.trainer.sft_trainer"]
    paths = os.pathsep.join([str(Path(source).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    asked = run([python, str(READERS / "verl.py"), source, *overrides], "", tmp_path, PYTHONPATH=paths)
    assert asked["ranks"] == world_size(spec)
    assert asked["directory"] == CHECKPOINT_MOUNT
    assert asked["strategy"] == "fsdp2"


def run(command: list[str], given: str, directory: Path, **environment: str) -> Any:
    """The result that a reader has written."""
    result = directory / "result.json"
    done = subprocess.run(  # noqa: S603 - the interpreter is the tester's
        command,
        input=given,
        text=True,
        capture_output=True,
        check=False,
        env={**os.environ, **environment, "RESULT": str(result)},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(result.read_text())
