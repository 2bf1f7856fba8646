"""`meshwright report`: what the page shows, and that it is what planner, status and tracker say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from meshwright.layout import Layout
from meshwright.planner.cost.memory import memory_by_stage
from meshwright.schedules.measured import RankTimeline, measured_step
from meshwright.schedules.registry import generate
from meshwright.schedules.simulator import simulate
from meshwright_cli.figures.schedule_figure import MAX_SLOTS, schedule_figure
from meshwright_cli.figures.svg import to_markup
from meshwright_cli.main import main
from meshwright_cli.plan.report import plan_report
from meshwright_cli.report.bars import goodput_bars, memory_bars, step_bars, traffic_bars
from meshwright_cli.report.cluster_map import COLORS, cluster_map, coordinate
from meshwright_cli.report.curves import curves
from meshwright_cli.report.history import HistoryFileError, read_history
from meshwright_cli.report.inputs import ReportInputs, inputs_of_job, inputs_of_plan
from meshwright_cli.report.page import page_of, render
from tests.cli.report_samples import HOSTILE, NOW, history_lines, manifest, nodes, running_job, write

MAX_PAGE_BYTES = 2_000_000


class Outline(HTMLParser):
    """Headings, scripts, and everything that a page would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self._heading = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._heading = tag == "h2"
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action") and value != "data:,":
                self.fetched.append(f"{tag} {name}={value}")
            assert not name.startswith("on"), (tag, name)

    def handle_data(self, data: str) -> None:
        if self._heading:
            self.headings.append(data)
            self._heading = False


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, words)])


def planned_inputs(
    job: dict[str, object] | None = None, cluster: list[dict[str, object]] | None = None
) -> ReportInputs:
    found = plan_report(job or manifest(), cluster or nodes(), [])
    return inputs_of_plan(found, "llama-70b", "research", NOW)


def job_inputs(cluster: list[dict[str, object]] | None = None, **spec: object) -> ReportInputs:
    where = nodes(4, 2, busy=1) if cluster is None else cluster
    return inputs_of_job(running_job(manifest(**spec), where), where, [], NOW)


def test_a_manifest_is_planned_without_a_cluster(tmp_path: Path):
    path = write(tmp_path / "job.yaml", yaml.safe_dump(manifest()))
    result = run(path, "--gpus", 64, "-o", tmp_path / "report.html")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "report.html").read_text()
    outline = Outline(page)
    assert outline.headings == [
        "Where the ranks are",
        "Pipeline schedule",
        "Memory of a rank",
        "Seconds of a step",
        "Traffic by level",
        "Why this layout",
    ]
    assert outline.fetched == []
    assert "Planned, not submitted" in page
    assert "assuming 64 free NVIDIA-H100-80GB-HBM3" in page


def test_the_page_of_a_job_has_its_ledger_and_its_curves(tmp_path: Path):
    inputs = replace(job_inputs(), history=read_history(write(tmp_path / "h.jsonl", history_lines())))
    page = render(page_of(inputs))
    assert Outline(page).headings[-3:] == ["Where the time went", "Loss and throughput", "Why this layout"]
    assert "32 ranks train in generation 3" in page
    assert page.count('class="mark') == 2 * 3  # a restart and two rescales, on both curves
    assert "measured times of passes" in page


def test_the_waits_of_one_asynchronous_step_are_not_those_of_the_run():
    spec = manifest()["spec"]
    free = {"schedule": "PipeDream2BW", "zeroStage": 0}
    job = manifest(
        parallelism={**spec["parallelism"], **free},
        training={**spec["training"], "optimizer": {"gradientClip": 0}},
    )
    alone = "of this step alone: without a flush, others fill it"
    assert alone in render(page_of(planned_inputs(job)))
    assert alone not in render(page_of(planned_inputs()))


