"""The demo's pure parts: from raw objects to what a person reads, and to the verdict."""

import io
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from meshwright_cli.demo import checks, pace
from meshwright_cli.demo.display import LiveDisplay
from meshwright_cli.demo.fault import Fault
from meshwright_cli.demo.line_view import LineWriter
from meshwright_cli.demo.live_view import render_live_view
from meshwright_cli.demo.loss_curve import LossCurve, sparkline
from meshwright_cli.demo.lost_node import LostNode
from meshwright_cli.demo.observer import gauge
from meshwright_cli.demo.pace import MOST_STEPS, Pace
from meshwright_cli.demo.snapshot import Sample, snapshot
from meshwright_cli.demo.story import Story
from meshwright_cli.demo.summary import DemoResult, summary
from meshwright_cli.demo.text import clock, format_age, kubectl_hint
from meshwright_cli.main import main

TIME = "2026-01-02T03:04:05Z"


def condition(kind: str, status: str = "True", reason: str = "Because", message: str = "") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": TIME}


def job(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "lm", "namespace": "default", "uid": "u1"}, "spec": {}, "status": status}


def running(step: int, generation: int = 1, ready: str = "4/4", total: int = 100, **more: Any) -> dict[str, Any]:
    return job(
        conditions=[condition("Ready", reason="Running")],
        mesh={"generation": generation},
        readyRanks=ready,
        step=step,
        totalSteps=total,
        loss=f"{10 / (step + 1):.4f}",
        tokensPerSecond=2048,
        etaSeconds=75,
        **more,
    )


def pod(worker: int, incarnation: int = 0, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": f"lm-w{worker}-{incarnation}", "labels": {"meshwright.dev/worker-index": str(worker)}},
        "spec": {"nodeName": f"node{worker}"},
        "status": {"phase": "Running", "podIP": f"127.0.0.{worker + 1}", **status},
    }


def event(reason: str, message: str, time: str = TIME, uid: str = "u1", kind: str = "Normal") -> dict[str, Any]:
    return {
        "metadata": {"name": f"lm.{reason}", "uid": f"e-{reason}"},
        "involvedObject": {"uid": uid, "name": "lm"},
        "type": kind,
        "reason": reason,
        "message": message,
        "lastTimestamp": time,
    }


def rendered(renderable, width=110):
    console = Console(width=width, record=True, force_terminal=False, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([], 8, ""),
        ([1.0], 8, "▁"),
        ([2.0, 2.0], 8, "▁▁"),
        ([0.0, 7.0], 8, "▁█"),
        (list(range(8)), 8, "▁▂▃▄▅▆▇█"),
        (list(range(16)), 8, "▁▂▃▄▅▆▇█"),
        ([1.0, 2.0], 0, ""),
    ],
)
def test_sparkline(values, width, drawn):
    assert sparkline(values, width) == drawn


def test_curve_keeps_the_newer_value_of_a_repeated_step():
    curve = LossCurve()
    for step, loss in [(1, 5.0), (3, 3.0), (2, 4.0), (3, 2.5)]:
        curve.add(step, loss)
    assert curve.values() == [5.0, 4.0, 2.5]
    assert curve.first == (1, 5.0)
    assert curve.last == (3, 2.5)


def test_words():
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert clock(75.9) == "1:15"
    assert format_age(TIME, now + timedelta(seconds=4)) == "4 s ago"
    assert format_age(TIME, now + timedelta(minutes=9)) == "9 min ago"
    assert format_age("soon", now) == ""


def test_snapshot_keeps_events_of_this_very_job_in_order():
    events = [
        event("Second", "later", "2026-01-02T03:04:09Z"),
        event("Foreign", "an older job of this name", uid="u0"),
        event("First", "earlier"),
    ]
    now = snapshot(running(3), [pod(1), pod(0)], events)
    assert [e.reason for e in now.events] == ["First", "Second"]
    assert [p.worker for p in now.pods] == [0, 1]
    assert (now.state, now.step, now.total_steps, now.generation) == ("Running", 3, 100, 1)


def test_snapshot_of_a_job_that_was_not_observed_yet():
    now = snapshot(job(), [], [])
    assert (now.state, now.step, now.loss, now.generation) == ("Pending", 0, None, 0)
    assert "Pending" in rendered(render_live_view(now, LossCurve(), 1.0, datetime.now(UTC), "hint"))


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "Running"),
        ({"metadata": {"name": "p", "deletionTimestamp": TIME}}, "Terminating"),
        (
            {"status": {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]}},
            "ImagePullBackOff",
        ),
        ({"status": {"containerStatuses": [{"state": {"terminated": {"reason": "Completed"}}}]}}, "Completed"),
        ({"spec": {"schedulingGates": [{"name": "g"}]}, "status": {"phase": "Pending"}}, "SchedulingGated"),
    ],
)
def test_pod_state(change, state):
    assert snapshot(running(1), [{**pod(0), **change}], []).pods[0].state == state


