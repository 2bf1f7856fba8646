"""Ranks that hang, agents that fall silent, nodes that are emptied: who is named, what is done, what it counts as."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from meshwright.api.conditions import find
from meshwright.protocol.messages import AgentState, Progress, RankProcess, RankWork, WorkerReport
from meshwright_operator.controller.status_patch import is_news, is_urgent
from meshwright_operator.decide import hang_detection
from meshwright_operator.decide.agents import Agents, ReceivedReport
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.failure_detection import detect
from meshwright_operator.decide.hang_detection import HangRule, seconds_until_hung
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.placement_outcome import apply_move
from meshwright_operator.decide.restart_policy import Interruption
from meshwright_operator.decide.training_state import ranks_that_train
from tests.operator.builders import NOW, agents, observed, pod, report, running_status
from tests.operator.test_gang_races import small
from tests.operator.world import World

CHECKPOINT = {"claimName": "claim"}


def trains(worker: int, idle: float, *, step: int | None = 7, state: str = "", **fields: object) -> WorkerReport:
    ranks = [
        RankProcess(rank=2 * worker + n, pid=100 + n, step=step, phase="load", idle_seconds=idle, state=state)
        for n in range(2)
    ]
    return report(worker, AgentState.RUNNING, ranks=ranks, **fields)


def received(reports: list[WorkerReport], ages: dict[int, float] | None = None, listening: float = 1000.0) -> Agents:
    ages = ages or {}
    found = {r.worker: ReceivedReport(r, ages.get(r.worker, 0.1), 0.0) for r in reports}
    return Agents(
        waiting_agents=agents().waiting_agents, reports=found, newest_generation=1, listening_seconds=listening
    )


def verdict(seen: Observed) -> Interruption | None:
    found = detect(seen)
    assert found is None or isinstance(found, Interruption)
    return found


def test_all_ranks_that_train_are_no_hang() -> None:
    assert verdict(observed(received=received([trains(w, 3.0) for w in range(4)]))) is None


@pytest.mark.parametrize(
    ("chosen", "step_seconds", "started", "expected"),
    [
        (None, 0.5, True, 300),
        (None, 60.0, True, 600),
        (None, float("inf"), True, 300),
        (20, 60.0, True, 20),
        (20, 0.5, False, 900),
        (2000, 0.5, False, 2000),
    ],
)
def test_the_time_out_follows_the_step_time_unless_it_is_set(
    chosen: int | None, step_seconds: float, started: bool, expected: float
) -> None:
    first = trains(0, 0.0, progress=Progress(step=7, loss=1.0, step_seconds=step_seconds))
    recovery = {"hangTimeoutSeconds": chosen} if chosen else {}
    assert HangRule(observed(received=received([first]), recovery=recovery)).timeout(started) == expected


def test_the_time_of_a_step_is_not_looked_up_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Observed] = []
    leader = hang_detection.rank_zero_worker
    monkeypatch.setattr(hang_detection, "rank_zero_worker", lambda seen: asked.append(seen) or leader(seen))
    assert verdict(observed(received=received([trains(w, 3.0) for w in range(4)]))) is None
    assert 0 < len(asked) < 8, "not for each of the eight ranks: a look-up reads all workers"


@pytest.mark.parametrize(("chosen", "idle", "expected"), [(20, 13.0, 6.9), (60, 58.0, 1.9), (None, 299.0, 0.9)])
def test_a_job_is_looked_at_again_when_a_rank_would_count_as_hung(
    chosen: int | None, idle: float, expected: float
) -> None:
    """Reports without progress are looked at only every ten seconds."""
    recovery = {"hangTimeoutSeconds": chosen} if chosen else {}
    reports = [trains(w, idle if w == 2 else 3.0) for w in range(4)]
    decision = decide(observed(status=running_status(), received=received(reports), recovery=recovery))
    assert decision.requeue_after == pytest.approx(expected)


def test_the_rank_that_is_behind_is_named_with_its_node_step_and_phase() -> None:
    reports = [trains(w, 301.0, step=6 if w == 2 else 7) for w in range(4)]
    found = verdict(observed(received=received(reports)))
    assert found is not None
    assert found.cause.name == "Hang"
    for words in ("Rank 4 (worker 2 on n2, pid 100)", "301 s", "step: 6", "7 ranks wait for it"):
        assert words in found.message


def test_a_rank_whose_process_does_not_run_is_named_before_one_that_is_behind() -> None:
    reports = [trains(0, 310.0, step=6), trains(1, 301.0), trains(2, 301.0), trains(3, 301.0, state="T")]
    found = verdict(observed(received=received(reports)))
    assert found is not None
    assert "Rank 6 (worker 3 on n3, pid 100, stopped)" in found.message


def test_a_rank_that_never_finished_a_step_gets_the_time_of_a_start() -> None:
    starting = [trains(w, 600.0, step=None) for w in range(4)]
    assert verdict(observed(received=received(starting), recovery={"hangTimeoutSeconds": 10})) is None
    found = verdict(observed(received=received([trains(w, 901.0, step=None) for w in range(4)])))
    assert found is not None
    assert "Last completed phase: load" in found.message


def tokenizes(worker: int, idle: float, done: int, **fields: Any) -> WorkerReport:
    """The first rank of a worker tokenizes, the second waits for it since the start."""
    work = RankWork(name="tokenize", done=done, total=12_000_000_000, seconds=100.0)
    ranks = [
        RankProcess(rank=2 * worker, pid=100, idle_seconds=idle, work=work.model_copy(update=fields)),
        RankProcess(rank=2 * worker + 1, pid=101, idle_seconds=3000.0),
    ]
    return report(worker, AgentState.STARTING, ranks=ranks)


def test_ranks_that_wait_while_text_is_tokenized_do_not_hang() -> None:
    reports = [tokenizes(w, 20.0 if w == 1 else 1000.0, 5) for w in range(4)]
    seen = observed(status=running_status(), received=received(reports))
    assert verdict(seen) is None
    assert seconds_until_hung(seen) == pytest.approx(900 - 20.1)


def test_the_rank_that_stopped_tokenizing_is_named_and_not_those_that_wait_for_it() -> None:
    others = [trains(w, 1000.0, step=None) for w in range(3)]
    found = verdict(observed(received=received([*others, tokenizes(3, 901.0, 3_000_000_000)])))
    assert found is not None
    assert "Rank 6 (worker 3 on n3, pid 100) has made no progress for 901 s" in found.message
    assert "Tokenizing the data: 25% of 12 GB at 30 MB/s" in found.message


def test_a_rank_that_has_loaded_its_part_waits_for_the_one_that_stopped() -> None:
    """Both told how far they are, and the first has done nothing for longer."""
    ended = tokenizes(0, 2000.0, 12_000_000_000, name="checkpoint")
    others = [trains(w, 3000.0, step=None) for w in (1, 2)]
    stopped = tokenizes(3, 901.0, 3_000_000_000, name="checkpoint")
    found = verdict(observed(received=received([ended, *others, stopped])))
    assert found is not None
    assert "Rank 6 (worker 3 on n3, pid 100) has made no progress for 901 s" in found.message
    assert "Loading the checkpoint: 25% of 12 GB at 30 MB/s" in found.message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("verify", "Verifying the checkpoint"),
        ("checkpoint", "Loading the checkpoint"),
        ("draw", "Drawing the initial weights"),
        ("adapter", "Loading the initial adapter"),
        ("weights", "Loading the initial weights"),
    ],
)
def test_a_job_says_how_much_is_loaded_on_the_rank_that_is_furthest_behind(name: str, text: str) -> None:
    reports = [tokenizes(w, 1.0, done * 1_000_000_000, name=name) for w, done in enumerate((6, 3, 12))]
    decision = decide(observed(status=running_status(), received=received(reports)))
    ready = find(decision.status.conditions, "Ready")
    assert ready is not None
    assert ready.message == (
        "0 of 8 ranks are training in generation 1. "
        f"{text}: 25% of 12 GB at 30 MB/s on worker 1, the slowest of 3 workers"
    )


def test_a_job_says_how_much_text_is_tokenized_where_that_takes_longest() -> None:
    def message(*reports: WorkerReport) -> str:
        decision = decide(observed(status=running_status(), received=received([*reports])))
        ready = find(decision.status.conditions, "Ready")
        assert ready is not None
        assert ready.status == "False"
        return ready.message

    training = "0 of 8 ranks are training in generation 1"
    others = [trains(w, 1.0, step=None, state="") for w in range(2)]
    starting = [each.model_copy(update={"state": AgentState.STARTING}) for each in others]
    two = tokenizes(2, 1.0, 6_000_000_000), tokenizes(3, 1.0, 3_000_000_000)
    assert message(*starting, *two) == (
        f"{training}. Tokenizing the data: 25% of 12 GB at 30 MB/s on worker 3, the slowest of 2 workers"
    )
    assert message(*starting, two[0]) == f"{training}. Tokenizing the data: 50% of 12 GB at 60 MB/s on worker 2"
    mixture = [tokenizes(2 + n, 1.0, (6 - 3 * n) * 1_000_000_000, part=1 + n, parts=3) for n in range(2)]
    assert "Tokenizing the data, corpus 1 of 3: 50%" in message(*starting, *mixture), "a later corpus is further"
    lists = tokenizes(2, 1.0, 120_000, name="list", total=None)
    assert message(lists, two[1]) == (
        f"{training}. Listing the files of the data: 120,000 files at 1,200/s on worker 2, the slowest of 2 workers"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "of a later version"},
        {"done": 13_000_000_000},
        {"done": -1},
        {"total": 0},
        {"seconds": 0.0},
        {"seconds": float("nan")},
        {"part": 3, "parts": 2},
    ],
    ids=str,
)
def test_work_that_makes_no_sense_is_not_shown(fields: dict[str, Any]) -> None:
    """Reports come from a user's pod."""
    strange = tokenizes(0, 1.0, **{"done": 3_000_000_000, **fields})
    decision = decide(observed(status=running_status(), received=received([strange])))
    ready = find(decision.status.conditions, "Ready")
    assert ready is not None
    assert ready.message == "0 of 8 ranks are training in generation 1"


