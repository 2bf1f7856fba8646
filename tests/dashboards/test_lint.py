"""The rules of dashboard-linter, by their names there, and the exclusions in dashboards/.lint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from promql_parser import MatrixSelector

from tests.dashboards.boards import DIRECTORY, NAMES, board, nodes, selectors, targets, windows

Found = Iterator[tuple[str, str]]
"""Panel (empty for the entire board) and what is wrong."""

UNITS = {
    "short", "none", "sci", "percentunit", "bool_yes_no", "s", "h", "bytes", "hertz", "watt", "celsius", "cps", "reqps",
    "Bps", "flops",
}  # fmt: skip
"""Grafana's units that the boards use."""
BEYOND_PROMQL = {"heatmap"}


def variables(name: str) -> dict[str, dict[str, Any]]:
    return {variable["name"]: variable for variable in board(name)["templating"]["list"]}


def template_datasource(name: str) -> Found:
    variable = variables(name).get("datasource")
    if variable is None or (variable["type"], variable["query"]) != ("datasource", "prometheus"):
        yield "", "needs the variable `datasource` of the type prometheus"


def template_label(label: str) -> Callable[[str], Found]:
    def rule(name: str) -> Found:
        variable = variables(name).get(label)
        if variable is None:
            yield "", f"needs the variable `{label}`"
        elif not (variable["multi"] and variable["includeAll"] and variable["allValue"] == ".*"):
            yield "", f"variable `{label}`: several values and all of them must be possible"

    return rule


def template_on_time_change_reload(name: str) -> Found:
    for variable in variables(name).values():
        if variable["type"] == "query" and variable["refresh"] != 2:
            yield "", f"variable `{variable['name']}` must be loaded again when the time range changes"


def panel_datasource(name: str) -> Found:
    for panel in board(name)["panels"]:
        sources = [panel["datasource"], *(t["datasource"] for t in panel["targets"])] if panel["type"] != "row" else []
        if any(source["uid"] != "${datasource}" for source in sources):
            yield panel["title"], "must use the variable `datasource`"


def panel_title_description(name: str) -> Found:
    for panel in board(name)["panels"]:
        if panel["type"] != "row" and not (panel["title"] and panel["description"]):
            yield panel["title"], "needs a title and a description"


def panel_units(name: str) -> Found:
    for panel in board(name)["panels"]:
        if panel["type"] != "row" and panel["fieldConfig"]["defaults"].get("unit") not in UNITS:
            yield panel["title"], "needs a unit of Grafana"


def panel_no_targets(name: str) -> Found:
    for panel in board(name)["panels"]:
        if panel["type"] != "row" and not panel["targets"]:
            yield panel["title"], "has no query"


def target_promql(name: str) -> Found:
    for target in targets(name):
        try:
            nodes(target.expr)
        except ValueError as error:
            yield target.panel, str(error)


def target_rate_interval(name: str) -> Found:
    for target in targets(name):
        if any(not text.endswith("[1m]") for text in windows(target.expr, "rate", "irate")):
            yield target.panel, "rate() must use $__rate_interval"


def target_label(label: str) -> Callable[[str], Found]:
    def rule(name: str) -> Found:
        for target in targets(name):
            for selector in selectors(target.expr):
                if label not in {matcher.name for matcher in selector.matchers.matchers}:
                    yield target.panel, f"`{selector}` needs a matcher of `{label}`"

    return rule


def target_counter_agg(name: str) -> Found:
    for target in targets(name):
        counted = {str(node.vector_selector) for node in nodes(target.expr) if isinstance(node, MatrixSelector)}
        for selector in selectors(target.expr):
            counter = str(selector.name).endswith(("_total", "_bucket", "_sum", "_count"))
            if counter and str(selector) not in counted:
                yield target.panel, f"counter `{selector.name}` without rate or increase"


def uneditable_dashboard(name: str) -> Found:
    if board(name)["editable"]:
        yield "", "must have editable: false"


RULES: dict[str, Callable[[str], Found]] = {
    "template-datasource-rule": template_datasource,
    "template-job-rule": template_label("job"),
    "template-instance-rule": template_label("instance"),
    "template-label-cluster-rule": template_label("cluster"),
    "template-on-time-change-reload-rule": template_on_time_change_reload,
    "panel-datasource-rule": panel_datasource,
    "panel-title-description-rule": panel_title_description,
    "panel-units-rule": panel_units,
    "panel-no-targets-rule": panel_no_targets,
    "target-promql-rule": target_promql,
    "target-rate-interval-rule": target_rate_interval,
    "target-job-rule": target_label("job"),
    "target-instance-rule": target_label("instance"),
    "target-cluster-rule": target_label("cluster"),
    "target-counter-agg-rule": target_counter_agg,
    "uneditable-dashboard": uneditable_dashboard,
}


def exclusions() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((DIRECTORY / ".lint").read_text())["exclusions"]
    return found


def excluded(rule: str, title: str, panel: str) -> bool:
    entry = exclusions().get(rule)
    if entry is None:
        return False
    places = entry.get("entries")
    return places is None or any(place["dashboard"] == title and place.get("panel", panel) == panel for place in places)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", RULES)
def test_a_board_follows_the_rule(rule: str, name: str) -> None:
    title = board(name)["title"]
    assert [found for found in RULES[rule](name) if not excluded(rule, title, found[0])] == []


def test_every_exclusion_has_a_reason_and_is_needed() -> None:
    titles = {board(name)["title"]: name for name in NAMES}
    for rule, entry in exclusions().items():
        assert entry["reason"].endswith(".")
        for place in entry.get("entries", [{"dashboard": title} for title in titles]):
            found = {panel for panel, _ in RULES[rule](titles[place["dashboard"]])}
            assert place.get("panel", next(iter(found), None)) in found, (rule, place)


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("template-datasource-rule", lambda b: b["templating"]["list"].pop(0)),
        ("template-label-cluster-rule", lambda b: b["templating"]["list"][1].update(multi=False)),
        ("template-instance-rule", lambda b: b["templating"]["list"].pop()),
        ("template-on-time-change-reload-rule", lambda b: b["templating"]["list"][2].update(refresh=1)),
        ("panel-datasource-rule", lambda b: b["panels"][1]["targets"][0].update(datasource={"uid": "mine"})),
        ("panel-title-description-rule", lambda b: b["panels"][1].update(description="")),
        ("panel-units-rule", lambda b: b["panels"][1]["fieldConfig"]["defaults"].pop("unit")),
        ("panel-no-targets-rule", lambda b: b["panels"][1]["targets"].clear()),
        ("target-promql-rule", lambda b: b["panels"][1]["targets"][0].update(expr="sum(")),
        ("target-rate-interval-rule", lambda b: b["panels"][1]["targets"][0].update(expr="rate(ptj_leader[5m])")),
        ("target-cluster-rule", lambda b: b["panels"][1]["targets"][0].update(expr="ptj_leader")),
        ("target-instance-rule", lambda b: b["panels"][1]["targets"][0].update(expr="ptj_leader")),
        ("target-counter-agg-rule", lambda b: b["panels"][1]["targets"][0].update(expr="ptj_events_total")),
        ("uneditable-dashboard", lambda b: b.update(editable=True)),
    ],
)
def test_a_rule_finds_what_it_is_for(monkeypatch: pytest.MonkeyPatch, rule: str, change: Any) -> None:
    document = board("operator")
    change(document)
    for module in ("tests.dashboards.boards", "tests.dashboards.test_lint"):
        monkeypatch.setattr(f"{module}.board", lambda name: document)
    assert list(RULES[rule]("operator"))
