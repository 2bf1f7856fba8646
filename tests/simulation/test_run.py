"""A simulated run: against the exact model of Daly and Aupy et al., against sums by hand, and what always holds."""

import json
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.api.goodput import TimeCause
from meshwright.api.spec import RecoverySpec
from meshwright.rules.checkpoint_interval import best_interval_seconds, useful_share
from meshwright.simulation.inputs import FaultKind, Inputs, MemoryTier, Phases, Saves, Spread, mean
from meshwright.simulation.run import Failure, TracedFailures, simulate
from meshwright.simulation.setting import Policy, Setting
from tests.tiers import mostly_long

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NO_PHASES = Phases(place=0.0, pod=0.0, all_pods=0.0, spawn=0.0, rendezvous=0.0, load=0.0, load_from_memory=0.0)


def one_kind(kind: FaultKind, *, save: float = 0.0, phases: Phases = NO_PHASES, durable: float = 0.0) -> Inputs:
    saves = Saves(stall=save, durable=durable)
    return Inputs(faults={"fault": kind}, phases=phases, saves=saves, start=0.0, save_before_stop=7.0)


def process(detection: float = 5.0) -> FaultKind:
    return FaultKind(share=1.0, cause="PodLost", detection=detection)


@pytest.mark.parametrize("number", mostly_long(range(100), lambda number: number == 0))
def test_a_job_of_one_size_has_the_goodput_of_the_exact_model(number: int) -> None:
    draw = random.Random(number)
    mtbf = 10 ** draw.uniform(2.5, 5.5)
    save, down = mtbf * 10 ** draw.uniform(-4, -0.7), mtbf * 10 ** draw.uniform(-3, 0)
    load = mtbf * 10 ** draw.uniform(-3, -0.3)
    interval = best_interval_seconds(save, mtbf) * 10 ** draw.uniform(-0.5, 0.3)
    inputs = one_kind(process(down), save=save, phases=NO_PHASES.model_copy(update={"load": load}))
    cycle = (mtbf + down) * math.exp(load / mtbf)
    setting = Setting(mtbf=mtbf, interval=interval, horizon=60_000 * cycle, inputs=inputs)
    expected = useful_share(interval, save, mtbf, down, load)
    assert simulate(setting, number).goodput == pytest.approx(expected, rel=0.01)


def traced(setting: Setting, *failures: tuple[float, str]) -> dict[TimeCause, float]:
    outcome = simulate(setting, 0, TracedFailures([Failure(at, kind) for at, kind in failures]))
    assert outcome.elapsed == pytest.approx(sum(outcome.seconds.values()))
    return {cause: round(seconds, 6) for cause, seconds in outcome.seconds.items() if seconds}


def test_every_second_of_two_failures_is_booked_to_its_cause() -> None:
    phases = NO_PHASES.model_copy(update={"spawn": 20.0, "load": 10.0})
    setting = Setting(mtbf=1e9, interval=100.0, work=500.0, inputs=one_kind(process(), save=2.0, phases=phases))
    # 250 s of steps and 2 saves before the first; 50 s are lost. The second comes while those are repeated.
    found = traced(setting, (254.0, "fault"), (299.0, "fault"))
    assert found == {
        TimeCause.TRAINING: 500.0,
        TimeCause.REDONE_STEPS: 10.0 + 50.0,
        TimeCause.CHECKPOINT_STALL: 8.0,
        TimeCause.DETECTING: 10.0,
        TimeCause.RESTARTING: 60.0,
    }


def test_a_checkpoint_counts_once_it_is_complete() -> None:
    setting = Setting(mtbf=1e9, interval=100.0, work=400.0, inputs=one_kind(process(), durable=30.0))
    assert traced(setting, (229.0, "fault"))[TimeCause.REDONE_STEPS] == 129.0
    assert traced(setting, (231.0, "fault"))[TimeCause.REDONE_STEPS] == 31.0


def test_a_planned_stop_repeats_nothing() -> None:
    kind = FaultKind(share=1.0, cause="NodeDrained", nodes=1, detection=0.0, planned=True, repair=50.0)
    setting = Setting(mtbf=1e9, interval=100.0, work=400.0, policy=Policy(spares=1), inputs=one_kind(kind))
    assert traced(setting, (150.0, "fault")) == {TimeCause.TRAINING: 400.0, TimeCause.RESTARTING: 7.0}
    # Without another node the workers stay on the cordoned one.
    assert traced(replace(setting, policy=Policy()), (150.0, "fault")) == {TimeCause.TRAINING: 400.0}