def test_a_job_with_one_rank_has_one_rank_in_its_message() -> None:
    assert ranks_that_train(0, 1) == "0 of 1 rank is training"
    assert ranks_that_train(1, 2) == "1 of 2 ranks are training"


def test_how_much_text_is_tokenized_is_no_urgent_write() -> None:
    """It shares the budget of all jobs' progress."""
    statuses = []
    for done in (3_000_000_000, 6_000_000_000):
        decision = decide(observed(status=running_status(), received=received([tokenizes(0, 1.0, done)])))
        statuses.append(dict(decision.status.wire()))
    assert statuses[0] != statuses[1]
    assert not is_urgent(*statuses)
    assert not is_news(*statuses)


def test_before_the_first_step_no_rank_hangs_while_another_one_loads_or_compiles() -> None:
    """Each rank waits for the slowest one, which reports its progress: a load of 405B parameters takes an hour."""
    loads = [trains(w, 20.0 if w == 2 else 3000.0, step=None) for w in range(4)]
    seen = observed(status=running_status(), received=received(loads))
    assert verdict(seen) is None
    assert seconds_until_hung(seen) == pytest.approx(900 - 20.0 - 0.1)
    found = verdict(observed(received=received([trains(w, 950.0 if w == 2 else 3000.0, step=None) for w in range(4)])))
    assert found is not None
    assert found.detected_in == pytest.approx(950.1), "the time before was that of the load"
    assert "Rank 0 (worker 0" in found.message


