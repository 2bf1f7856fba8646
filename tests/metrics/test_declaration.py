"""A metric is declared once: its series, its row on a page and the checks follow."""

from __future__ import annotations

import pytest

from meshwright.metrics.declaration import Kind, Label, Metric
from meshwright.metrics.exporter import CounterMetric, Exporter, GaugeMetric, HistogramMetric
from meshwright.metrics.page import label_table, metric_table
from tests.metrics.checks import undeclared_references, undeclared_samples

RESULT = Label("result", ("ok", "error"))


class Toys(Exporter):
    built = CounterMetric("ptj_toys_total", "Toys built.", RESULT)
    shelf = GaugeMetric("ptj_shelf_toys", "Toys on the shelf.", Label("color", meaning="name of a color"))
    seconds = HistogramMetric("ptj_toy_seconds", "Time to build a toy.", (1, 10), RESULT)


class MoreToys(Toys):
    broken = CounterMetric("ptj_broken_toys_total", "Toys that broke.", Label("result", ("thrown", "mended")))


def test_an_attribute_is_exported() -> None:
    toys = Toys()
    toys.built.labels("ok").inc(2)
    toys.shelf.labels("red").set(1)
    toys.seconds.labels("ok").observe(3)
    text = toys.exposition().decode()
    for line in (
        "# HELP ptj_toys_total Toys built.",
        'ptj_toys_total{result="ok"} 2.0',
        'ptj_shelf_toys{color="red"} 1.0',
        'ptj_toy_seconds_bucket{le="1.0",result="ok"} 0.0',
        'ptj_toy_seconds_bucket{le="10.0",result="ok"} 1.0',
    ):
        assert line in text
    assert undeclared_samples(text, Toys.metrics) == []
    assert "ptj_broken_toys" not in text
    assert "# TYPE ptj_broken_toys_total counter" in MoreToys().exposition().decode()


def test_instances_count_apart() -> None:
    one, other = Toys(), Toys()
    one.built.labels("ok").inc()
    assert 'result="ok"' not in other.exposition().decode()


def test_tables_follow_from_the_declarations() -> None:
    assert metric_table(MoreToys.metrics).splitlines()[2:] == [
        "| `ptj_broken_toys_total` | counter | `result` | Toys that broke. |",
        "| `ptj_shelf_toys` | gauge | `color` | Toys on the shelf. |",
        "| `ptj_toy_seconds` | histogram | `result` | Time to build a toy. |",
        "| `ptj_toys_total` | counter | `result` | Toys built. |",
    ]
    assert label_table(MoreToys.metrics).splitlines()[2:] == [
        "| `result` of `ptj_toys_total`, `ptj_toy_seconds` | `ok`, `error` |",
        "| `color` | name of a color |",
        "| `result` of `ptj_broken_toys_total` | `thrown`, `mended` |",
    ]


@pytest.mark.parametrize(
    ("name", "kind", "buckets", "problem"),
    [
        ("toys_total", Kind.COUNTER, (), "must begin with `ptj_`"),
        ("ptj_toys", Kind.COUNTER, (), "counters end in `_total`"),
        ("ptj_toys_total", Kind.GAUGE, (), "counters end in `_total`"),
        ("ptj_toys", Kind.HISTOGRAM, (), "histograms have buckets"),
        ("ptj_toys", Kind.GAUGE, (1.0,), "histograms have buckets"),
    ],
)
def test_a_wrong_declaration_raises(name: str, kind: Kind, buckets: tuple[float, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Metric(name, kind, "Toys.", buckets=buckets)


def test_a_label_has_values_or_a_meaning() -> None:
    with pytest.raises(ValueError, match="label `color`"):
        Label("color")


def test_a_value_outside_the_declared_set_is_reported() -> None:
    assert undeclared_samples('ptj_toys_total{result="lost"} 1\n', Toys.metrics) == [
        "`ptj_toys_total`: `result` is 'lost'; declared: ok, error"
    ]
    broken = MoreToys()
    broken.broken.labels("mended").inc()
    assert undeclared_samples(broken.exposition().decode(), Toys.metrics) == ["`ptj_broken_toys_total` is not declared"]
    assert undeclared_samples('ptj_toys_total{color="red"} 1\n', Toys.metrics) == [
        "`ptj_toys_total` has the labels ['color']; declared: ['result']"
    ]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ('sum by (result) (rate(ptj_toys_total{result="ok"}[5m]))', []),
        ("histogram_quantile(0.9, sum by (le) (rate(ptj_toy_seconds_bucket[5m])))", []),
        ('the counter `ptj_toys_total{result}`, in `namespace="a"`', []),
        ("rate(ptj_toy_total[5m])", ["`ptj_toy_total` is not declared"]),
        ("ptj_shelf_toys_bucket", ["`ptj_shelf_toys_bucket` is not declared"]),
        ('ptj_toys_total{color="red"}', ["`ptj_toys_total` has no label `color`"]),
        ("`ptj_toys_total{color}`", ["`ptj_toys_total` has no label `color`"]),
        ('ptj_toys_total{result="okay"}', ["`ptj_toys_total`: `result` is never 'okay'"]),
        ('ptj_toys_total{result=~"o.*"}', []),
        ("sum by (color) (ptj_toys_total)", ["no metric of this text has the label `color`"]),
    ],
)
def test_references_in_dashboards_and_docs(text: str, problems: list[str]) -> None:
    assert undeclared_references(text, Toys.metrics) == problems
