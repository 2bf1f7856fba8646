"""The examples of other frameworks: valid manifests, pinned versions, and the page's table as the test wrote it."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from meshwright.api.labels import KIND, SCRIPTS_MOUNT
from meshwright.crd.manifest_check import check_manifest
from meshwright_cli.main import main
from tests.e2e import framework_table
from tests.e2e.framework_numbers import Shown, compare
from tests.e2e.framework_runs import CASES, DIRECTORY, MODULES, NAMES, pins
from tests.e2e.test_torchft_example import EXAMPLE as TORCHFT


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_complete(name: str) -> None:
    items = list(yaml.safe_load_all((DIRECTORY / name / "job.yaml").read_text()))
    jobs = [item for item in items if item["kind"] == KIND]
    claims = [item["metadata"]["name"] for item in items if item["kind"] == "PersistentVolumeClaim"]
    customization = yaml.safe_load((DIRECTORY / name / "kustomization.yaml").read_text())
    assert jobs
    for job in jobs:
        assert not check_manifest(job)
        runtime = {"command": ["python", f"{SCRIPTS_MOUNT}/train.py"], "scripts": name}
        assert job["spec"]["runtime"] == {**runtime, **({"framework": "TorchFT"} if name == "torchft" else {})}
        assert claims == ([job["spec"]["checkpoint"]["claimName"]] if "checkpoint" in job["spec"] else [])
    assert customization["configMapGenerator"] == [{"name": name, "files": ["train.py"]}]
    tree = ast.parse((DIRECTORY / name / "train.py").read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [module for module in imported if module.startswith("meshwright")]
    assert any(isinstance(node, ast.Assert) for node in ast.walk(tree)), "it says what really runs"
    assert all("==" in pin for pin in pins(name))
    assert name in MODULES
    assert name in {TORCHFT, *(case.example for case in CASES)}


def test_the_table_is_what_the_test_has_written() -> None:
    text = framework_table.PAGE.read_text()
    assert framework_table.page(text) == text, "run python -m tests.e2e.framework_table"
    for result in json.loads(framework_table.RESULTS.read_text()).values():
        assert result["versions"] == pins(result["example"]), "the results are of other versions: run the test again"
        assert result["loss"] == result["undisturbed_loss"]


@pytest.mark.parametrize("path", [DIRECTORY / f"{name}.yaml" for name in ("megatron-lm", "torchtitan")], ids=str)
def test_manifests_with_a_framework_are_planned(path: Path) -> None:
    result = CliRunner().invoke(main, ["plan", "-f", str(path), "-o", "json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["estimate"]["stepSeconds"] > 0


SCRIPT = "".join(
    f'[rank 0] {{"step": {step}, "total_steps": 40, "loss": {1 / step}, "tokens": 100, "time": {0.5 * step}}}\n'
    for step in range(1, 21)
)
SHOWN = [Shown(step, 40, f"{1 / step:.6g}", 200, (40 - step) // 2) for step in (8, 20)]


def test_numbers_of_the_status_are_compared_with_those_of_the_script() -> None:
    compare(SHOWN, f"runs X, resumed after step 0\n{SCRIPT}")


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": 21},
        {"loss": "0.126"},
        {"total_steps": 41},
        {"eta_seconds": 12},
        {"tokens_per_second": 100},
        {"tokens_per_second": 300, "eta_seconds": 10},
    ],
    ids=str,
)
def test_another_number_in_the_status_is_found(wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        compare([replace(one, **wrong) for one in SHOWN], f"runs X, resumed after step 0\n{SCRIPT}")