def test_lines_tell_each_event_once_and_progress_now_and_then():
    writer = LineWriter()
    first = writer.lines(snapshot(running(1), [], [event("Placed", "four nodes")]), 0.0)
    assert first[0] == "[ 0:00] Placed: four nodes"
    assert "step 1/100" in first[1]
    assert writer.lines(snapshot(running(2), [], [event("Placed", "four nodes")]), 1.0) == []
    assert "step 3/100" in writer.lines(snapshot(running(3), [], []), 6.0)[0]
    assert writer.lines(snapshot(running(3), [], []), 60.0) == []


def test_picture_shows_what_matters():
    status = {
        "checkpoint": {"step": 40, "time": TIME, "path": "/c"},
        "restarts": [{"cause": "PodLost", "count": 1}],
        "restartCount": 1,
        "plan": {
            **dict.fromkeys(("tensor", "pipeline", "data", "microBatches", "worldSize", "workers"), 2),
            "summary": "TP 2 x PP 2",
        },
        "placement": {"workers": [{"worker": 0, "incarnation": 0, "pod": "lm-w0-0", "node": "node0", "ranks": "0-1"}]},
    }
    now = snapshot(running(50, **status), [pod(0)], [event("PodLost", "gone", kind="Warning")])
    curve = LossCurve({1: 5.0, 50: 0.2})
    text = rendered(
        render_live_view(now, curve, 75.0, datetime(2026, 1, 2, 3, 4, 9, tzinfo=UTC), "export KUBECONFIG=x")
    )
    for expected in ("50/100", "4/4", "TP 2 x PP 2", "PodLost 1", "lm-w0-0", "0-1", "step 40, 4 s ago", "2,048", "█"):
        assert expected in text, expected
    assert "ETA 1:15" in text
    assert "KUBECONFIG" in text


@pytest.mark.parametrize(("path", "columns", "shown"), [
    ("/home/ann/d", 80, "to use kubectl in another terminal:  export KUBECONFIG=/home/ann/d"),
    ("/home/ann/d", 68, "to use kubectl in another terminal:  export KUBECONFIG=/home/ann/d"),
    ("/home/ann/d", 60, "to use kubectl in another terminal:  export KUBECONFIG=~/d"),
    ("/home/ann/d", 40, "export KUBECONFIG=/home/ann/d"),
    ("/home/ann/d", 25, "export KUBECONFIG=~/d"),
    ("/srv/" + "x" * 40, 60, "to use kubectl: see the command above"),
])  # fmt: skip
def test_the_command_for_kubectl_is_never_cut(path: str, columns: int, shown: str):
    assert kubectl_hint(Path(path), columns, Path("/home/ann")) == shown