@pytest.mark.parametrize(("state", "idle", "hangs"), [("T", 901.0, True), ("T", 890.0, False), ("", 901.0, False)])
def test_a_stopped_process_hangs_also_while_others_load(state: str, idle: float, hangs: bool) -> None:
    loads = [trains(w, 20.0, step=None) for w in range(3)] + [trains(3, idle, step=None, state=state)]
    found = verdict(observed(received=received(loads)))
    assert (found is not None) is hangs
    assert found is None or "Rank 6 (worker 3 on n3, pid 100, stopped)" in found.message


def test_a_rank_that_has_made_steps_hangs_whatever_others_report() -> None:
    found = verdict(observed(received=received([trains(w, 301.0 if w == 2 else 3.0) for w in range(4)])))
    assert found is not None
    assert found.detected_in == pytest.approx(301.1)


def test_a_hang_starts_all_ranks_again_in_their_pods_and_counts() -> None:
    decision = decide(observed(received=received([trains(w, 301.0) for w in range(4)])))
    assert (decision.mesh.generation, decision.mesh.cause) == (2, "Hang")
    assert decision.status.restarts_toward_limit == 1
    assert not decision.delete
    assert [note.reason for note in decision.events][0] == "Hang"


def test_hangs_use_up_the_limit() -> None:
    seen = observed(received=received([trains(w, 301.0) for w in range(4)]), recovery={"maxRestarts": 0})
    decision = decide(seen)
    assert any(c.type == "Failed" and c.status == "True" for c in decision.status.conditions)
    assert len(decision.delete) == 4