NODE = FaultKind(share=1.0, cause="NodeLost", nodes=1, detection=5.0, repair=1000.0)


def test_without_a_spare_node_the_job_waits_for_the_repair() -> None:
    phases = NO_PHASES.model_copy(update={"pod": 60.0})
    setting = Setting(mtbf=1e9, interval=100.0, work=400.0, units=4, inputs=one_kind(NODE, phases=phases))
    waits = traced(setting, (100.0, "fault"))
    assert waits == {TimeCause.TRAINING: 400.0, TimeCause.DETECTING: 5.0, TimeCause.QUEUED: 1000.0} | {
        TimeCause.RESTARTING: 60.0
    }
    spare = traced(replace(setting, policy=Policy(spares=1)), (100.0, "fault"))
    assert spare == {TimeCause.TRAINING: 400.0, TimeCause.DETECTING: 5.0, TimeCause.RESTARTING: 60.0}


def test_an_elastic_job_continues_with_fewer_replicas_and_grows_after_the_repair() -> None:
    policy = Policy(shrinks=True, min_units=3, replacement_seconds=30.0, pause_seconds=0.0)
    inputs = one_kind(NODE, phases=NO_PHASES.model_copy(update={"pod": 60.0}))
    setting = Setting(mtbf=1e9, interval=100.0, work=2000.0, units=4, policy=policy, inputs=inputs)
    found = simulate(setting, 0, TracedFailures([Failure(100.0, "fault")]))
    # At 3/4 of the speed from 135 s until the node is repaired at 1105 s and its pod has started.
    assert found.degraded == pytest.approx(1105.0 + 60.0 - 135.0)
    assert found.seconds[TimeCause.QUEUED] == 30.0
    assert found.seconds[TimeCause.RESCALING] == 7.0
    assert found.seconds[TimeCause.TRAINING] == pytest.approx(2000.0 + found.degraded / 4)
    assert found.useful == 2000.0
    waits = traced(replace(setting, policy=replace(policy, min_units=4)), (100.0, "fault"))
    assert waits[TimeCause.QUEUED] == 1000.0


def test_pods_of_a_growth_start_when_the_node_is_repaired_whatever_fails_meanwhile() -> None:
    policy = Policy(shrinks=True, at_once=True, pause_seconds=0.0)
    inputs = one_kind(NODE, phases=NO_PHASES.model_copy(update={"pod": 60.0}))
    inputs = inputs.model_copy(update={"faults": {**inputs.faults, "process": process(0.0)}})
    setting = Setting(mtbf=1e9, interval=10.0, work=2000.0, units=4, policy=policy, inputs=inputs)
    # The node is lost at 105 s and repaired at 1105 s.
    found = simulate(setting, 0, TracedFailures([Failure(100.0, "fault"), Failure(1110.0, "process")]))
    assert found.degraded == pytest.approx(1060.0)


def test_without_checkpoints_nothing_moves() -> None:
    kind = FaultKind(share=1.0, cause="NodeDrained", nodes=1, detection=0.0, planned=True)
    setting = Setting(mtbf=1e9, interval=math.inf, work=400.0, policy=Policy(spares=1), inputs=one_kind(kind))
    assert traced(setting, (150.0, "fault")) == {TimeCause.TRAINING: 400.0}


def test_copies_in_memory_lose_at_most_the_step_in_flight() -> None:
    inputs = one_kind(NODE).model_copy(update={"memory": MemoryTier(every_steps=2, overhead=0.0)})
    setting = Setting(mtbf=1e9, interval=1000.0, step=3.0, work=500.0, units=4, inputs=inputs)
    spare = Policy(spares=1, memory=True)
    assert traced(replace(setting, policy=spare), (100.0, "fault"))[TimeCause.REDONE_STEPS] == 4.0
    in_memory = replace(spare, in_memory=True)
    assert traced(replace(setting, policy=in_memory), (100.0, "fault"))[TimeCause.REDONE_STEPS] == 1.0
    # A single node takes its copies with it.
    alone = replace(setting, units=1, policy=spare)
    assert traced(alone, (100.0, "fault"))[TimeCause.REDONE_STEPS] == 100.0