def test_the_last_view_does_not_name_a_cluster_that_is_gone(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")  # a dumb one is shown nothing live
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
    with LiveDisplay(console, Path("/srv/kubeconfig")) as shown:
        shown.show(snapshot(running(50), [pod(0)], []), LossCurve({}))
        assert "export KUBECONFIG=/srv/kubeconfig" in console.file.getvalue()
        during = len(console.file.getvalue())
    after = console.file.getvalue()[during:]
    assert "50/100" in after
    assert "KUBECONFIG" not in after


def test_picture_fits_a_terminal_of_80_x_24():
    """The view of the demo's job while it has fewer replicas: nothing is cut, and the latest message is there."""
    plan = {**dict.fromkeys(("tensor", "pipeline", "data", "microBatches", "worldSize", "workers"), 2)}
    status = {
        "checkpoint": {"step": 40, "time": TIME, "path": "/c"},
        "restarts": [{"cause": "PodLost", "count": 1}, {"cause": "Rescaled", "count": 2}],
        "restartCount": 3,
        "plan": {**plan, "summary": "TP 2 x PP 2 x DP 1"},
    }
    events = [event(f"Reason{number}", "a long note " * 9) for number in range(9)]
    now = snapshot(sized(50, 3, 1, **status), [pod(worker) for worker in range(4)], events)
    curve = LossCurve({step: 5.0 / step for step in range(1, 51)})
    message = "NODE: rack1-spare joins the cluster"
    view = render_live_view(now, curve, 75.0, datetime.now(UTC), "export KUBECONFIG=" + "x" * 90, message, 24)
    lines = rendered(view, 80).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for expected in (
        "replicas 1 of 2",
        "3 (PodLost 1, Rescaled 2)",
        message,
        "Reason8",
        "lm-w3-0",
        "ETA 1:15",
        "KUBECONFIG",
    ):
        assert expected in text, text
    assert "Reason0" not in text


def test_fault_strikes_once_after_a_tenth_of_the_steps_when_every_rank_trains():
    pods = [pod(0), pod(1)]
    assert not Fault().due(snapshot(running(9), pods, []))
    assert not Fault().due(snapshot(running(60, ready="3/4"), pods, []))
    assert not Fault().due(snapshot(running(60), [], []))
    fault = Fault()
    now = snapshot(running(10), pods, [])
    assert fault.due(now)
    fault.deleted_pod, fault.generation, fault.step = now.pods[-1], now.generation, now.step
    assert not fault.due(now)


@pytest.mark.parametrize(
    ("step_seconds", "steps"), [(0.4, 0), (0.3, 0), (0.1, 450), (0.01, 4500), (0.0001, MOST_STEPS)]
)
def test_a_job_that_is_too_short_for_the_story_gets_more_steps(monkeypatch, step_seconds, steps):
    clock = [50.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: clock[0])

    def at(step, generation=1, ready="4/4", total=100):
        taken = snapshot(running(step, generation, ready, total), [pod(0), pod(1)], [])
        return replace(taken, sample=Sample(step, 2.0))

    found = Pace()
    assert not found.observe(at(1, ready="3/4"))
    assert not found.observe(at(2))
    clock[0] += 3 * step_seconds
    assert not found.observe(at(5)), "too few steps to tell"
    assert not found.settled(at(5))
    clock[0] += 7 * step_seconds
    assert found.observe(at(12)) == bool(steps)
    assert found.steps == steps
    assert found.step_seconds == pytest.approx(step_seconds)
    assert found.settled(at(13)) == (not steps)
    assert not found.observe(at(14)), "only once"
    if steps:
        assert not found.settled(at(14, generation=2, ready="0/4", total=steps))
        assert found.settled(at(15, generation=2, total=steps))


def struck_fault():
    before = snapshot(running(50), [pod(0), pod(1)], [])
    return Fault(deleted_pod=before.pods[-1], generation=1, step=50)


def test_recovery_is_seen_only_with_a_new_generation_a_new_pod_and_every_rank():
    fault = struck_fault()
    assert not fault.observe(snapshot(running(52), [pod(0), pod(1)], []))
    assert fault.step == 52
    assert not fault.observe(snapshot(running(52, generation=2, ready="2/4"), [pod(0), pod(1, 1)], []))
    assert not fault.observe(snapshot(running(52, generation=2), [pod(0), pod(1)], []))
    assert fault.observe(snapshot(running(53, generation=2), [pod(0), pod(1, 1)], []))
    assert fault.replacement is not None
    assert fault.replacement.name == "lm-w1-1"
    assert not fault.observe(snapshot(running(54, generation=2), [pod(0), pod(1, 1)], []))


def sized(step: int, generation: int, replicas: int, ready: str = "4/4", **more: Any) -> dict[str, Any]:
    """An elastic job that wants two replicas."""
    return running(step, generation, ready, replicas=replicas, elastic={"wantedReplicas": 2}, **more)


def resized_node():
    """A node that was lost in generation 2 and another one that joined, both with the resize that followed."""
    pods = [pod(0), pod(1)]
    node = LostNode(Path(), rack="rack1", name="node1", replicas=2, generation=2, step=61, lost_at=time.monotonic())
    assert not node.observe(snapshot(sized(62, 2, 2), pods, []))
    assert not node.observe(snapshot(sized(60, 3, 1, ready="0/2"), pods[:1], []))
    smaller = snapshot(sized(61, 3, 1, ready="2/2"), pods[:1], [])
    assert node.observe(smaller)
    node.resized(smaller, 60)
    assert not node.join_due(smaller)  # it is to be seen with fewer replicas first
    node.joined, node.joined_at = "rack1-spare", time.monotonic()
    rescaling = [condition("Ready", reason="Running"), condition("Rescaling")]
    assert not node.observe(
        snapshot({**sized(71, 4, 2), "status": {**sized(71, 4, 2)["status"], "conditions": rescaling}}, pods, [])
    )
    larger = snapshot(sized(72, 4, 2), pods, [])
    assert node.observe(larger)
    node.resized(larger, 70)
    assert not node.observe(larger)
    assert node.repeated_steps == 2
    return node


def test_a_node_is_lost_after_a_fifth_of_the_steps_but_never_that_of_rank_0():
    node, pods = LostNode(Path()), [pod(0), pod(1)]
    assert node.due(snapshot(sized(20, 2, 2), pods, []))
    assert not node.due(snapshot(sized(19, 2, 2), pods, []))
    assert not node.due(snapshot(sized(20, 2, 1), pods, []))
    assert not node.due(snapshot(sized(20, 2, 2, ready="3/4"), pods, []))
    assert not node.due(snapshot(sized(20, 2, 2), pods[:1], []))


PLAN = {"tensor": 2, "pipeline": 1, "data": 1, "microBatches": 1, "worldSize": 2, "workers": 1}
PLACEMENT = {"workers": [{"worker": 0, "incarnation": 0, "pod": "p", "node": "n0", "ranks": "0-1", "rack": "r0"}]}


def completed(generation=2, restarts=1, step=100):
    done = [condition("Ready", reason="Completed"), condition("Complete")]
    return snapshot(
        job(
            conditions=done, mesh={"generation": generation}, readyRanks="0/4", step=step, totalSteps=100,
            restartCount=restarts, checkpoint={"step": 100, "time": TIME, "path": "/c"}, plan=PLAN, placement=PLACEMENT,
        ),
        [],
        [event("Recovered", "Training again after 6.1 s: replace pod 2.0 (generation 2, PodLost)")],
    )  # fmt: skip


SAVED = checks.CheckpointRecord(100, 1600, "d1")


def recovered_fault():
    fault = struck_fault()
    fault.recovered_at, fault.replacement = 6.0, fault.deleted_pod
    return fault


def story(fault=None, node=None):
    return Story(fault or recovered_fault(), node)


def test_evidence_of_a_successful_run():
    assert checks.failed_checks(completed(), story(), SAVED, 1600, "d1") == []
    assert checks.failed_checks(completed(generation=4), story(node=resized_node()), SAVED, 1600, "d1") == []
    assert checks.failed_checks(completed(generation=1, restarts=0), None, SAVED, 1600, "") == []


def test_evidence_names_what_is_missing_of_a_lost_node_and_of_the_data():
    def problems(node, digest="d1"):
        return " ".join(checks.failed_checks(completed(generation=4), story(node=node), SAVED, 1600, digest))

    assert "the data digest is d1, but that of the data is d2" in problems(resized_node(), "d2")
    assert "no node was removed" in problems(LostNode(Path()))
    node = resized_node()
    node.grown = None
    assert "did not train with 2 replicas again after rack1-spare joined" in problems(node)
    node.shrunk = None
    assert "did not train on without node1" in problems(node)


@pytest.mark.parametrize(
    ("end", "fault", "saved", "word"),
    [
        (snapshot(running(80), [], []), recovered_fault(), SAVED, "not Complete"),
        (completed(step=99), recovered_fault(), SAVED, "99 of 100"),
        (completed(), recovered_fault(), None, "no checkpoint"),
        (completed(), recovered_fault(), checks.CheckpointRecord(100, 1584, "d"), "1584 samples"),
        (completed(), Fault(), SAVED, "no worker was deleted"),
        (completed(), struck_fault(), SAVED, "no new mesh generation"),
        (completed(generation=1), recovered_fault(), SAVED, "still 1"),
        (completed(restarts=0), recovered_fault(), SAVED, "no restart"),
    ],
)
def test_evidence_names_what_is_missing(end, fault, saved, word):
    problems = checks.failed_checks(end, story(fault), saved, 1600, "")
    assert any(word in problem for problem in problems), problems


def test_summary_has_every_part():
    curve = LossCurve({1: 5.75, 100: 1.9})
    ending = DemoResult(completed(), curve, story(node=resized_node()), SAVED, "def ", "def f():", 150.0, "d1")
    text = rendered(summary(ending))
    for expected in (
        "5.7500 (step 1)",
        "1.9000 (step 100)",
        "lm-w1-0",
        "Training again after 6.1 s",
        "1,600 samples",
        "node1 removed near step 62; no other node was free",
        "trained on with 1 of 2 replicas after",
        "resumed after step 60: 2 completed steps were repeated",
        "rack1-spare",
        "trained with 2 replicas again after",
        "from step 71 on",
        "d1, as computed from the data alone",
        "2:30",
    ):
        assert expected in text, expected
    assert "[0 d0p0t0] [1 d0p0t1]" in text
    assert "def f():" in text


def test_gauge_reads_the_first_series():
    text = '# HELP ptj_step Steps.\n# TYPE ptj_step gauge\nptj_step{job="a b",rank="0"} 17.0\nptj_step_x 3\n'
    assert gauge(text, "ptj_step") == 17.0
    assert gauge(text, "ptj_loss") is None


def test_a_manifest_without_checkpoints_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """`meshwright demo --manifest examples/ten-line.yaml` used to run, and to fail at the end."""
    example = Path(__file__).parents[2] / "examples" / "ten-line.yaml"
    words = ["demo", "--manifest", str(example), "--directory", str(tmp_path / "demo")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert "the demo needs `spec.checkpoint`" in result.output
    assert "as in examples/stdlib-lm.yaml" in result.output
