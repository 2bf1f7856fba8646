"""Draws the boards with the data of a real run, for people who look at them where no Grafana is.

    MESHWRIGHT_BOARDS_DATA=data python -m pytest -m long tests/e2e/test_dashboards.py
    python -m tests.dashboards.pictures data pages

It reads the boards and the answers of Prometheus, and writes one self-contained page for each board. Titles, order,
sizes, units, colors and legends are the boards'; the drawing is much simpler than Grafana's.
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.dashboards.boards import NAMES, board

Series = dict[str, Any]

PALETTE = ("#3274d9", "#e0812c", "#37872d", "#8f3bb8", "#c4162a", "#1f8a8a", "#b58900", "#6e6e6e", "#d16ba5", "#5c7080")
NAMED = {
    "green": "#37872d", "red": "#c4162a", "light-red": "#e8707c", "orange": "#e0812c", "light-orange": "#f2b482",
    "blue": "#3274d9", "light-blue": "#8ab8ff", "purple": "#8f3bb8", "yellow": "#d9b400", "text": "#52595f",
}  # fmt: skip
MARKS: list[tuple[float, str]] = []
"""Time and color of the annotations of the board that is drawn."""
STEPS = ("", "k", "M", "G", "T")
CELL, WIDTH = 34, 1600
STYLE = f"""
body{{font:12px system-ui,sans-serif;background:#f4f5f6;color:#22252b;margin:12px;width:{WIDTH}px}}
h1{{font-size:18px}} .grid{{display:grid;grid-template-columns:repeat(24,1fr);grid-auto-rows:{CELL}px;gap:6px}}
.panel{{background:#fff;border:1px solid #d5d8dc;border-radius:3px;padding:4px 6px;overflow:hidden;display:flex;
flex-direction:column}} .panel b{{font-weight:600}} .row{{font-weight:700;font-size:14px;align-self:end}}
.body{{flex:1;min-height:0;overflow:hidden}} .legend{{font-size:10px;white-space:nowrap;overflow:hidden}}
.legend i{{display:inline-block;width:10px;height:3px;margin:0 3px 2px 8px}} .none{{color:#c4162a;font-weight:700}}
.stat{{display:flex;gap:14px;align-items:center;height:100%;font-size:24px;justify-content:center}}
.stat small{{display:block;font-size:10px;color:#52595f}} table{{border-collapse:collapse;width:100%}}
td,th{{text-align:left;border-bottom:1px solid #e3e5e8;padding:2px 6px}}
.bar{{height:14px;margin:2px 0;position:relative}}
.bar span{{position:absolute;left:4px;white-space:nowrap;font-size:10px}}
"""


def number(value: float, unit: str) -> str:
    """A value as Grafana would write it, roughly."""
    if unit == "percentunit":
        return f"{value:.1%}"
    if unit == "bool_yes_no":
        return "Yes" if value else "No"
    if unit == "s":
        for size, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
            if abs(value) >= size:
                return f"{value / size:.3g} {name}"
        return f"{value * 1000:.3g} ms"
    if unit in ("none", "sci"):
        return f"{value:.6g}"
    power = 0
    while abs(value) >= 1000 and power < len(STEPS) - 1:
        value, power = value / 1000, power + 1
    suffix = {"bytes": "B", "watt": "W", "celsius": "°C", "hertz": "Hz", "flops": "FLOP/s", "h": "h"}.get(unit, "")
    return f"{value:.3g} {STEPS[power]}{suffix}".strip()


def name_of(series: Series, legend: str) -> str:
    """The legend of a series."""
    labels = series["labels"]
    legend = legend.replace("$dcgm_pod", "exported_pod")
    return re.sub(r"\{\{(.*?)\}\}", lambda match: labels.get(match[1], ""), legend) or str(labels)


def color_of(panel: dict[str, Any], name: str, index: int) -> str:
    """The color of a series: the override by its name, or the next of the palette."""
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"]["options"] == name:
            for item in override["properties"]:
                if item["id"] == "color":
                    fixed = str(item["value"]["fixedColor"])
                    return NAMED.get(fixed, fixed)
    return PALETTE[index % len(PALETTE)]


def threshold_color(panel: dict[str, Any], value: float) -> str:
    """The color of a value by the panel's thresholds."""
    color = "text"
    for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            color = step["color"]
    return NAMED.get(color, color)


def lines(panel: dict[str, Any], found: list[tuple[str, Series]], span: tuple[float, float], unit: str) -> str:
    """Lines over time, or stacked areas, with marks for restarts and rescales."""
    defaults = panel["fieldConfig"]["defaults"]
    stacked = defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal"
    times = sorted({time for _, series in found for time, _ in series["values"]})
    below = dict.fromkeys(times, 0.0)
    shapes, legend = [], []
    drawn: list[tuple[list[tuple[float, float]], list[tuple[float, float]], str]] = []
    for index, (name, series) in enumerate(found):
        values = dict(map(tuple, series["values"]))
        base = [(time, below[time]) for time in times if time in values] if stacked else []
        top = [(time, values[time] + (below[time] if stacked else 0)) for time in times if time in values]
        if stacked:
            below.update(dict(top))
        color = color_of(panel, name, index)
        drawn.append((top, base, color))
        last = number(series["values"][-1][1], unit)
        legend.append(f"<i style='background:{color}'></i>{html.escape(name)}: {last}")
    low = defaults.get("min", min(value for top, _, _ in drawn for _, value in top))
    high = max([value for top, _, _ in drawn for _, value in top] + [low + 1e-9])
    high = max(high, defaults.get("max", high))

    def points(pairs: Sequence[tuple[float, float]]) -> str:
        width = (span[1] - span[0]) or 1
        return " ".join(
            f"{(t - span[0]) / width * 1000:.1f},{100 - (v - low) / (high - low) * 98:.2f}" for t, v in pairs
        )

    for top, base, color in drawn:
        if stacked:
            shapes.append(f"<polygon points='{points(top)} {points(base[::-1])}' fill='{color}' opacity='.75'/>")
        else:
            shapes.append(f"<polyline points='{points(top)}' fill='none' stroke='{color}' stroke-width='1.5' "
                          "vector-effect='non-scaling-stroke'/>")  # fmt: skip
    for time, color in MARKS:
        x = (time - span[0]) / ((span[1] - span[0]) or 1) * 1000
        shapes.append(f"<path d='M{x:.1f} 0V100' stroke='{color}' stroke-width='1' stroke-dasharray='4 3' "
                      "vector-effect='non-scaling-stroke'/>")  # fmt: skip
    axis = f"<div class='legend'>{number(low, unit)} to {number(high, unit)}</div>"
    picture = (
        f"<svg viewBox='0 0 1000 100' preserveAspectRatio='none' width='100%' height='100%'>{''.join(shapes)}</svg>"
    )
    return f"{axis}<div class='body'>{picture}</div><div class='legend'>{''.join(legend)}</div>"


def stat(panel: dict[str, Any], found: list[tuple[str, Series]], unit: str) -> str:
    """The latest values."""
    shown = []
    for name, series in found:
        value = series["values"][-1][1]
        label = f"<small>{html.escape(name)}</small>" if panel["options"]["textMode"] == "value_and_name" else ""
        shown.append(f"<div style='color:{threshold_color(panel, value)}'>{label}{number(value, unit)}</div>")
    return f"<div class='body stat'>{''.join(shown)}</div>"


def bars(panel: dict[str, Any], found: list[tuple[str, Series]], unit: str) -> str:
    """One bar for each series."""
    largest = max([series["values"][-1][1] for _, series in found] + [1e-9])
    largest = panel["fieldConfig"]["defaults"].get("max", largest)
    rows = []
    for name, series in found:
        value = series["values"][-1][1]
        override = color_of(panel, name, 0)
        color = override if override != PALETTE[0] else threshold_color(panel, value)
        text = f"{html.escape(name)}: {number(value, unit)}"
        width = max(0.0, min(1.0, value / largest)) * 100
        rows.append(f"<div class='bar'><div style='background:{color};opacity:.5;height:100%;width:{width:.1f}%'></div>"
                    f"<span style='top:0'>{text}</span></div>")  # fmt: skip
    return f"<div class='body'>{''.join(rows)}</div>"


def cells(rows: list[tuple[str, list[tuple[float, float, str]]]], span: tuple[float, float], seconds: float) -> str:
    """Rows of colored cells: (time, value, color)."""
    width, height = (span[1] - span[0]) or 1, 100 / max(1, len(rows))
    shapes = [
        f"<rect x='{(time - span[0]) / width * 1000:.1f}' y='{index * height:.2f}' fill='{color}' "
        f"width='{seconds / width * 1000 + 0.7:.2f}' height='{height * 0.92:.2f}'/>"
        for index, (_, row) in enumerate(rows)
        for time, _, color in row
    ]
    names = "".join(f"<div style='flex:1;font-size:10px'>{html.escape(name)}</div>" for name, _ in rows)
    picture = (
        f"<svg viewBox='0 0 1000 100' preserveAspectRatio='none' width='100%' height='100%'>{''.join(shapes)}</svg>"
    )
    column = f"<div style='display:flex;flex-direction:column;width:90px'>{names}</div>"
    return f"<div class='body' style='display:flex'>{column}<div style='flex:1'>{picture}</div></div>"


def heat_map(panel: dict[str, Any], found: list[tuple[str, Series]], span: tuple[float, float]) -> str:
    """One row for each series, or the buckets of a histogram."""
    if panel["targets"][0].get("format") == "heatmap":
        found = sorted(found, key=lambda item: float(item[0].replace("+Inf", "inf")))
        before: dict[float, float] = {}
        counts = []
        for name, series in found:
            values = dict(map(tuple, series["values"]))
            counts.append((name, [(time, max(0.0, value - before.get(time, 0))) for time, value in values.items()]))
            before = values
        most = max([value for _, row in counts for _, value in row] + [1e-9])
        rows = [(n, [(t, v, f"rgba(50,116,217,{v / most:.2f})") for t, v in row]) for n, row in reversed(counts)]
        return cells(rows, span, 1)
    options = panel["options"]["color"]
    low, high = options.get("min", 0.0), options.get("max", 1.0)

    def color(value: float) -> str:
        part = max(0.0, min(1.0, (value - low) / (high - low)))
        return f"hsl({120 * (1 - part):.0f},65%,{60 - 15 * abs(part - 0.5):.0f}%)"

    return cells([(n, [(t, v, color(v)) for t, v in s["values"]]) for n, s in found], span, 1)


def states(panel: dict[str, Any], found: list[tuple[str, Series]], span: tuple[float, float]) -> str:
    """A state timeline."""
    rows = []
    for name, series in found:
        mapping = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
        for override in panel["fieldConfig"]["overrides"]:
            if re.search(override["matcher"]["options"].strip("/"), name):
                mapping = override["properties"][0]["value"][0]["options"]
        row = []
        for time, value in series["values"]:
            color = mapping[f"{value:.0f}"]["color"]
            row.append((time, value, "#e3e5e8" if color == "text" else NAMED.get(color, color)))
        rows.append((name, row))
    return cells(rows, span, 1)


def table(panel: dict[str, Any], answers: list[dict[str, Any]]) -> str:
    """The values of all queries, joined by labels."""
    organize = next(item["options"] for item in panel["transformations"] if item["id"] == "organize")
    fields = sorted(organize["indexByName"], key=organize["indexByName"].get)
    units = {
        override["matcher"]["options"]: item["value"]
        for override in panel["fieldConfig"]["overrides"]
        for item in override["properties"]
        if item["id"] == "unit"
    }
    rows: dict[str, dict[str, Any]] = {}
    for index, answer in enumerate(answers):
        field = f"Value #{chr(ord('A') + index)}" if len(answers) > 1 else "Value"
        for series in answer["series"]:
            rows.setdefault(str(series["labels"]), dict(series["labels"]))[field] = series["values"][-1][1]
    heads = "".join(f"<th>{html.escape(organize['renameByName'][field])}</th>" for field in fields)
    body = []
    for row in rows.values():
        shown = []
        for field in fields:
            value = row.get(field, "")
            unit = units.get(organize["renameByName"][field], "none")
            shown.append(f"<td>{html.escape(number(value, unit) if isinstance(value, float) else str(value))}</td>")
        body.append(f"<tr>{''.join(shown)}</tr>")
    return f"<div class='body'><table><tr>{heads}</tr>{''.join(body)}</table></div>"


def drawn(panel: dict[str, Any], answers: list[dict[str, Any]], span: tuple[float, float]) -> str:
    """The content of a panel."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    found = [(name_of(series, answer["legend"]), series) for answer in answers for series in answer["series"]]
    if not found:
        return "<div class='none'>no data</div>"
    kind = panel["type"]
    if kind == "table":
        return table(panel, answers)
    if kind == "heatmap":
        return heat_map(panel, found, span)
    if kind == "state-timeline":
        return states(panel, found, span)
    drawing = {"timeseries": lambda: lines(panel, found, span, unit), "stat": lambda: stat(panel, found, unit)}
    return drawing.get(kind, lambda: bars(panel, found, unit))()


def page(name: str, data: dict[str, Any]) -> str:
    """A board as a page."""
    document, span = board(name), (data["start"], data["end"])
    colors = {item["name"]: item["iconColor"] for item in document["annotations"]["list"]}
    MARKS[:] = [(time, NAMED[colors[mark]]) for mark, times in data["marks"].items() for time in times]
    parts = []
    for panel in document["panels"]:
        at = panel["gridPos"]
        place = f"grid-area:{at['y'] + 1}/{at['x'] + 1}/span {at['h']}/span {at['w']}"
        title = html.escape(panel["title"])
        if panel["type"] == "row":
            parts.append(f"<div class='row' style='{place}'>{title}</div>")
            continue
        answers = [answer for answer in data["answers"] if answer["panel"] == panel["title"]]
        content = drawn(panel, answers, span)
        parts.append(f"<div class='panel' style='{place}'><b>{title}</b>{content}</div>")
    title = html.escape(document["title"])
    return (
        f"<!doctype html><meta charset='utf-8'><title>{title}</title><style>{STYLE}</style>"
        f"<h1>{title}</h1><div class='grid'>{''.join(parts)}</div>"
    )


def main(arguments: Sequence[str]) -> None:
    """Write the pages."""
    source, target = (Path(argument) for argument in arguments)
    target.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (target / f"{name}.html").write_text(page(name, json.loads((source / f"{name}.json").read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