def commands(idle: dict[int, float], *, state: str = "", timeout: int | None = None) -> Observed:
    """A user's command whose workers have written no output for so long."""
    reports = [trains(w, seconds, step=None, state=state) for w, seconds in idle.items()]
    seen = observed(received=received(reports), recovery={"hangTimeoutSeconds": timeout} if timeout else {})
    command = seen.spec.model_copy(update={"runtime": seen.spec.runtime.model_copy(update={"command": ["x"]})})
    return replace(seen, spec=command)


def test_a_users_command_does_not_count_as_hanging_unless_a_timeout_is_set() -> None:
    idle = dict.fromkeys(range(4), 5000.0)
    assert detect(commands(idle)) is None
    assert detect(commands(idle, timeout=6000)) is None
    found = verdict(commands(idle, timeout=600))
    assert found is not None
    assert (found.cause.name, found.message) == ("Hang", "No rank has written output for 5000 s")


def test_one_rank_that_writes_output_shows_that_all_make_progress() -> None:
    assert detect(commands({0: 3.0, 1: 5000.0, 2: 5000.0, 3: 5000.0}, timeout=600)) is None
    assert detect(commands({0: 5000.0, 1: 5000.0, 2: 5000.0}, timeout=600)) is None, "worker 3 has not reported"


def test_a_rank_of_a_command_that_exits_with_0_while_others_wait_for_it_is_named() -> None:
    seen = commands({0: 5000.0, 1: 5000.0, 2: 5000.0, 3: 5000.0}, timeout=600)
    reports = [one.report for one in seen.agents.reports.values()]
    first, second = reports[0].ranks
    reports[0] = reports[0].model_copy(update={"ranks": [first.model_copy(update={"exit_code": 0}), second]})
    found = verdict(replace(seen, agents=received(reports)))
    assert found is not None
    assert (found.cause.name, found.rank, found.message) == (
        *("Hang", 1),
        "Rank 1 (worker 0 on n0) and 6 other ranks have not written output for 5000 s. "
        "Rank 0 has exited with code 0 already",
    )
    reports[0] = reports[0].model_copy(update={"ranks": [first.model_copy(update={"exit_code": 3}), second]})
    assert detect(replace(seen, agents=received(reports))) is None, "another detector names the failed rank"


