"""The boards are what their code generates, name only declared metrics, and are linked with each other."""

from __future__ import annotations

import json
import re
from urllib.parse import parse_qsl

import pytest

from dashboards.source.__main__ import DIRECTORY, files
from dashboards.source.queries import HOLDS_NO_GPU, PLANNED_RESTARTS
from meshwright.api.goodput import TimeCause
from meshwright_operator.decide.restart_policy import CAUSES
from tests.dashboards.boards import DCGM, DECLARED, NAMES, annotations, board, filled, panels, selectors, targets
from tests.metrics.checks import undeclared_references


def test_the_files_are_up_to_date() -> None:
    for path, content in files().items():
        assert path.read_text() == content, f"{path.name}: run: make generate"
    assert {path for path in DIRECTORY.rglob("*.json")} <= set(files())


@pytest.mark.parametrize("name", NAMES)
def test_every_metric_of_a_query_is_declared(name: str) -> None:
    queries = [*targets(name), *annotations(name)]
    assert len(queries) > 20
    for query in queries:
        assert undeclared_references(filled(query.expr), DECLARED) == [], query
        unknown = [s.name for s in selectors(query.expr) if not str(s.name).startswith("ptj_")]
        assert [metric for metric in unknown if not DCGM.fullmatch(metric)] == [], query


@pytest.mark.parametrize("name", NAMES)
def test_a_legend_names_labels_that_the_query_keeps(name: str) -> None:
    for target in targets(name):
        for label in re.findall(r"\{\{(.*?)\}\}", filled(target.legend)):
            assert label in filled(target.expr), target
        several = " by (" in target.expr and not target.expr.startswith("histogram_quantile")
        assert target.legend or several or "joined" in target.panel or target.instant, f"{target} has no legend"


@pytest.mark.parametrize("name", NAMES)
def test_panels_lie_side_by_side(name: str) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in board(name)["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} covers {taken[x, y]}"
                taken[x, y] = panel["title"]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_panels_is_full(name: str) -> None:
    widths: dict[int, int] = {}
    for panel in panels(name):
        widths[panel["gridPos"]["y"]] = widths.get(panel["gridPos"]["y"], 0) + panel["gridPos"]["w"]
    assert set(widths.values()) == {24}, widths


def test_uids_and_tags_are_stable_and_every_board_links_to_the_others() -> None:
    assert {name: board(name)["uid"] for name in NAMES} == {name: f"meshwright-{name}" for name in NAMES}
    for name in NAMES:
        document = board(name)
        assert "id" not in document
        assert document["tags"] == ["meshwright"]
        link = document["links"][0]
        assert (link["type"], link["tags"], link["includeVars"], link["keepTime"]) == (
            "dashboards", ["meshwright"], True, True,
        )  # fmt: skip
        titles = [panel["title"] for panel in panels(name)]
        assert len(set(titles)) == len(titles)


def test_the_fleet_board_links_jobs_to_the_job_board() -> None:
    text = str(board("fleet"))
    assert text.count("/d/meshwright-job?") >= 3
    variables = {item["name"] for item in board("job")["templating"]["list"]}
    named = set(re.findall(r"var-(\w+)=", text))
    assert {"namespace", "job_name", "datasource"} <= named <= variables


def test_the_job_board_links_to_the_logs_of_the_job_and_of_each_pod() -> None:
    document = board("job")
    variables = {item["name"]: item for item in document["templating"]["list"]}
    assert (variables["logs_url"]["type"], variables["logs_url"]["query"]) == ("textbox", "/explore")
    assert (variables["logs_datasource"]["type"], variables["logs_datasource"]["query"]) == ("datasource", "loki")
    (link,) = [one for one in document["links"] if one["title"] == "Logs"]
    assert (link["type"], link["targetBlank"]) == ("link", True)
    table = next(panel for panel in panels("job") if panel["title"] == "Ranks and their pods")
    (of_pod,) = [
        property["value"][0]
        for override in table["fieldConfig"]["overrides"]
        for property in override["properties"]
        if property["id"] == "links"
    ]
    assert of_pod["title"] == "Logs of the pod"
    for url, pods in ((link["url"], "${job_name}-w[0-9]+-[0-9]+"), (of_pod["url"], "${__value.raw}")):
        assert set(re.findall(r"\$\{(\w+)\}", url)) <= {*variables, "__from", "__to"}
        page, _, query = url.partition("?")
        parameters = dict(parse_qsl(query))
        assert page == "${logs_url}"
        assert (parameters["namespace"], parameters["pod"]) == ("${namespace}", pods)
        (pane,) = json.loads(parameters["panes"]).values()
        assert pane["queries"][0]["expr"] == f'{{namespace="${{namespace}}",pod=~"{pods}"}}'
        assert pane["datasource"] == pane["queries"][0]["datasource"]["uid"] == "${logs_datasource}"


def test_the_job_board_marks_restarts_and_rescales() -> None:
    marks = {mark.panel: mark.expr for mark in annotations("job")}
    assert set(marks) == {"Failures", "Planned restarts", "Rescales"}
    assert 'cause="Rescaled"' in marks["Rescales"]


def test_the_causes_that_queries_name_exist() -> None:
    assert set(HOLDS_NO_GPU.split("|")) < {cause.value for cause in TimeCause}
    planned = {name for name, cause in CAUSES.items() if cause.restarts and not cause.is_failure}
    assert set(PLANNED_RESTARTS.split("|")) == planned