IN_MEMORY = Setting(
    mtbf=1e9,
    interval=1000.0,
    step=3.0,
    work=500.0,
    units=4,
    policy=Policy(spares=1, in_memory=True),
    inputs=one_kind(NODE, phases=NO_PHASES.model_copy(update={"regroup": 1.0, "load": 50.0, "load_from_memory": 8.0})),
)


def test_ranks_that_are_left_after_a_loss_go_on_from_the_newest_step() -> None:
    found = traced(IN_MEMORY, (100.0, "fault"))
    assert found[TimeCause.REDONE_STEPS] == 1.0
    assert found[TimeCause.RESTARTING] == 1.0 + 8.0


@pytest.mark.parametrize("cause", ["Hang", "NodeDrained", "LossAnomaly"])
def test_after_all_other_causes_ranks_restart_from_the_checkpoint(cause: str) -> None:
    kind = FaultKind(share=1.0, cause=cause, detection=0.0)
    inputs = IN_MEMORY.inputs.model_copy(update={"faults": {"fault": kind}})
    found = traced(replace(IN_MEMORY, inputs=inputs), (100.0, "fault"))
    assert (found[TimeCause.REDONE_STEPS], found[TimeCause.RESTARTING]) == (100.0, 50.0)


def test_ranks_without_peers_go_back_to_the_copy_and_those_that_are_all_lost_to_the_checkpoint() -> None:
    copies = replace(IN_MEMORY, policy=Policy(spares=4, in_memory=True, state_units=None, copy_steps=10))
    costly = replace(copies, inputs=copies.inputs.model_copy(update={"memory": MemoryTier(overhead=0.5)}))
    assert traced(copies, (100.0, "fault"))[TimeCause.REDONE_STEPS] == pytest.approx(10.0, abs=0.2)
    assert traced(costly)[TimeCause.TRAINING] == pytest.approx(500.0)
    assert simulate(costly, 0, TracedFailures([])).elapsed == pytest.approx(500.0 / 0.95)
    two_sets = Policy(spares=4, in_memory=True, state_units=2)
    for nodes, redone in ((1, 1.0), (2, 1.0), (3, 100.0)):
        kind = NODE.model_copy(update={"nodes": nodes})
        inputs = IN_MEMORY.inputs.model_copy(update={"faults": {"fault": kind}})
        found = traced(replace(IN_MEMORY, policy=two_sets, inputs=inputs), (100.0, "fault"))
        assert found[TimeCause.REDONE_STEPS] == redone, nodes


def test_fewer_replicas_have_their_state_only_if_they_continue() -> None:
    at_once = Policy(shrinks=True, at_once=True, in_memory=True, pause_seconds=0.0)
    shrinks = traced(replace(IN_MEMORY, policy=at_once), (100.0, "fault"))
    assert shrinks[TimeCause.REDONE_STEPS] == pytest.approx(100.0 / 0.75)
    continues = traced(replace(IN_MEMORY, policy=replace(at_once, continues=True)), (100.0, "fault"))
    assert continues[TimeCause.REDONE_STEPS] == pytest.approx(1.0 / 0.75)
    assert continues[TimeCause.RESTARTING] == 1.0
    long = replace(IN_MEMORY, work=2000.0, policy=replace(at_once, continues=True))
    # All ranks wait while the replica that joins gets its state.
    assert traced(long, (100.0, "fault"))[TimeCause.RESCALING] == 1.0 + 8.0


def test_a_recovery_in_memory_from_a_later_step_does_not_wait() -> None:
    kind = FaultKind(share=1.0, cause="RankFailure", detection=0.0)
    inputs = IN_MEMORY.inputs.model_copy(update={"faults": {"fault": kind}})
    found = traced(replace(IN_MEMORY, inputs=inputs), (100.0, "fault"), (120.0, "fault"))
    assert found[TimeCause.RESTARTING] == 2 * 9.0
    # The second comes while the state of the first is still being sent.
    found = traced(replace(IN_MEMORY, inputs=inputs), (100.0, "fault"), (105.0, "fault"))
    assert found[TimeCause.RESTARTING] == 5.0 + 2.0 + 9.0


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_default_times_in_memory_are_those_measured(ranks: int) -> None:
    """Beside the process of the new rank, whose start depends on the job."""
    runs = json.loads((RESULTS / f"recovery-{ranks}.json").read_text())["runs"]["this"]
    faults = [run["process in memory"] for run in runs]
    measured = statistics.median(seconds - one["detected"] for one in faults for seconds in one["stepAfter"])
    assert mean(Setting(mtbf=1.0, interval=1.0, gpus=ranks).regroup) == pytest.approx(measured, abs=0.25)


