"""What every board has: a stable uid, variables, links to the other boards, and rows of panels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from dashboards.source.panels import DATA_SOURCE

TAG = "meshwright"
EXPLORE = "/explore"
"""The page of the same Grafana that shows logs."""
FLEET_UID, JOB_UID, OPERATOR_UID = "meshwright-fleet", "meshwright-job", "meshwright-operator"
KEPT_VARIABLES = "var-datasource=${datasource}&${cluster:queryparam}&${__url_time_range}"
JOB_LINK = (
    f"/d/{JOB_UID}?{KEPT_VARIABLES}&var-namespace=${{__data.fields.namespace}}&var-job_name=${{__data.fields.job_name}}"
)
"""Link from a row of a table, with the columns `namespace` and `job_name`, to the Job board."""
JOB_LINK_OF_SERIES = (
    f"/d/{JOB_UID}?{KEPT_VARIABLES}"
    "&var-namespace=${__field.labels.namespace}&var-job_name=${__field.labels.job_name}"
)


@dataclass(frozen=True)
class Row:
    """A row of panels under a heading."""

    title: str
    panels: Sequence[Any]


@dataclass(frozen=True)
class Annotation:
    """Marks on the time axis of every panel.

    Attributes:
        name: beside the switch at the top of the board.
        expr: PromQL: a mark wherever it has a value.
        title: of a mark, with labels in double braces.
        color: of the marks.
    """

    name: str
    expr: str
    title: str
    color: str


def query_variable(
    name: str, label: str, description: str, query: str, *, several: bool = False
) -> dashboard.QueryVariable:
    """Return a variable with the values of a label; with `several`, any number of them and "All"."""
    variable = dashboard.QueryVariable(name).label(label).description(description).datasource(DATA_SOURCE).query(query)
    variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(models.VariableSort.ALPHABETICAL_ASC)
    if several:
        everything = models.VariableOption(text="All", value="$__all", selected=True)
        variable.multi(True).include_all(True).all_value(".*").current(everything)
    return variable


def choice_variable(name: str, label: str, description: str, values: Sequence[str]) -> dashboard.CustomVariable:
    """Return a variable with fixed values, of which the first one is the default."""
    variable = dashboard.CustomVariable(name).label(label).description(description).values(",".join(values))
    variable.options([models.VariableOption(text=v, value=v, selected=v == values[0]) for v in values])
    return variable.current(models.VariableOption(text=values[0], value=values[0], selected=True))


def logs_variables() -> list[Any]:
    """Return the variables of `logs_link`: where logs are, and in which Loki."""
    loki = dashboard.DatasourceVariable("logs_datasource").label("Logs").type("loki")
    url = dashboard.TextBoxVariable("logs_url").label("URL of logs").default_value(EXPLORE)
    url.current(models.VariableOption(text=EXPLORE, value=EXPLORE, selected=True))
    return [
        loki.description("The Loki that has the logs of worker pods."),
        url.description(
            "Page that links to logs open: Grafana's Explore, or a page of another system that understands the "
            "parameters namespace, pod, from and to."
        ),
    ]


def logs_link(pod: str) -> str:
    """Return the URL of the logs of pods, given a regular expression in which variables may be used."""
    query = f'{{namespace="${{namespace}}",pod=~"{pod}"}}'
    pane = {
        "datasource": "${logs_datasource}",
        "queries": [{"refId": "A", "expr": query, "datasource": {"type": "loki", "uid": "${logs_datasource}"}}],
        "range": {"from": "${__from}", "to": "${__to}"},
    }
    panes = quote(json.dumps({"logs": pane}, separators=(",", ":")), safe="${}:,_")
    return (
        f"${{logs_url}}?namespace=${{namespace}}&pod={quote(pod, safe='${}_.')}&from=${{__from}}&to=${{__to}}"
        f"&schemaVersion=1&orgId=1&panes={panes}"
    )


def build(
    *,
    uid: str,
    title: str,
    description: str,
    variables: Sequence[Any],
    rows: Sequence[Row],
    annotations: Sequence[Annotation] = (),
    links: Sequence[dashboard.DashboardLink] = (),
    period: str = "now-6h",
) -> dict[str, Any]:
    """Return the JSON of a board."""
    board = dashboard.Dashboard(title).uid(uid).description(description).tags([TAG]).readonly()
    board.refresh("30s").time(period, "now").timezone("browser").tooltip(models.DashboardCursorSync.CROSSHAIR)
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    board.with_variable(source.description("The Prometheus that scrapes the operator and the worker pods."))
    clusters = "label_values(ptj_build_info, cluster)"
    board.with_variable(
        query_variable("cluster", "Cluster", "Clusters, by the label `cluster`.", clusters, several=True)
    )
    for variable in variables:
        board.with_variable(variable)
    link = dashboard.DashboardLink("Meshwright").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    board.link(link.as_dropdown(True).include_vars(True).keep_time(True))
    for more in links:
        board.link(more)
    for row in rows:
        board.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            board.with_panel(panel)
    document: dict[str, Any] = _plain(board.build())
    document["annotations"] = {"list": [_annotation(annotation) for annotation in annotations]}
    return document


def _annotation(annotation: Annotation) -> dict[str, Any]:
    """An annotation of Prometheus, whose settings the library's types do not have."""
    return {
        "name": annotation.name,
        "datasource": _plain(DATA_SOURCE),
        "enable": True,
        "hide": False,
        "iconColor": annotation.color,
        "expr": annotation.expr,
        "step": "15s",
        "titleFormat": annotation.title,
        "useValueForTime": False,
    }


def _plain(value: Any) -> Any:
    return json.loads(JSONEncoder(sort_keys=True).encode(value))
