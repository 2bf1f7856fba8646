"""Panels with the conventions of all boards: a description, a unit, the variable data source, and one look.

Colors have a meaning: green is time or ranks that train, red is lost, orange needs attention, blue is neutral.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

DATA_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
GREEN, RED, ORANGE, BLUE, GREY = "green", "red", "orange", "blue", "text"

CAUSE_COLORS = {
    "Training": GREEN,
    "Queued": "light-blue",
    "Suspended": "#7f7f7f",
    "Starting": BLUE,
    "Rescaling": "purple",
    "CheckpointStall": "yellow",
    "RedoneSteps": "light-orange",
    "Detecting": "light-red",
    "Restarting": RED,
}
"""Colors of the causes of a job's time, on every board."""


@dataclass(frozen=True)
class Query:
    """A query of a panel.

    Attributes:
        expr: PromQL.
        legend: name of each series, with labels in double braces.
        instant: take only the value at the end of the time range.
    """

    expr: str
    legend: str = ""
    instant: bool = False


@dataclass(frozen=True)
class Step:
    """A color from a value on."""

    value: float
    color: str


class _Builder(Protocol):
    """What every builder of a panel has."""

    def title(self, title: str) -> Any: ...
    def description(self, description: str) -> Any: ...
    def datasource(self, datasource: models.DataSourceRef) -> Any: ...
    def with_target(self, target: Any) -> Any: ...
    def unit(self, unit: str) -> Any: ...
    def span(self, w: int) -> Any: ...
    def height(self, h: int) -> Any: ...


def time_series(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    span: int = 12,
    height: int = 8,
    stacked: bool = False,
    colors: Mapping[str, str] | None = None,
    minimum: float | None = 0,
    maximum: float | None = None,
    log: bool = False,
) -> timeseries.Panel:
    """Return a panel with lines over time, or with stacked areas."""
    panel = timeseries.Panel()
    _common(panel, title, description, unit, queries, span, height)
    table_legend = common.VizLegendOptions().display_mode(common_models.LegendDisplayMode.LIST)
    panel.legend(table_legend.placement(common_models.LegendPlacement.BOTTOM).show_legend(True))
    panel.tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    panel.line_width(1).show_points(common_models.VisibilityMode.NEVER)
    if minimum is not None and not log:
        panel.min(minimum)
    if maximum is not None:
        panel.max(maximum)
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL)).fill_opacity(60).line_width(0)
    if log:
        scale = common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(10)
        panel.scale_distribution(scale)
    for name, color in (colors or {}).items():
        panel.override_by_name(name, [_fixed_color(color)])
    return panel


def single_stat(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    span: int = 4,
    height: int = 4,
    steps: Sequence[Step] = (),
    base: str = GREY,
    decimals: int | None = None,
    names: bool = False,
) -> stat.Panel:
    """Return a panel with the present value of each series, colored by thresholds; with `names`, beside its name.

    The queries are instant ones: the last value of a time range may be that of a series that has ended.
    """
    panel = stat.Panel()
    _common(panel, title, description, unit, [replace(query, instant=True) for query in queries], span, height)
    panel.thresholds(_thresholds(base, steps))
    panel.graph_mode(common_models.BigValueGraphMode.NONE)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    mode = common_models.BigValueTextMode
    panel.text_mode(mode.VALUE_AND_NAME if names else mode.VALUE)
    if decimals is not None:
        panel.decimals(decimals)
    return panel


def bars(
    title: str,
    description: str,
    unit: str,
    query: Query,
    span: int = 12,
    height: int = 8,
    steps: Sequence[Step] = (),
    base: str = BLUE,
    link: str = "",
    colors: Mapping[str, str] | None = None,
    maximum: float | None = None,
) -> bargauge.Panel:
    """Return a panel with one horizontal bar for each series."""
    panel = bargauge.Panel()
    _common(panel, title, description, unit, [query], span, height)
    panel.orientation(common_models.VizOrientation.HORIZONTAL).display_mode(common_models.BarGaugeDisplayMode.BASIC)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel.thresholds(_thresholds(base, steps)).min(0)
    if maximum is not None:
        panel.max(maximum)
    if link:
        panel.data_links([dashboard.DashboardLink("Open the job").url(link)])
    for name, color in (colors or {}).items():
        panel.override_by_name(name, [_fixed_color(color)])
    return panel


def heat_map(
    title: str,
    description: str,
    unit: str,
    query: Query,
    span: int = 24,
    height: int = 10,
    scheme: str = "RdYlGn",
    minimum: float | None = None,
    maximum: float | None = None,
) -> heatmap.Panel:
    """Return a heat map with one row for each series: the color is its value."""
    panel = heatmap.Panel()
    _common(panel, title, description, unit, [query], span, height)
    color = heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme(scheme).steps(64)
    color.reverse(True)
    if minimum is not None:
        color.min(minimum)
    if maximum is not None:
        color.max(maximum)
    panel.calculate(False).color(color).cell_values(heatmap.CellValues().unit(unit)).cell_gap(0)
    panel.y_axis(heatmap.YAxisConfig().unit("none").reverse(True)).show_legend()
    panel.filter_values(heatmap.FilterValueRange().le(-1e9))
    return panel


