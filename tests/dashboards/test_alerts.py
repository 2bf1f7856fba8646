"""The alerts: their form, their pages, and with promtool when they fire and when they do not.

promtool is part of Prometheus; Debian's package is `prometheus`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from dashboards.source.alerts import ALERTS, GROUPS
from dashboards.source.rules import Alert, Group, Recording, rules_file
from tests.conflicts import ROOT
from tests.dashboards.alert_cases import CASES, LONG, Case
from tests.dashboards.boards import DECLARED, NAMES, board, selectors
from tests.metrics.checks import undeclared_references

RULES = ROOT / "dashboards" / "alerts" / "meshwright.rules.yaml"
RUNBOOKS = ROOT / "docs" / "runbooks"
SECTIONS = ["Meaning", "Impact", "Diagnosis", "Mitigation"]
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool on the PATH: it is part of Prometheus, Debian's package `prometheus`"
)
RECORDED = {rule.name for group in GROUPS for rule in group.rules if isinstance(rule, Recording)}


def rules() -> list[dict[str, Any]]:
    """All rules of the file."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_an_expression_parses_and_names_only_declared_metrics(rule: dict[str, Any]) -> None:
    promql_parser.parse(rule["expr"])
    assert undeclared_references(rule["expr"], DECLARED) == []
    for selector in selectors(rule["expr"]):
        assert str(selector.name).startswith("ptj_") or selector.name in RECORDED


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_a_runbook_names_no_pod_that_a_replacement_renames(alert: Alert) -> None:
    # The pod of rank 0 is NAME-w0-0 only until it is replaced, and many alerts follow a replacement.
    assert re.findall(r"-w\d+-\d+\b", (RUNBOOKS / f"{alert.name}.md").read_text()) == []


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_has_the_form_that_people_expect(alert: Alert) -> None:
    rule = alert.rule()
    assert re.fullmatch(r"PTJ([A-Z][A-Za-z]+)+", alert.name)
    assert rule["labels"] == {"severity": alert.severity}
    notes = rule["annotations"]
    assert "{{" not in notes["summary"]
    assert notes["summary"].endswith(".")
    assert notes["description"].endswith(".")
    assert notes["dashboard_url"].startswith("/d/meshwright-")
    assert (ROOT / notes["runbook_url"]).is_file()
    named = set(re.findall(r"\$labels\.(\w+)", str(notes)))
    assert named <= set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", alert.expr)))) | {
        "namespace", "job_name",
    }  # fmt: skip


def test_recorded_names_have_level_metric_and_operation() -> None:
    assert [name for name in RECORDED if not re.fullmatch(r"[a-z_]+:ptj_[a-z_]+:[a-z0-9_]+", name)] == []
    names = [alert.name for alert in ALERTS]
    assert len(set(names)) == len(names)


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == {alert.name for alert in ALERTS}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_a_page_says_what_to_do(alert: Alert) -> None:
    text = (RUNBOOKS / f"{alert.name}.md").read_text()
    assert text.startswith(f"# {alert.name}\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    parts = re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]
    assert all(len(part.split()) >= 12 for part in parts), "a section says too little"
    assert "```bash" in parts[2], "the diagnosis needs exact commands"
    assert undeclared_references(text, DECLARED) == []


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_a_page_names_panels_and_rows_that_exist(alert: Alert) -> None:
    titles = {panel["title"] for name in NAMES for panel in board(name)["panels"]}
    text = (RUNBOOKS / f"{alert.name}.md").read_text()
    named = {" ".join(title.split()) for title in re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", text)}
    assert named <= titles | {"Targets"}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_is_tested_with_series_that_fire_and_that_do_not(alert: Alert) -> None:
    mine = [case for case in CASES if case.alert == alert.name]
    assert {case.firing is not None for case in mine} == {True, False}


def promtool(*arguments: str) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", str(RULES))


@needs_promtool
@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_fires_when_it_should_and_only_then(alert: Alert, tmp_path: Path) -> None:
    tests = [promtool_test(case, alert) for case in CASES if case.alert == alert.name]
    file, rules = tmp_path / "test.yaml", tmp_path / "rules.yaml"
    rules.write_text(rules_file([Group("test", [*records_of(alert.expr), alert])]))
    document = {"rule_files": [rules.name], "evaluation_interval": "1m", "tests": tests}
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    promtool("test", "rules", str(file))


def records_of(expr: str) -> list[Recording]:
    """The recording rules that an expression needs, in the order of the file: the others would only take time."""
    records = [rule for group in GROUPS for rule in group.rules if isinstance(rule, Recording)]
    needed: set[str] = set()
    for record in reversed(records):
        if record.name in expr or any(record.name in other.expr for other in records if other.name in needed):
            needed.add(record.name)
    return [record for record in records if record.name in needed]


def promtool_test(case: Case, alert: Alert) -> dict[str, Any]:
    """A case in promtool's format."""
    expected = []
    if case.firing is not None:
        labels = {"severity": alert.severity, **case.firing.labels}
        notes = {**alert.rule()["annotations"], "description": case.firing.description}
        for name, value in labels.items():
            notes["dashboard_url"] = notes["dashboard_url"].replace(f"{{{{ $labels.{name} }}}}", value)
        expected = [{"exp_labels": labels, "exp_annotations": notes}]
    assert case.minute < LONG
    return {
        "name": case.what,
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
        "alert_rule_test": [{"eval_time": f"{case.minute}m", "alertname": case.alert, "exp_alerts": expected}],
    }
