"""Files for contributors: templates, the workflow, hooks, and markers of typed packages."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conflicts import ROOT, repository_files
from tests.conftest import FIRST, TOGETHER

TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FORMS = [path for path in TEMPLATES if path.name != "config.yml"]


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def pyproject() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def workflow() -> Any:
    return load(ROOT / ".github" / "workflows" / "ci.yml")


def test_the_workflow_runs_what_ci_runs_everywhere() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100, ".ci/run must be executable"
    (job,) = workflow()["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert job["timeout-minutes"] <= 90


def test_the_workflow_runs_for_pushes_and_pull_requests_with_few_rights() -> None:
    document = workflow()
    assert set(document[True]) == {"push", "pull_request"}  # YAML 1.1 reads the key `on` as true
    assert document["permissions"] == {"contents": "read"}
    assert "github.ref" in document["concurrency"]["group"]


def test_actions_are_pinned_by_major_version() -> None:
    (job,) = workflow()["jobs"].values()
    actions = [step["uses"] for step in job["steps"] if "uses" in step]
    assert actions
    assert [action for action in actions if not re.fullmatch(r"actions/[a-z-]+@v\d+", action)] == []


def test_the_workflow_tests_the_oldest_python_that_is_supported() -> None:
    (job,) = workflow()["jobs"].values()
    versions = job["strategy"]["matrix"]["python-version"]
    assert all(isinstance(version, str) for version in versions), "3.10 without quotes is the number 3.1"
    assert pyproject()["project"]["requires-python"] == f">={versions[0]}"
    (setup,) = [step["with"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    assert setup["cache-dependency-path"] == "constraints.txt"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_complete(path: Path) -> None:
    form = load(path)
    assert {"name", "description", "body"} <= form.keys()
    fields = [entry for entry in form["body"] if entry["type"] != "markdown"]
    assert len({entry["id"] for entry in fields}) == len(fields)
    assert all(entry["attributes"]["label"] for entry in fields)
    assert any(entry.get("validations", {}).get("required") for entry in fields)


def test_issues_start_from_a_form() -> None:
    assert {path.stem for path in FORMS} == {"bug", "feature"}
    assert load(ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml")["blank_issues_enabled"] is False


def test_a_bug_report_asks_for_what_a_diagnosis_needs() -> None:
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8")
    for fact in ("meshwright version", "kubectl get ptj NAME -o yaml", "kubectl describe ptj", "kubectl logs"):
        assert fact in text


def test_hooks_run_what_lint_runs_without_network() -> None:
    (repo,) = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"
    assert {hook["language"] for hook in repo["hooks"]} == {"system"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition("\nlint:")[2].partition("\n\n")[0].splitlines()[1:]
    commands = [re.sub(r" (--check|--force-exclude|\.)(?= |$)", "", line) for line in recipe]
    assert [command.strip().replace("$(VENV)", ".venv") for command in commands] == [
        hook["entry"].removesuffix(" --force-exclude") for hook in repo["hooks"]
    ]


def test_bytecode_is_kept_whatever_the_environment_says() -> None:
    command = ["make", "-s", "--eval", 'shown: ; @echo "[$$PYTHONDONTWRITEBYTECODE]"', "shown"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    assert subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout == "[]\n"


def test_what_begins_first_is_there() -> None:
    groups = {*TOGETHER.values(), f"{TOGETHER['e2e']} 2"}
    assert [name for name in FIRST if name not in groups and not (ROOT / name).is_file()] == []


def test_every_package_of_the_wheel_is_marked_as_typed() -> None:
    files = repository_files()
    for directory in (".", "cli", "local", "operator", "worker"):
        project = tomllib.loads((ROOT / directory / "pyproject.toml").read_text(encoding="utf-8"))
        packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
        assert packages, directory
        assert [package for package in packages if ROOT / directory / package / "py.typed" not in files] == []


def test_every_distribution_has_one_version_and_needs_the_core_of_it() -> None:
    version = pyproject()["project"]["version"]
    for directory in ("cli", "local", "operator", "worker"):
        project = tomllib.loads((ROOT / directory / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert project["version"] == version, directory
        core = [need for need in project["dependencies"] if need.startswith("meshwright")]
        assert core, directory
        assert all(need.endswith(f"=={version}") for need in core), directory


@pytest.mark.parametrize("directory", ["operator", "worker"])
def test_an_image_installs_only_its_package(directory: str) -> None:
    text = (ROOT / directory / "Dockerfile").read_text(encoding="utf-8")
    copied = [line.split()[1] for line in text.splitlines() if line.startswith("COPY ") and "--from" not in line]
    assert copied == ["pyproject.toml", "meshwright", directory]
    assert "rm -" not in text.replace("rm -rf /var/lib/apt/lists/*", "")


def test_the_worker_image_has_a_compiler_and_the_libraries_of_rdma() -> None:
    text = (ROOT / "worker" / "Dockerfile").read_text(encoding="utf-8")
    final_stage = text.rpartition("\nFROM ")[2]
    assert {"g++", "gcc", "libc6-dev", "libibverbs1", "ibverbs-providers", "librdmacm1"} <= set(final_stage.split())
    assert final_stage.index("apt-get") < final_stage.index("USER ")


def test_the_worker_image_has_the_package_of_s3() -> None:
    text = (ROOT / "worker" / "Dockerfile").read_text(encoding="utf-8")
    assert "'./worker[s3]'" in text
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert all(f"\n{name}==" in pinned for name in ("s3fs", "aiobotocore", "botocore"))


@pytest.mark.long
@pytest.mark.parametrize("dockerfile", ["operator/Dockerfile", "worker/Dockerfile", "worker/agent.Dockerfile"])
def test_the_constraints_allow_what_an_image_installs(dockerfile: str) -> None:
    """pip finds versions; nothing is installed."""
    text = (ROOT / dockerfile).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"pip install ([^&\n]*)", text)
    assert commands
    for command in commands:
        arguments = [word for word in shlex.split(command) if word != "--no-cache-dir"]
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", *arguments]
        done = subprocess.run(pip, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_security_policy_says_how_to_report_and_what_is_supported() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "Report a vulnerability" in text
    assert "## Supported versions" in text
    assert "(docs/security.md)" in text
