"""`meshwright explain schedule|memory|allreduce`: text and SVG from the simulator and the cost model."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from meshwright.models.presets import PRESETS
from meshwright.planner.cost.accelerators import accelerator
from meshwright.planner.cost.collectives import all_reduce
from meshwright.planner.cost.estimate import machine_for, memory_of
from meshwright.planner.cost.fabric import Fabric, Span
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright_cli.explain.allreduce import ring, timings
from meshwright_cli.explain.docs_figures import DIRECTORY, figures
from meshwright_cli.explain.memory import memory_cases
from meshwright_cli.explain.schedule import KINDS, timeline
from meshwright_cli.main import main

ROOT = Path(__file__).parents[2]
H100 = accelerator("NVIDIA-H100-80GB-HBM3")
assert H100 is not None


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["explain", *map(str, words)])


@pytest.mark.parametrize("name", figures())
def test_the_figures_of_the_docs_are_those_of_the_code(name: str):
    written = (ROOT / DIRECTORY / name).read_text(encoding="utf-8")
    assert written == figures()[name], "run `make generate`"


def test_no_figure_is_left_that_nothing_generates():
    assert {path.name for path in (ROOT / DIRECTORY).glob("*.svg")} == set(figures())


@pytest.mark.parametrize("name", KINDS)
def test_every_schedule_is_drawn_in_80_columns(name: str):
    micro_batches = 1 if KINDS[name].single_micro_batch else 8
    result = run("schedule", name.lower(), "--micro-batches", micro_batches)
    assert result.exit_code == 0, result.output
    drawing = result.output.splitlines()
    assert len(drawing) == 4 + 4
    assert max(map(len, drawing)) <= 80
    _, simulation = timeline(KINDS[name], 4, micro_batches)
    assert f"Ranks wait {simulation.bubble:.1%}" in drawing[-2]
    assert ("others fill it" in drawing[-2]) == KINDS[name].asynchronous


def test_every_pass_of_1f1b_is_at_its_time():
    rows = [line[3:] for line in run("schedule", "1F1B").output.splitlines()[1:5]]
    _, simulation = timeline(KINDS["1F1B"], 4, 8)
    for row, timed_slots in zip(rows, simulation.timeline, strict=True):
        for timed in timed_slots:
            ((kind, _, micro_batch),) = timed.slot
            at = 2 * round(timed.start)
            assert row[at : at + 2] == f"{kind.value}{micro_batch}"
        assert row.count("·") == 2 * round(simulation.makespan) - 2 * round(sum(t.end - t.start for t in timed_slots))


def test_a_long_step_is_cut_at_80_columns():
    drawing = run("schedule", "1F1B", "--micro-batches", 64).output.splitlines()
    assert max(map(len, drawing[:5])) == 80
    assert all(line.endswith("…") for line in drawing[1:5])


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.even or kind.whole_rounds])
def test_numbers_for_which_a_schedule_does_not_exist_are_named(name: str):
    result = run("schedule", name, "--micro-batches", 9)
    assert result.exit_code == 1
    assert "--micro-batches" in result.output
    assert "9" in result.output


def test_memory_is_that_of_the_cost_model():
    zero, published, reduced, saved = memory_cases(PRESETS["llama-3-8b"], 8, 8192, H100)
    work, machine = Workload(PRESETS["llama-3-8b"], 8192, 8), machine_for(H100)
    for stage, case in enumerate(zero[1]):
        expected = memory_of(work, Strategy(data=8, zero_stage=stage), machine).total
        assert sum(case.parts) == pytest.approx(expected)
        assert f"{expected / (1 << 30):.1f}" in run("memory").output
    for without, case in zip(zero[1][1:], published[1], strict=False):
        assert case.name == without.name
        assert sum(case.parts) < sum(without.parts)
    once, each = reduced[1]
    assert each.memory.total < once.memory.total
    assert each.memory.gradients == once.memory.gradients / 8
    totals = [sum(case.parts) for case in saved[1]]
    assert totals == sorted(totals, reverse=True)


def test_memory_fits_80_columns_and_marks_the_gpu():
    drawing = run("memory", "--model", "llama-3-70b", "--ranks", 64).output.splitlines()
    assert max(map(len, drawing)) <= 80
    assert sum("|" in line for line in drawing) == 11 + 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_after_a_ring_every_rank_has_every_sum(ranks: int):
    hops = ring(ranks)
    assert len(hops) == 2 * (ranks - 1) + 1
    assert set(hops[-1].parts) == {(ranks,) * ranks}
    for rank in range(ranks):
        after_scatter = hops[ranks - 1].parts[rank]
        assert after_scatter.count(ranks) == 1
        assert sorted(hop.moved[rank] for hop in hops[1:ranks]) == sorted({hop.moved[rank] for hop in hops[1:ranks]})


def test_times_of_an_all_reduce_are_those_of_the_cost_model():
    fabric = Fabric.of(H100)
    for one in timings(fabric, 64, 8):
        assert one.seconds == all_reduce(float(one.size), Span((8, 64)), fabric)
    assert "64 x H100-SXM5-80GB, 8 in each NVLink domain" in run("allreduce", "--ranks", 64).output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["memory", "--model", "gpt-9"], "--model: unknown preset `gpt-9`"),
        (["memory", "--gpu", "H900"], "--gpu: unknown product `H900`"),
        (["allreduce", "--ranks", "12", "--per-domain", "8"], "--ranks must be a multiple of --per-domain (8), got 12"),
        (["schedule", "--svg", "/absent/x.svg"], "--svg: /absent/x.svg: No such file"),
    ],
)
def test_mistakes_name_the_option(words: list[str], said: str):
    result = run(*words)
    assert result.exit_code == 1
    assert said in result.output


@pytest.mark.parametrize("subject", ["schedule", "memory", "allreduce"])
def test_the_svg_is_well_formed_and_has_both_schemes(tmp_path: Path, subject: str):
    result = run(subject, "--svg", tmp_path / "figure.svg")
    assert result.exit_code == 0, result.output
    content = (tmp_path / "figure.svg").read_text()
    tree = ElementTree.fromstring(content)
    assert tree.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in content
    assert not re.search(r"(href|src)=|url\(|<script", content)
