"""The examples of other frameworks: valid manifests, pinned versions, and the page's table as the test wrote it."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from meshwright.api.labels import KIND, SCRIPTS_MOUNT
from meshwright.crd.manifest_check import check_manifest
from meshwright_cli.main import main
from tests.e2e import framework_table
from tests.e2e.framework_runs import DIRECTORY, MODULES, NAMES, pins


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_complete(name: str) -> None:
    items = {item["kind"]: item for item in yaml.safe_load_all((DIRECTORY / name / "job.yaml").read_text())}
    job, customization = items[KIND], yaml.safe_load((DIRECTORY / name / "kustomization.yaml").read_text())
    assert not check_manifest(job)
    assert job["spec"]["runtime"]["command"] == ["python", f"{SCRIPTS_MOUNT}/train.py"]
    assert customization["configMapGenerator"] == [{"name": job["spec"]["runtime"]["scripts"], "files": ["train.py"]}]
    assert job["spec"]["checkpoint"]["claimName"] == items["PersistentVolumeClaim"]["metadata"]["name"] == name
    tree = ast.parse((DIRECTORY / name / "train.py").read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [module for module in imported if module.startswith("meshwright")]
    assert any(isinstance(node, ast.Assert) for node in ast.walk(tree)), "it says what really runs"
    assert all("==" in pin for pin in pins(name))
    assert name in MODULES


def test_the_table_is_what_the_test_has_written() -> None:
    text = framework_table.PAGE.read_text()
    assert framework_table.page(text) == text, "run python -m tests.e2e.framework_table"
    for name, result in json.loads(framework_table.RESULTS.read_text()).items():
        assert result["versions"] == pins(name), "the results are of other versions: run the test again"
        assert result["loss"] == result["undisturbed_loss"]


@pytest.mark.parametrize("path", sorted(DIRECTORY.glob("*.yaml")), ids=lambda path: str(path.name))
def test_manifests_with_a_framework_are_planned(path: Path) -> None:
    result = CliRunner().invoke(main, ["plan", "-f", str(path), "-o", "json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["estimate"]["stepSeconds"] > 0
