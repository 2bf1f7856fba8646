"""Reads the generated boards: panels, queries, and what their expressions select."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import promql_parser
from promql_parser import Call, MatrixSelector, VectorSelector

from meshwright_operator.metrics.cluster_metrics import ClusterMetrics
from meshwright_operator.metrics.job_metrics import JobMetrics
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_worker.agent.metrics import WorkerMetrics
from tests.conflicts import ROOT

DIRECTORY = ROOT / "dashboards"
NAMES = ("fleet", "job", "operator")
DECLARED = (*OperatorMetrics.metrics, *ClusterMetrics.metrics, *JobMetrics.metrics, *WorkerMetrics.metrics)

VALUES: Mapping[str, str] = {
    "__rate_interval": "1m",
    "__interval": "15s",
    "__range": "1h",
    "cluster": ".*",
    "namespace": "default",
    "job_name": "train",
    "instance": ".*",
    "dcgm_namespace": "exported_namespace",
    "dcgm_pod": "exported_pod",
}
"""Values of variables, Grafana's and the boards'."""

DCGM = re.compile(r"DCGM_FI_(DEV|PROF)_[A-Z_]+")


@dataclass(frozen=True)
class Target:
    """A query of a panel."""

    board: str
    panel: str
    expr: str
    legend: str
    instant: bool

    def __str__(self) -> str:
        return f"{self.board}: {self.panel}: {self.expr}"


def board(name: str) -> dict[str, Any]:
    """A generated board."""
    document: dict[str, Any] = json.loads((DIRECTORY / f"{name}.json").read_text())
    return document


def panels(name: str) -> list[dict[str, Any]]:
    """The panels of a board, without rows."""
    return [panel for panel in board(name)["panels"] if panel["type"] != "row"]


def targets(name: str) -> list[Target]:
    """The queries of a board's panels."""
    return [
        Target(name, panel["title"], target["expr"], target.get("legendFormat", ""), target["instant"])
        for panel in panels(name)
        for target in panel["targets"]
    ]


def annotations(name: str) -> list[Target]:
    """The queries of a board's annotations."""
    found = board(name)["annotations"]["list"]
    return [Target(name, item["name"], item["expr"], item["titleFormat"], False) for item in found]


def filled(expression: str, values: Mapping[str, str] = VALUES) -> str:
    """An expression or legend with values in place of variables, as Grafana sends it."""
    for variable in sorted(values, key=len, reverse=True):
        expression = expression.replace(f"${variable}", values[variable])
    return expression


def nodes(expression: str) -> list[Any]:
    """Every node of an expression."""
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(filled(expression)), found.append)
    return found


def selectors(expression: str) -> Iterator[VectorSelector]:
    """Every selector of series in an expression."""
    for node in nodes(expression):
        if isinstance(node, MatrixSelector):
            yield node.vector_selector
        elif isinstance(node, VectorSelector):
            yield node


def windows(expression: str, *functions: str) -> list[str]:
    """The first arguments of these functions in an expression."""
    calls = [node for node in nodes(expression) if isinstance(node, Call) and node.func.name in functions]
    return [str(call.args[0]) for call in calls]