def histogram_over_time(
    title: str, description: str, unit: str, expr: str, span: int = 12, height: int = 8
) -> heatmap.Panel:
    """Return a heat map of a histogram's buckets: the color is the number of observations."""
    panel = heatmap.Panel()
    panel.title(title).description(description).datasource(DATA_SOURCE).unit("short").span(span).height(height)
    panel.with_target(_target(Query(expr, "{{le}}"), "A").format(prometheus_models.PromQueryFormat.HEATMAP))
    panel.calculate(False).color(
        heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme("Blues").steps(64)
    )
    panel.y_axis(heatmap.YAxisConfig().unit(unit)).show_legend()
    return panel


def state_timeline(
    title: str,
    description: str,
    *queries: Query,
    states: Mapping[str, tuple[str, str]],
    alarming: str = "",
    span: int = 24,
    height: int = 8,
) -> statetimeline.Panel:
    """Return a state timeline.

    Args:
        title: of the panel.
        description: of the panel.
        queries: one row for each of their series.
        states: value to its text and color.
        alarming: regular expression of the series for which the value 1 is bad.
        span: width.
        height: height.
    """
    panel = statetimeline.Panel()
    _common(panel, title, description, "short", queries, span, height)
    panel.mappings([_mapping(states)]).merge_values(True).row_height(0.8).fill_opacity(80).line_width(0)
    panel.show_value(common_models.VisibilityMode.AUTO)
    panel.legend(common.VizLegendOptions().show_legend(False))
    if alarming:
        worse = {**states, "1": (states["1"][0], RED)}
        panel.override_by_regexp(alarming, [models.DynamicConfigValue(id_val="mappings", value=[_mapping(worse)])])
    return panel


@dataclass(frozen=True)
class Column:
    """A column of a table: the title, and the unit of a value.

    Attributes:
        source: name of the label, or the reference of the query, such as `A`, whose value it shows.
        title: heading.
        unit: of a value. Empty for a label.
        link: URL of a link in the cells.
        link_title: what the link does.
    """

    source: str
    title: str
    unit: str = ""
    link: str = ""
    link_title: str = "Open the job"


def joined_table(
    title: str, description: str, queries: Sequence[str], columns: Sequence[Column], span: int = 24, height: int = 9
) -> table.Panel:
    """Return a table with one row for each set of labels, and one column for each query's value."""
    panel = table.Panel()
    _common(panel, title, description, "short", [], span, height)
    for number, expr in enumerate(queries):
        target = _target(Query(expr, instant=True), chr(ord("A") + number))
        panel.with_target(target.format(prometheus_models.PromQueryFormat.TABLE))
    field = {
        column.source: column.source if len(column.source) > 1 else f"Value #{column.source}" for column in columns
    }
    if len(queries) == 1:
        field = {source: "Value" if name == "Value #A" else name for source, name in field.items()}
    keep = {"names": list(field.values())}
    panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    panel.with_transformation(models.DataTransformerConfig(id_val="filterFieldsByName", options={"include": keep}))
    organize = {
        "indexByName": {field[column.source]: index for index, column in enumerate(columns)},
        "renameByName": {field[column.source]: column.title for column in columns},
    }
    panel.with_transformation(models.DataTransformerConfig(id_val="organize", options=organize))
    for column in columns:
        properties = [models.DynamicConfigValue(id_val="unit", value=column.unit)] if column.unit else []
        if column.link:
            links = [{"title": column.link_title, "url": column.link}]
            properties.append(models.DynamicConfigValue(id_val="links", value=links))
        if properties:
            panel.override_by_name(column.title, properties)
    return panel


def _common(
    panel: _Builder, title: str, description: str, unit: str, queries: Sequence[Query], span: int, height: int
) -> None:
    panel.title(title)
    panel.description(description)
    panel.datasource(DATA_SOURCE)
    panel.unit(unit)
    panel.span(span)
    panel.height(height)
    for number, query in enumerate(queries):
        panel.with_target(_target(query, chr(ord("A") + number)))


def _target(query: Query, reference: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).ref_id(reference).datasource(DATA_SOURCE)
    if query.legend:
        target.legend_format(query.legend)
    return target.instant() if query.instant else target.range()


def _fixed_color(color: str) -> models.DynamicConfigValue:
    return models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": color})


def _thresholds(base: str, steps: Sequence[Step]) -> dashboard.ThresholdsConfig:
    all_steps = [models.Threshold(value=None, color=base), *(models.Threshold(s.value, s.color) for s in steps)]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(all_steps)


def _mapping(states: Mapping[str, tuple[str, str]]) -> models.ValueMap:
    results = {
        value: models.ValueMappingResult(text=text, color=color, index=index)
        for index, (value, (text, color)) in enumerate(states.items())
    }
    return models.ValueMap(options=results)
