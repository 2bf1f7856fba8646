"""What commands show of jobs: lists, trees of ranks, ledgers, step times and selections of logs. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import click
import pytest

from meshwright_cli.client.errors import NotFoundError
from meshwright_cli.client.log_stream import LogSource, select
from meshwright_cli.client.objects import Job, JobEvent, LogLine, WorkerPod
from meshwright_cli.client.rank_metrics import rank_times, read_samples, slowness, stragglers
from meshwright_cli.client.waiting import Target
from meshwright_cli.explain.cluster import ClusterView
from meshwright_cli.explain.job import explanation, facts
from meshwright_cli.jobs.goodput import Ledger
from meshwright_cli.jobs.list_view import list_lines
from meshwright_cli.jobs.output import line_as_lines, wrapped
from meshwright_cli.jobs.placement_tree import placement_tree
from meshwright_cli.jobs.status_view import JobView, last_failure, next_step, status_lines
from meshwright_cli.jobs.top_view import TopView, top_lines
from meshwright_cli.parameters import Duration
from meshwright_cli.text import duration
from tests.cli.live_server import condition, job, running
from tests.planner.builders import node

NOW = datetime(2026, 1, 2, 4, 0, tzinfo=UTC)


def made(status: dict[str, Any] | None = None, name: str = "lm", **spec: Any) -> Job:
    body = job(name, **spec)
    body["metadata"] |= {"namespace": "ml", "uid": f"u-{name}", "generation": 1,
                         "creationTimestamp": "2026-01-02T03:00:00Z"}  # fmt: skip
    return Job({**body, "status": running() if status is None else status})


def pods(*states: str) -> list[WorkerPod]:
    return [WorkerPod(f"lm-w{w}-0", w, 0, "", state, state == "Running", True, 0) for w, state in enumerate(states)]


def wide_status(workers: int, per_rack: int = 16) -> dict[str, Any]:
    entries = [
        {"worker": w, "incarnation": 0, "pod": f"lm-w{w}-0", "node": f"node{w:03}", "ranks": f"{8 * w}-{8 * w + 7}",
         "domain": f"d{w // 2}", "rack": f"rack{w // per_rack:02}"}
        for w in range(workers)
    ]  # fmt: skip
    plan = {"tensor": 8, "pipeline": 4, "data": workers // 4, "microBatches": 8, "worldSize": 8 * workers,
            "workers": workers, "summary": f"TP 8 x PP 4 x DP {workers // 4}"}  # fmt: skip
    return running(placement={"workers": entries}, plan=plan, readyRanks=f"{8 * workers}/{8 * workers}")


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("workers", [2, 8, 128])
def test_status_fits_the_terminal(columns, workers):
    status = running() if workers == 2 else wide_status(workers)
    status["conditions"][0]["message"] = "a long message of many words " * 12
    lines = status_lines(JobView(made(status), pods(*["Running"] * workers)), NOW, columns)
    assert max(len(click.unstyle(line)) for line in lines) <= columns + (30 if workers == 128 else 0)
    assert len(lines) <= 40


def test_a_command_in_a_message_stays_on_one_line():
    command = "`meshwright crd | kubectl apply --server-side -f -`"
    lines = wrapped(f"Install the chart, or only the definition: {command} for all of its namespaces", 40)
    assert command in lines
    assert all(len(line) <= 40 for line in lines if line != command)


def test_a_terminal_wraps_sentences_of_a_report_but_no_drawing_of_a_node():
    sentence, drawing = (
        "  - DP 4: set by `replicas`, as in the manifest",
        "  └─ node w0   [0 d0p0t0] [1 d0p0t1] [2 d0p0t2]",
    )
    assert line_as_lines(sentence, 30) == ["  - DP 4: set by `replicas`,", "    as in the manifest"]
    assert line_as_lines(drawing, 30) == [drawing]
    assert line_as_lines(sentence, None) == [sentence]
    assert line_as_lines("", 30) == [""]


def test_an_explanation_says_nothing_twice():
    cluster = ClusterView(nodes=[node("n0", gpus=2)])
    workers = {"image": "w:1", "gpusPerWorker": 8}

    def waiting(message: str) -> Job:
        unplaced = [condition("Placed", "False", "InvalidSpec", message)]
        return made({"state": "Placing", "conditions": unplaced}, workers=workers)

    why = dict(facts(waiting("another reason"), cluster))["Plan"]
    assert "gpusPerWorker" in why
    assert " ".join(explanation(waiting(why), [], cluster, 500)).count(why) == 1


def test_a_job_that_no_operator_has_reported_on_says_how_to_find_out():
    text = " ".join("\n".join(status_lines(JobView(made({}), []), NOW, 80)).split())
    assert "No operator has reported on this job yet. If that stays so, `meshwright doctor` says why" in text
    lines = explanation(made({}), [], ClusterView(), 80)
    assert "meshwright doctor" in " ".join(lines)


def test_a_job_of_another_controller_is_not_one_that_the_operator_has_missed():
    job = made({}, managedBy="kueue.x-k8s.io/multikueue")
    assert job.message.startswith("Waits for the controller `kueue.x-k8s.io/multikueue`, which has not reported")
    assert "doctor" in made({}, managedBy="meshwright.dev/operator").message


@pytest.mark.parametrize(
    ("reason", "says"),
    [("Queued", "the operator places the job at its turn"), ("ClaimNotFound", "waits for something else first")],
)
def test_explain_says_what_comes_before_the_nodes(reason, says):
    status = running(conditions=[condition("Ready", "False", reason), condition("Placed", "False", reason)])
    nodes = [node(name, gpus=2) for name in ("n0", "n1")]
    assert says in dict(facts(made(status), ClusterView(nodes)))["Fits now"]


def test_a_job_that_may_not_grow_yet_says_when():
    def growth(**elastic: Any) -> str:
        status = running(replicas=1, elastic={"wantedReplicas": 2, **elastic})
        lines = status_lines(JobView(made(status, elastic={"pauseSeconds": 120}), []), NOW, 120)
        return next((line for line in lines if line.startswith("Growth")), "")

    def at(seconds: float) -> str:
        return (NOW + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")

    after = "`elastic.pauseSeconds` after the last resize"
    assert growth(resizedTime=at(-30)) == f"Growth      in 90s at the earliest: {after}"
    assert growth(resizedTime=at(-130)) == ""
    failed = "Growth      in 100s at the earliest: an attempt to grow has failed"
    assert growth(resizedTime=at(-30), retryTime=at(100)) == failed


def test_explain_says_that_the_reasons_are_those_of_more_replicas():
    elastic = running(replicas=1, elastic={"wantedReplicas": 2})
    assert "1 of 2 replicas. Reasons at full size:" in "\n".join(explanation(made(elastic), [], ClusterView(), 120))
    for status in (running(replicas=2, elastic={"wantedReplicas": 2}), running()):
        assert "full size" not in "\n".join(explanation(made(status), [], ClusterView(), 120))


def test_status_shows_the_best_checkpoint_of_all_places():
    tiers = [
        {"place": "/c", "step": 40, "everySteps": 10, "bestStep": 30, "bestLoss": "2.25"},
        {"place": "s3://b/c", "step": 40, "everySteps": 10, "bestStep": 20, "bestLoss": "10.5"},
    ]
    for shown, expected in ((tiers, ["Best step 30, evaluation loss 2.25"]), ([{"place": "/c", "step": 40}], [])):
        lines = status_lines(JobView(made(running(checkpointTiers=shown)), []), NOW, 80)
        assert [" ".join(line.split()) for line in lines if line.startswith("Best")] == expected


def test_lines_do_not_break_names_at_hyphens():
    message = f"claim `{'x' * 50}-checkpoints` does not exist"
    status = running(conditions=[condition("Ready", "False", "ClaimNotFound", message)])
    assert any("-checkpoints`" in line and "`xx" in line for line in status_lines(JobView(made(status), []), NOW, 80))


def test_a_finished_job_does_not_count_ready_ranks():
    status = running(conditions=[condition("Complete", "True", "Completed")], readyRanks="0/2", mesh={"generation": 3})
    lines = status_lines(JobView(made(status), []), NOW, 80)
    assert [line.split() for line in lines if line.startswith("Ranks")] == [
        ["Ranks", "ended", "in", "mesh", "generation", "3"]
    ]


@pytest.mark.parametrize(("state", "says"), [("Starting", "pods are not ready yet"), ("Running", "connection refused")])
def test_top_says_why_there_are_no_metrics(state, says):
    status = running(conditions=[condition("Ready", "False", state)])
    view = TopView(JobView(made(status), []), (), {"lm-w0-0": "connection refused"})
    assert says in top_lines(view, NOW, 80, 24)[-1]


def test_status_shows_ranks_by_rack_domain_and_node():
    text = "\n".join(
        placement_tree(made(wide_status(4, per_rack=2)).status, pods(*["Running"] * 3), every_worker=False)
    )
    assert text.splitlines() == [
        "rack rack00",
        "└─ domain d0",
        "   ├─ node000  worker 0  ranks 0-7    Running  PP 0, TP 0-7",
        "   └─ node001  worker 1  ranks 8-15   Running  PP 1, TP 0-7",
        "rack rack01",
        "└─ domain d1",
        "   ├─ node002  worker 2  ranks 16-23  Running  PP 2, TP 0-7",
        "   └─ node003  worker 3  ranks 24-31  no pod   PP 3, TP 0-7",
    ]


def test_large_jobs_are_summarized_except_for_workers_that_do_not_run():
    status = made(wide_status(128)).status
    states = ["Running"] * 128
    states[17] = "ImagePullBackOff"
    lines = placement_tree(status, pods(*states), every_worker=False)
    assert len(lines) == 9
    assert lines[0] == "rack rack00: 16 nodes, 16 workers: 16 Running"
    assert lines[1] == "rack rack01: 16 nodes, 16 workers: 15 Running, 1 ImagePullBackOff"
    assert "worker 17" in lines[2]
    assert len(placement_tree(status, pods(*states), every_worker=True)) > 128


def test_the_ledger_counts_the_time_since_the_last_booking():
    goodput = {"cause": "Training", "since": "2026-01-02T03:59:00Z", "booked": [
        {"cause": "Queued", "milliseconds": 60_000}, {"cause": "Training", "milliseconds": 120_000},
        {"cause": "Suspended", "milliseconds": 10_000_000}]}  # fmt: skip
    ledger = Ledger.of(made(running(goodput=goodput)).status.goodput, NOW)
    assert ledger is not None
    assert ledger.seconds == {"Suspended": 10_000, "Training": 180, "Queued": 60}
    assert ledger.ratio == pytest.approx(180 / 240)
    assert str(ledger) == "75%: Suspended 2h46m, Training 3m, Queued 60s"


@pytest.mark.parametrize(
    ("since", "cause", "seconds"),
    [
        ("2026-01-02T03:59:30Z", "Restarting", {"Training": 120, "Restarting": 30}),
        # A clock that is behind the operator's takes nothing away.
        ("2026-01-02T04:00:30Z", "Training", {"Training": 120}),
        ("2026-01-02T03:59:30Z", "", {"Training": 120}),
    ],
    ids=["a cause that was not booked yet", "a clock that is behind", "a job that has finished"],
)
def test_the_ledger_counts_only_the_time_of_the_current_cause(since, cause, seconds):
    goodput = {"cause": cause, "since": since, "booked": [{"cause": "Training", "milliseconds": 120_000}]}
    ledger = Ledger.of(made(running(goodput=goodput)).status.goodput, NOW)
    assert ledger is not None
    assert ledger.seconds == seconds


def test_the_next_step_depends_on_the_state():
    states = {
        "top": running(),
        "explain": running(conditions=[condition("Ready", "False", "Placing")]),
        "resume": running(conditions=[condition("Suspended", "True", "Suspended")]),
        "logs": running(conditions=[condition("Failed", "True", "RankFailure")]),
    }
    assert {next_step(made(status))[0]: status for status in states.values()}.keys() == states.keys()


def test_list_has_only_columns_with_values():
    jobs = [made(name="a"), made({}, name="b")]
    lines = list_lines(jobs, NOW, wide=False, namespaces=True)
    assert lines[0].split() == ["NAMESPACE", "NAME", "STATUS", "RANKS", "STEP", "LOSS", "LEFT", "AGE"]
    assert lines[2].split() == ["ml", "b", "Pending", "-", "-", "-", "-", "1h"]
    assert max(map(len, lines)) <= 80
    assert "MESSAGE" in list_lines(jobs, NOW, wide=True, namespaces=False)[0]


METRICS = """
# HELP ptj_step Last completed training step.
ptj_step{{job_name="lm",namespace="ml",rank="{rank}"}} {step}
ptj_rank_up{{job_name="lm",namespace="ml",rank="{rank}"}} {up}
ptj_step_duration_seconds_bucket{{job_name="lm",namespace="ml",rank="{rank}",le="1"}} 9
ptj_step_duration_seconds_count{{job_name="lm",namespace="ml",rank="{rank}"}} {step}
ptj_step_duration_seconds_sum{{job_name="lm",namespace="ml",rank="{rank}"}} {seconds}
ptj_data_wait_seconds_total{{job_name="lm",namespace="ml",rank="{rank}"}} {data}
ptj_memory_peak_bytes{{job_name="lm",namespace="ml",rank="{rank}",kind="host"}} 9e9
ptj_memory_peak_bytes{{job_name="lm",namespace="ml",rank="{rank}",kind="gpu_reserved"}} 2147483648
"""


def samples(steps: list[int], each: list[float], up: int = 1) -> dict[int, Any]:
    pages = [
        METRICS.format(rank=rank, step=step, up=up, seconds=step * seconds, data=step * 0.01)
        for rank, (step, seconds) in enumerate(zip(steps, each, strict=True))
    ]
    return read_samples("\n".join(pages))


def test_step_times_are_those_since_the_last_sample():
    before, now = samples([10, 10], [1.0, 1.0]), samples([20, 20], [0.75, 0.75])
    times = rank_times(now, before)
    assert [one.step_seconds for one in times] == pytest.approx([0.5, 0.5])
    assert times[0].data_seconds == pytest.approx(0.01)
    assert times[0].peak_memory == 2**31
    assert [one.step_seconds for one in rank_times(now, now)] == pytest.approx([0.75, 0.75])


def test_ranks_of_a_command_that_report_no_steps_are_no_stragglers():
    times = rank_times(samples([20, 0], [0.5, 0.0]), {})
    for spec, says in ({}, "1 straggler: rank 1"), ({"runtime": {"command": ["python"]}}, "0 stragglers"):
        shown = top_lines(TopView(JobView(made(**spec), pods("Running", "Running")), times), NOW, 80, 24)
        assert shown[1] == f"2 ranks, {says}"


def test_stragglers_are_slow_behind_or_down():
    times = rank_times(samples([20] * 4, [0.5, 0.5, 0.5, 0.8]), {})
    assert stragglers(times) == {3}
    assert slowness(times)[3] == pytest.approx(0.6)
    assert stragglers(rank_times(samples([20, 20, 19, 12], [0.5] * 4), {})) == {3}
    one_down = samples([20] * 2, [0.5] * 2) | {1: samples([20] * 2, [0.5] * 2, up=0)[1]}
    assert stragglers(rank_times(one_down, {})) == {1}


@pytest.mark.parametrize(
    ("cause", "step", "seconds", "shown"),
    [
        ("Training", 30, 240, True),
        ("RedoneSteps", 30, 240, True),
        ("Training", 30, 50, False),
        ("Training", None, 240, False),
        ("Restarting", 30, 240, False),
    ],
    ids=["hangs", "hangs while it repeats", "trains", "a command without steps", "restarts"],
)
def test_status_says_that_steps_have_stopped(cause: str, step: int | None, seconds: int, shown: bool):
    since = (NOW - timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")
    goodput = {"booked": [], "cause": cause, "since": since, "step": step}
    lines = status_lines(JobView(made(running(goodput=goodput)), pods("Running")), NOW, 100)
    training = next(line for line in lines if line.startswith("Training"))
    assert training.endswith("loss 3.2, the last step was reported 4m ago" if shown else "loss 3.2")


def test_a_rank_is_compared_with_those_of_its_pipeline_stage():
    even = rank_times(samples([20] * 4, [0.5, 1.0, 0.5, 1.0]), {})
    stages = {0: 0, 1: 1, 2: 0, 3: 1}
    assert stragglers(even, stages) == set(), "a stage with more layers is not slow"
    assert stragglers(rank_times(samples([20] * 4, [0.5, 1.0, 0.5, 1.6]), {}), stages) == {3}
    assert stragglers(even[:3], stages) == {1}, "a stage with one rank has no peers"
    plan = {"tensor": 1, "pipeline": 2, "data": 2, "microBatches": 2, "worldSize": 4, "workers": 1, "summary": "PP 2"}
    view = JobView(made(running(plan=plan)), pods("Running"))
    assert top_lines(TopView(view, even), NOW, 80, 24)[1] == "4 ranks, 0 stragglers"


def test_ranks_that_all_start_are_no_stragglers():
    times = rank_times(samples([0] * 4, [0.0] * 4, up=0), {})
    assert stragglers(times) == set()
    view = JobView(made(wide_status(1)), pods("Running"))
    assert top_lines(TopView(view, times), NOW, 80, 24)[1] == "4 ranks, none runs"


def test_top_does_not_call_a_rank_that_is_down_slow():
    one_down = samples([20] * 2, [0.5] * 2) | {1: samples([20] * 2, [0.5] * 2, up=0)[1]}
    view = JobView(made(wide_status(1)), pods("Running"))
    assert top_lines(TopView(view, rank_times(one_down, {})), NOW, 80, 24)[1] == "2 ranks, 1 down: rank 1"


def test_top_shows_the_slowest_ranks_that_fit():
    times = rank_times(samples([20] * 64, [0.5] * 63 + [0.9]), {})
    view = JobView(made(wide_status(8)), pods(*["Running"] * 8))
    lines = top_lines(TopView(view, times), NOW, 80, 24)
    assert len(lines) <= 24
    assert lines[1] == "64 ranks, 1 straggler: rank 63"
    assert lines[4].split()[:2] == ["63", "slow"]
    assert max(map(len, lines)) <= 80
    assert "faster ranks" in lines[-1]


def test_top_without_metrics_shows_the_status_and_says_why():
    view = JobView(made(), pods("Running", "Running"))
    lines = top_lines(TopView(view, [], {"lm-w0-0": "address not allowed"}), NOW, 80, 24)
    assert "address not allowed" in lines[-1]
    assert any("rack rack0" in line for line in lines)


@pytest.mark.parametrize(
    ("source", "workers", "ranks"),
    [
        (LogSource(), (0,), set()),
        (LogSource(ranks=(3,)), (1,), {3}),
        (LogSource(workers=(1, 0)), (1, 0), set()),
        (LogSource(every_worker=True), (0, 1), set()),
        (LogSource(stages=(0,)), (0, 1), {0, 1, 2, 3}),
        (LogSource(failed_first=True), (1,), {2}),
    ],
)
def test_selection_of_logs(source, workers, ranks):
    failure = JobEvent("e", NOW, True, "RankFailure", "Worker 1: rank 2 exited with code 1", 1, "")
    found = select(made(), source, pods("Running", "Running"), [failure])
    assert (found.workers, set(found.ranks)) == (workers, ranks)


def test_the_recorded_failure_is_chosen_and_pointed_to():
    failure = {"time": "2026-01-02T03:50:00Z", "generation": 2, "cause": "Hang", "message": "Rank 3 (worker 1)",
               "worker": 1, "pod": "lm-w1-0", "rank": 3, "log": "stuck\n"}  # fmt: skip
    job = made(running(lastFailure=failure))
    found = select(job, LogSource(failed_first=True), pods("Running", "Running"), [])
    assert (found.workers, set(found.ranks), found.pod) == ((1,), {3}, "lm-w1-0")
    shown = " ".join(" ".join(status_lines(JobView(job, pods("Running", "Running")), NOW, 80)).split())
    assert "Failure Hang of rank 3 10m ago, in mesh generation 2: meshwright logs lm --failed-first" in shown
    assert dict(facts(job, ClusterView()))["Failure"].endswith("meshwright logs lm --failed-first")
    nobody = made(running(lastFailure=failure | {"worker": None, "rank": None}))
    assert last_failure(nobody, NOW).startswith("Hang 10m ago, in mesh generation 2: ")


def test_a_job_that_ended_without_a_checkpoint_does_not_wait_for_one():
    ended = running() | {"conditions": [condition("Complete", "True", "Completed")], "checkpoint": None}
    for status, text in ((running(checkpoint=None), "none yet"), (ended, "none was reported")):
        shown = status_lines(JobView(made(status, checkpoint={"claimName": "c"}), []), NOW, 80)
        assert [line.split(maxsplit=1)[1] for line in shown if line.startswith("Checkpoint")] == [text]


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ({"kind": "Compute", "percent": 80}, "computation, 80% of a step"),
        ({"kind": "Communication", "percent": 35, "dimension": "data"}, "communication of the dimension `data`, 35%"),
        ({"kind": "Rank", "percent": 20, "rank": 3}, "rank 3, which computes longer than the other ranks of its stage"),
        ({"kind": "Pipeline", "percent": 25, "stage": 1}, "the pipeline: ranks wait for stage 1, 25% of a step"),
        ({"kind": "Data", "percent": 55, "rank": 2}, "data: rank 2 waits for samples, 55% of a step"),
    ],
)
def test_what_limits_a_step_is_shown_while_the_job_trains(limit, text):
    job = made(running(limit=limit))
    shown = " ".join(" ".join(status_lines(JobView(job, []), NOW, 80)).split())
    assert f"Limit {text}" in shown


def test_suspect_nodes_are_shown_while_the_job_avoids_them():
    entry = {"worker": 1, "failures": 2, "cause": "Hang", "lastFailure": "2026-01-02T02:00:00Z"}
    suspects = [
        {"node": "n1", **entry, "avoidedUntil": "2026-01-02T05:00:00Z"},
        {"node": "n2", **entry, "avoidedUntil": "2026-01-02T03:00:00Z"},
        {"node": "n3", **entry},
    ]
    shown = " ".join(" ".join(status_lines(JobView(made(running(suspectNodes=suspects)), []), NOW, 80)).split())
    assert "Avoids n1 for 1h after 2 failures (Hang) " in shown
    assert "n2" not in shown


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (LogSource(ranks=(9,)), "no rank 9: it has ranks 0 to 3"),
        (LogSource(workers=(5,)), "no worker 5: it has workers 0 to 1"),
        (LogSource(stages=(2,)), "no stage 2: it has stages 0 to 0"),
        (LogSource(failed_first=True), "no worker of lm has failed"),
    ],
)
def test_selections_that_do_not_exist(source, message):
    with pytest.raises(NotFoundError, match=message):
        select(made(), source, pods("Running", "Running"), [])


def test_lines_know_their_rank():
    pod = pods("Running")[0]
    assert LogLine.of(pod, "[rank 7] hello").rank == 7
    assert LogLine.of(pod, "[rank 7] hello").text == "hello"
    started = LogLine.of(pod, "2026 INFO rank started rank=3 generation=1")
    assert (started.rank, started.agent) == (3, True)
    assert LogLine.of(pod, "2026 INFO step 1/40 loss=5.7").rank is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [("complete", "Complete"), ("step=10", "step 10"), ("condition=placed", "Placed"),
     ("Condition=Ready=false", "Ready=False"), ("finished", "finished")],
)  # fmt: skip
def test_states_to_wait_for(text, shown):
    assert str(Target.parse(text)) == shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step", "use condition=NAME"),
        ("condition=Redy", "did you mean `ready`"),
        ("condition=zzzz", "use one of Ready"),
    ],
)
def test_states_that_do_not_exist(text, message):
    with pytest.raises(ValueError, match=message):
        Target.parse(text)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1h30m", 5400), ("1.5h", 5400)])
def test_durations(text, seconds):
    assert Duration().convert(text, None, None) == seconds


def test_wrong_durations_are_usage_errors():
    with pytest.raises(click.UsageError, match="as in 90s, 10m or 1h30m"):
        Duration().convert("soon", None, None)


@pytest.mark.parametrize(
    ("span", "text"),
    [(timedelta(seconds=5), "5s"), (timedelta(minutes=3, seconds=5), "3m5s"), (timedelta(minutes=59), "59m"),
     (timedelta(hours=5, minutes=4), "5h4m"), (timedelta(days=3, hours=2), "3d2h"), (timedelta(days=30), "30d")],
)  # fmt: skip
def test_ages(span, text):
    assert duration(span.total_seconds()) == text


def test_status_shows_the_run_that_a_job_began_from():
    source = {"step": 4000, "path": "/meshwright/checkpoints/base-0a1b2c3d/step-00004000"}
    shown = " ".join(" ".join(status_lines(JobView(made(running(resumedFrom=source)), []), NOW, 160)).split())
    assert f"Resumed from step 4,000, {source['path']}" in shown
    assert "Resumed" not in " ".join(status_lines(JobView(made(running()), []), NOW, 160))