def test_the_page_of_a_running_pipeline_has_the_measured_timeline_below_the_simulated_one():
    ranks = [
        RankTimeline(52, stage, 4, [(f"F{stage}.{m}", 100 * (m + stage) - 2000, 90) for m in range(3)])
        for stage in range(4)
    ]
    step = measured_step(ranks)
    page = render(page_of(replace(job_inputs(), measured=step)))
    assert page.index("Simulated with") < page.index("Measured timeline of step 52 on 4 pipeline ranks")
    # From the first start to the last end 590 us, of which each rank computes 270.
    assert "Step 52 of the first pipeline took 0.00059 s. Ranks waited <b>54.2%</b> of the time." in page
    assert page.count('aria-label="Measured timeline of the pipeline"') == 1
    assert "Measured timeline" not in render(page_of(job_inputs()))


def test_every_rank_is_on_its_node_with_the_color_of_its_coordinate():
    inputs = job_inputs()
    drawn = cluster_map(inputs)
    assert drawn is not None
    assert inputs.placement is not None
    layout = Layout(4, 4, 2)
    at = {cell.first: (node.name, cell.color) for rack in drawn.racks for node in rack.nodes for cell in node.cells}
    assert sorted(at) == list(range(32))
    for worker in inputs.placement.workers:
        first, last = map(int, worker.ranks.split("-"))
        for rank in range(first, last + 1):
            assert at[rank] == (worker.node, layout.coordinates(rank).pipeline % COLORS)


def test_straddling_replicas_are_named_and_marked():
    inputs = job_inputs()
    drawn = cluster_map(inputs)
    assert drawn is not None
    assert inputs.placement is not None
    assert len(drawn.straddles) == inputs.placement.straddling_replicas > 0
    marked = {cell.first for rack in drawn.racks for node in rack.nodes for cell in node.cells if cell.straddles}
    named = [tuple(map(int, found)) for found in re.findall(r"ranks (\d+) to (\d+)", " ".join(drawn.straddles))]
    assert marked == {rank for first, last in named for rank in range(first, last + 1)}


def test_nothing_straddles_in_one_rack():
    drawn = cluster_map(job_inputs(nodes(1, 4)))
    assert drawn is not None
    assert drawn.straddles == []
    assert not any(cell.straddles for rack in drawn.racks for node in rack.nodes for cell in node.cells)
    assert {row.label: row.within for row in drawn.groups} == {"TP": "one node", "PP": "one rack", "DP": "one rack"}


def test_the_coordinate_of_experts_counts_ranks_with_the_same_dense_parameters():
    layout = Layout(tensor=2, data=4, context=2, expert=4)
    for group in layout.expert_groups():
        assert [coordinate(layout, rank, "expert") for rank in group] == [0, 1, 2, 3]


def test_bars_have_the_numbers_of_the_planner():
    inputs = planned_inputs()
    planned = inputs.planned
    assert planned is not None
    assert planned.cost_model is not None
    assert planned.estimate is not None
    memory, step, traffic = memory_bars(planned), step_bars(planned), traffic_bars(planned)
    assert memory is not None
    assert step is not None
    assert traffic is not None
    model = planned.cost_model
    stages = memory_by_stage(model.work, planned.plan.strategy, model.machine.runtime)
    assert [sum(part.value for part in bar.parts) for bar in memory.bars] == pytest.approx(
        [one.total for one in stages]
    )
    assert sum(part.value for part in step.rows) == pytest.approx(planned.estimate.seconds)
    assert [bar.label for bar in traffic.bars] == ["TP", "PP", "DP"]


def test_the_ledger_adds_up_to_the_age_of_the_job():
    status = job_inputs().status
    assert status is not None
    assert status.goodput is not None
    ledger = goodput_bars(status.goodput, NOW)
    assert ledger is not None
    booked = sum(one.milliseconds for one in status.goodput.booked) / 1000
    assert sum(part.value for part in ledger.rows) == pytest.approx(booked + 10)  # ten seconds since the last booking