def test_silent_corruption_repeats_what_was_trained_until_it_was_detected() -> None:
    kind = FaultKind(share=1.0, cause="RankFailure", detection=250.0, silent=True)
    setting = Setting(mtbf=1e9, interval=100.0, work=1000.0, inputs=one_kind(kind))
    assert traced(setting, (120.0, "fault"))[TimeCause.REDONE_STEPS] == 270.0


def test_restarts_wait_as_the_operator_does_and_reach_its_limit() -> None:
    kind = FaultKind(share=1.0, cause="RankFailure", detection=0.0)
    recovery = RecoverySpec(max_restarts=2)
    setting = Setting(mtbf=1e9, interval=1e6, work=1000.0, inputs=one_kind(kind), recovery=recovery)
    failures = TracedFailures([Failure(float(at), "fault") for at in (10, 20, 30, 40)])
    found = simulate(setting, 0, failures)
    assert found.seconds[TimeCause.RESTARTING] == 0 + 2 + 4 + 8
    assert found.limit_reached is not None
    assert found.limit_reached < 50
    window = replace(setting, recovery=RecoverySpec(max_restarts=2, restart_window_seconds=60))
    apart = TracedFailures([Failure(float(at), "fault") for at in (10, 120, 240)])
    assert simulate(window, 0, apart).limit_reached is None


def test_a_hang_is_detected_after_the_limit_of_the_job() -> None:
    kind = FaultKind(share=1.0, cause="Hang")
    setting = Setting(mtbf=1e9, interval=100.0, work=1000.0, step=2.0, inputs=one_kind(kind))
    assert traced(setting, (500.0, "fault"))[TimeCause.DETECTING] == 300.0
    assert traced(replace(setting, step=50.0), (500.0, "fault"))[TimeCause.DETECTING] == 500.0
    own = replace(setting, recovery=RecoverySpec(hang_timeout_seconds=60))
    assert traced(own, (500.0, "fault"))[TimeCause.DETECTING] == 60.0


POLICIES = {
    "all pods": Policy(restarts_gang=True),
    "spares": Policy(spares=2),
    "elastic": Policy(spares=1, shrinks=True, min_units=2),
    "at once": Policy(spares=1, shrinks=True, at_once=True),
    "memory": Policy(spares=1, memory=True),
    "in memory": Policy(spares=1, shrinks=True, at_once=True, in_memory=True, continues=True),
}


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_run_ends_with_all_time_booked(name: str) -> None:
    for seed in range(5):
        setting = Setting(
            mtbf=4 * 3600.0,
            interval=900.0,
            step=3.0,
            work=20 * 86400.0,
            horizon=400 * 86400.0,
            units=8,
            nodes_per_unit=2,
            policy=POLICIES[name],
            inputs=Inputs(start=Spread(median=300.0, sigma=0.5)),
        )
        found = simulate(setting, seed)
        assert found == simulate(setting, seed)
        assert all(seconds >= 0 for seconds in found.seconds.values())
        assert found.useful <= setting.work * (1 + 1e-9)
        assert found.seconds[TimeCause.TRAINING] >= found.useful * (1 - 1e-9)
        assert 0 < found.goodput < 1
        assert found.elapsed <= setting.horizon * (1 + 1e-9)


def test_every_policy_gets_the_same_failures() -> None:
    """The time between failures is one of training: a job that recovers faster fails as often for its training."""
    setting = Setting(mtbf=3600.0, interval=600.0, horizon=30 * 86400.0, policy=Policy(spares=0))
    counts = []
    for save in (0.0, 5.0):
        inputs = one_kind(process()).model_copy(update={"saves": Saves(stall=save, durable=0.0)})
        counts.append(sum(simulate(replace(setting, inputs=inputs), 3).failures.values()))
    assert counts[0] == counts[1]


def test_an_endless_simulation_is_rejected() -> None:
    with pytest.raises(ValueError, match="needs the length"):
        simulate(Setting(mtbf=1.0, interval=1.0), 0)