def test_a_command_that_writes_nothing_or_is_stopped_is_visible() -> None:
    decision = decide(commands(dict.fromkeys(range(4), 400.0), state="T"))
    ready = next(c for c in decision.status.conditions if c.type == "Ready")
    assert ready.status == "True"
    assert "No rank has written output for 300 s" in ready.message
    assert "Rank 0 (worker 0 on n0) is stopped" in ready.message
    quiet = decide(commands({0: 3.0, 1: 400.0, 2: 400.0, 3: 400.0}))
    assert (
        next(c for c in quiet.status.conditions if c.type == "Ready").message == "8 ranks are training in generation 1"
    )


def test_a_silent_agent_whose_peers_train_on_is_left_alone() -> None:
    reports = [trains(w, 1.0) for w in range(4)]
    assert verdict(observed(received=received(reports, {2: 500.0}))) is None


def test_a_silent_agent_is_lost_when_training_stands() -> None:
    reports = [trains(w, 70.0) for w in range(4)]
    seen = observed(received=received(reports, {2: 75.0}))
    found = verdict(seen)
    assert found is not None
    assert found.cause.name == "PodLost"
    assert "worker 2 on n2 for 75 s" in found.message
    decision = decide(seen)
    assert [p.name for p in decision.delete] == ["train-w2-0"]
    assert decision.place is None, "the old pod must be gone first"
    assert decision.status.restarts_toward_limit == 0


@pytest.mark.parametrize(("idle", "lost"), [(290.0, False), (301.0, True)])
def test_an_agent_that_is_silent_during_a_long_step_is_left_alone(idle: float, lost: bool) -> None:
    """The others finish no step either for so long: three steps without one show that training stands."""
    first = trains(0, idle, progress=Progress(step=7, loss=1.0, step_seconds=100.0))
    reports = [first, *(trains(w, idle) for w in range(1, 4))]
    found = verdict(observed(received=received(reports, {2: 75.0})))
    assert (found is not None and found.cause.name == "PodLost") is lost


def test_when_nobody_is_heard_the_operator_is_the_one_cut_off() -> None:
    reports = [trains(w, 70.0) for w in range(4)]
    assert verdict(observed(received=received(reports, dict.fromkeys(range(4), 75.0)))) is None


def test_an_operator_that_just_started_calls_nobody_silent() -> None:
    assert verdict(observed(received=received([trains(w, 70.0) for w in range(3)], listening=20.0))) is None
    found = verdict(observed(received=received([trains(w, 70.0) for w in range(3)], listening=61.0)))
    assert found is not None
    assert "worker 3" in found.message


def test_an_agent_whose_old_ranks_do_not_end_loses_its_pod() -> None:
    reports = [trains(w, 1.0, generation=2 if w != 1 else 1) for w in range(4)]
    status = running_status()
    assert status.mesh is not None
    status.mesh.generation = 2
    seen = observed(status=status, received=received(reports))
    assert detect(seen) is None, "it was told a minute ago"
    seen = replace(seen, now=NOW + timedelta(seconds=hang_detection.ADOPT_GENERATION_SECONDS))
    found = verdict(seen)
    assert found is not None
    assert "Ranks of an older generation than 2 do not exit: worker 1 on n1" in found.message
    assert [w.index for w in found.lost] == [1]
    just_started = observed(status=status, received=received(reports, listening=100.0), now=seen.now)
    assert detect(just_started) is None, "agents learned of the generation only when this operator started"