def test_the_goodput_of_the_page_leaves_out_suspension_as_that_of_status_does():
    job = running_job(manifest(), cluster := nodes())

    def tile() -> tuple[str, str]:
        page = page_of(inputs_of_job(job, cluster, [], NOW))
        return next((one.value, one.note) for one in page.tiles if one.label == "Goodput")

    value, note = tile()
    assert note == "training, of all time"
    job["status"]["goodput"]["booked"].append({"cause": "Suspended", "milliseconds": 9_000_000})
    assert tile() == (value, "training, of time not suspended")


def test_names_and_reasons_are_escaped():
    job = manifest()
    job["metadata"]["name"] = "quoted"
    cluster = nodes(1, 4)
    running = running_job(job, cluster)
    status = running["status"]
    status["plan"]["reasons"] = [f"because {HOSTILE} `<b>`"]
    status["conditions"][0]["message"] = HOSTILE
    for worker in status["placement"]["workers"]:
        worker["rack"] = worker["node"] = HOSTILE
    page = render(page_of(inputs_of_job(running, cluster, [], NOW)))
    assert "<img" not in page
    assert "onerror=alert(1)&gt;" in page
    assert "<code>&lt;b&gt;</code>" in page
    Outline(page)


def test_a_job_without_nodes_to_read_still_has_a_page():
    cluster = nodes()
    inputs = inputs_of_job(running_job(manifest(), cluster), None, [], NOW, ["No estimates: forbidden"])
    page = page_of(inputs)
    assert page.cluster is not None
    assert page.timeline is not None
    assert not page.timeline.estimated
    assert page.memory is None
    assert "No estimates: forbidden" in render(page)


def test_a_job_that_is_not_planned_yet_has_a_page():
    page = render(page_of(inputs_of_job(manifest(), nodes(), [], NOW)))
    assert "has not planned the job yet" in page
    assert "The job has no placement yet" in page


def test_the_spec_that_runs_is_reported_while_an_edit_waits():
    cluster = nodes()
    running = running_job(manifest(), cluster)
    running["status"]["appliedSpec"] = json.dumps(
        {"apiVersion": "meshwright.dev/v1alpha1", "scheme": 2, "spec": running["spec"]}
    )
    edited = json.loads(json.dumps(running))
    edited["spec"]["training"]["sequenceLength"] = 4096
    one, other = inputs_of_job(running, cluster, [], NOW), inputs_of_job(edited, cluster, [], NOW)
    assert one.planned is not None
    assert other.planned is not None
    assert one.planned.estimate == other.planned.estimate


@pytest.mark.parametrize(
    ("replicas", "racks", "cell_ranks"),
    [
        pytest.param(32, 64, 1, id="512"),
        pytest.param(512, 1024, 1, id="8192", marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(1024, 2048, 4, id="16384", marks=pytest.mark.slow),
    ],
)
def test_pages_of_thousands_of_ranks_stay_small(replicas, racks, cell_ranks):
    cluster = nodes(racks, 1)
    job = manifest(
        replicas=replicas,
        training={"steps": 1, "globalBatchSize": replicas * 8, "sequenceLength": 2048, "precision": "bf16"},
        workers={"image": "w", "gpusPerWorker": 8 if replicas < 1024 else 16},
    )
    if replicas == 1024:
        cluster = nodes(1024, 1, gpus=16)
    plan = plan_report(job, cluster, [])
    inputs = inputs_of_plan(plan, "large", "research", NOW)
    drawn = cluster_map(inputs)
    assert drawn is not None
    assert drawn.cell_ranks == cell_ranks
    cells = [cell for rack in drawn.racks for node in rack.nodes for cell in node.cells]
    assert len(cells) * cell_ranks == plan.plan.layout.world_size == 16 * replicas
    assert len(render(page_of(inputs)).encode()) < MAX_PAGE_BYTES


def test_a_long_step_is_cut_in_the_middle():
    schedule = generate("1f1b", 32, 512)
    figure = to_markup(schedule_figure(schedule, simulate(schedule), "long"))
    assert MAX_SLOTS < 32 * 512 * 2
    assert "···" in figure
    assert len(figure) < 300_000


def test_a_short_step_has_a_box_with_a_number_for_each_pass():
    schedule = generate("1f1b", 4, 8)
    figure = to_markup(schedule_figure(schedule, simulate(schedule), "short"))
    assert len(re.findall(r'class="small">\d+<', figure)) == 4 * 8 * 2
    assert figure.count("stage ") == 4


def test_curves_are_thinned_and_keep_their_ends(tmp_path: Path):
    history = read_history(write(tmp_path / "h.jsonl", history_lines(5000)))
    loss, rate = curves(history)
    assert (loss.x_ticks[0].text, loss.x_ticks[-1].text) == ("1", "5,000")
    line = next(one for one in loss.svg if one.tag == "polyline").get("points") or ""
    assert 400 < len(line.split()) <= 510
    assert [mark.rescale for mark in rate.marks] == [False, True, True]


def test_a_step_that_was_repeated_counts_once(tmp_path: Path):
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "loss": 2.5}, {"step": 3, "loss": 1.0}]
    path = write(tmp_path / "h.jsonl", "\n".join(map(json.dumps, lines)) + '\n{"step": 4, "lo')
    assert [(point.step, point.loss) for point in read_history(path).points] == [(1, 3.0), (2, 2.5), (3, 1.0)]


def test_lines_that_are_no_records_are_left_out_and_named(tmp_path: Path):
    """After the crash of a node, a file may have zeros in the middle. The report was an error."""
    lines = ['{"step": 1, "loss": 3.0}', "\0" * 20, '{"step": 2, "loss": 2.0}', "[1]", '{"step": 3, "loss": 1.0}', ""]
    path = write(tmp_path / "h.jsonl", "\n".join(lines))
    assert [(point.step, point.loss) for point in read_history(path).points] == [(1, 3.0), (2, 2.0), (3, 1.0)]
    page = tmp_path / "r.html"
    result = run(write(tmp_path / "job.yaml", yaml.safe_dump(manifest())), "--history", path, "-o", page)
    assert result.exit_code == 0, result.output
    assert "h.jsonl: 2 lines that are no records are left out; line 2: not valid JSON" in page.read_text()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("loss\n1\n", "line 1: not valid JSON"),
        ('{"loss": 1}\n', "line 1: `step` must be a whole number"),
        ('{"step": -1}\n', "line 1: `step` must be a whole number"),
        ("[1]\n", "line 1: `step` must be a whole number"),
    ],
)
def test_a_file_that_is_no_history_names_its_line(tmp_path: Path, content: str, said: str):
    path = write(tmp_path / "h.jsonl", content)
    with pytest.raises(HistoryFileError, match=re.escape(said)):
        read_history(path)
    result = run(write(tmp_path / "job.yaml", yaml.safe_dump(manifest())), "--history", path, "-o", tmp_path / "r.html")
    assert result.exit_code == 1
    assert said in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent.yaml"], "absent.yaml: No such file"),
        (["llama", "--gpus", "8"], "--inventory, --gpus and --fabric are only for a manifest"),
        (["llama", "--kubeconfig", "/absent/config"], "/absent/config"),
    ],
)
def test_mistakes_name_what_to_do(words: list[str], said: str):
    result = run(*words)
    assert result.exit_code in (1, 4)
    assert said in result.output


def test_the_page_may_go_to_standard_output(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert run(Path(__file__).parents[2] / "examples/ten-line.yaml", "-o", path).exit_code == 0
    shown = run(Path(__file__).parents[2] / "examples/ten-line.yaml", "-o", "-")
    assert shown.exit_code == 0
    assert shown.stdout.startswith("<!")
    assert len(shown.stdout) == pytest.approx(len(path.read_text(encoding="utf-8")), rel=0.01)