async def test_a_hang_and_a_cut_off_agent_in_a_whole_job() -> None:
    world = World(1, nodes=3, work=700.0)
    world.submit(small("stuck", 2))
    await world.run(20)
    world.agents["stuck-w1-0"].hung = world.agents["stuck-w0-0"].hung = True
    await world.run(320)
    status = world.status("stuck")
    assert (status["mesh"]["generation"], status["mesh"]["cause"]) == (2, "Hang")
    assert {pod.name for pod in world.pods()} == {"stuck-w0-0", "stuck-w1-0"}
    world.agents["stuck-w1-0"].silent = True
    world.agents["stuck-w0-0"].hung = True
    await world.run(120)
    status = world.status("stuck")
    assert (status["mesh"]["generation"], status["mesh"]["cause"]) == (3, "PodLost")
    assert {pod.name for pod in world.pods()} == {"stuck-w0-0", "stuck-w1-1"}
    assert {entry["cause"]: entry["count"] for entry in status["restarts"]} == {"Hang": 1, "PodLost": 1}
    await world.run(800)
    assert world.true("stuck", "Complete")


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("PreemptionByScheduler", "Preempted"),
        ("EvictionByEvictionAPI", "Evicted"),
        ("DeletionByTaintManager", "Evicted"),
        ("", "PodLost"),
    ],
)
def test_whose_doing_a_lost_pod_is_stands_in_its_cause(reason: str, cause: str) -> None:
    decision = decide(observed([pod(0), pod(1), pod(2, deleting=True, disruption=reason), pod(3)]))
    assert decision.mesh.pending_cause == cause
    assert decision.status.restarts_toward_limit == 0
    assert reason in decision.events[0].message


async def test_a_worker_leaves_a_cordoned_node_when_there_is_room_elsewhere() -> None:
    world = World(2, nodes=2, work=700.0)
    world.submit(small("mover", 2, checkpoint=CHECKPOINT))
    await world.run(40)
    operator = world.operators[0]
    world.nodes["n1"]["spec"] = {"unschedulable": True}
    operator.cache.put_node(world.nodes["n1"])
    await world.run(130)
    assert world.status("mover")["mesh"]["generation"] == 1, "nowhere to go: it runs on"
    world.nodes["n9"] = {**world.nodes["n0"], "metadata": {"name": "n9", "labels": {"kubernetes.io/hostname": "n9"}}}
    operator.cache.put_node(world.nodes["n9"])
    await world.run(130)
    status = world.status("mover")
    nodes = {entry["node"] for entry in status["placement"]["workers"]}
    assert (status["mesh"]["cause"], "n1" in nodes) == ("NodeDrained", False)
    assert status["restarts"] == [{"cause": "NodeDrained", "count": 1}]
    assert "NodeDrained" in operator.notes.reasons("mover")


@pytest.mark.parametrize(
    ("fields", "moves"),
    [
        ({"checkpoint": CHECKPOINT}, True),
        ({"checkpoint": CHECKPOINT, "recovery": {"cordonedNodes": "Stay"}}, False),
        ({}, False),
    ],
    ids=["with checkpoints", "told to stay", "nothing would be saved"],
)
def test_a_move_is_tried_only_when_nothing_is_lost_by_it(fields: dict[str, object], moves: bool) -> None:
    base = observed(received=received([trains(w, 1.0) for w in range(4)]), **fields)
    workers = [replace(w, node_drain_reason="cordoned" if w.index == 1 else "") for w in base.workers]
    status = base.status.model_copy(deep=True)
    assert status.plan is not None
    status.plan.revision = base.revision
    pods = [pod(w, revision=base.revision) for w in range(4)]
    seen = replace(observed(pods, status, received=base.agents, **fields), workers=workers)
    decision = decide(seen)
    assert (decision.move is not None) == moves
    if decision.move is not None:
        assert decision.move.assigned_nodes == {0: "n0", 2: "n2", 3: "n3"}
        apply_move(decision)
        assert not decision.delete, "its ranks save a checkpoint first"
        assert decision.mesh.pending_cause == "NodeDrained"
        assert "worker 1 off n1 (cordoned)" in decision.events[-1].message
