"""What many simulated runs say: goodput with an interval, and what intervals, spares, minimum and recovery are worth.

Every variant gets the same failures as the job itself, from the same seeds: differences between variants are much more
exact than the goodput of each.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from meshwright.api.goodput import TimeCause
from meshwright.rules.checkpoint_interval import best_interval_seconds
from meshwright.simulation.inputs import mean
from meshwright.simulation.run import Failure, Outcome, TracedFailures, simulate
from meshwright.simulation.setting import Policy, Setting

NEGLIGIBLE = 0.001
"""Goodput that nobody notices: 0.1 points."""
SPARES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of spare nodes to try, up to the most that `recovery.spareNodes` may be."""
_CONFIDENCE = 1.96
_TIMES = ("detection", "repair", "restart")
"""Fields of a kind of failure."""
_PLACES = 8
"""Places between two checkpoints at which a failure is tried."""
_MOST_SECONDS = 14 * 86400.0
"""Time after a failure and its repair in which all that it costs has passed."""


@dataclass(frozen=True, slots=True)
class Result:
    """Several runs of one setting."""

    setting: Setting
    outcomes: tuple[Outcome, ...]

    @property
    def goodput(self) -> float:
        """Training that counts in all runs over the time of all runs."""
        return sum(one.useful for one in self.outcomes) / sum(one.elapsed for one in self.outcomes)

    @property
    def error(self) -> float:
        """Half of the 95% confidence interval of the goodput, as of a ratio of two means."""
        if len(self.outcomes) < 2:
            return math.inf
        goodput, mean = self.goodput, statistics.fmean(one.elapsed for one in self.outcomes)
        spread = statistics.stdev(one.useful - goodput * one.elapsed for one in self.outcomes)
        return _CONFIDENCE * spread / mean / math.sqrt(len(self.outcomes))

    @property
    def days(self) -> float:
        """Mean days of a run."""
        return statistics.fmean(one.elapsed for one in self.outcomes) / 86400.0

    def between(self, value: Callable[[Outcome], float], share: float = 0.9) -> tuple[float, float]:
        """The range in which this share of the runs is."""
        values = sorted(value(one) for one in self.outcomes)
        skip = (1.0 - share) / 2.0 * (len(values) - 1)
        return _quantile(values, skip), _quantile(values, len(values) - 1 - skip)

    def mean(self, value: Callable[[Outcome], float]) -> float:
        """The mean over the runs."""
        return statistics.fmean(value(one) for one in self.outcomes)

    def share(self, cause: TimeCause) -> float:
        """The share of all time that is booked to a cause."""
        return sum(one.seconds[cause] for one in self.outcomes) / sum(one.elapsed for one in self.outcomes)

    @property
    def reached_limit(self) -> float:
        """The share of runs that `recovery.maxRestarts` would have ended."""
        return self.mean(lambda one: float(one.limit_reached is not None))

    @property
    def per_node(self) -> float:
        """Goodput for each node that is set aside, spares included."""
        return self.goodput * self.setting.nodes / (self.setting.nodes + self.setting.policy.spares)


def _quantile(values: list[float], position: float) -> float:
    below = int(position)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (position - below)


def study(setting: Setting, runs: int, seed: int = 0) -> Result:
    """Simulate the job several times."""
    return Result(setting, tuple(simulate(setting, seed + number) for number in range(runs)))


@dataclass(frozen=True, slots=True)
class Row:
    """A variant of the job."""

    name: str
    result: Result
    fields: str = ""
    """The fields of the job that it needs."""
    is_job: bool = False
    """Whether it is the job as it is."""


def interval_rows(setting: Setting, runs: int, seed: int = 0) -> list[Row]:
    """The job with other checkpoint intervals, around the one that the formula gives. The name is the number of steps.

    Empty if the job has no checkpoints, or if it does not fail.
    """
    saves = setting.inputs.saves
    guess = best_interval_seconds(saves.stall, setting.mtbf, saves.durable)
    if math.isinf(setting.interval) or math.isinf(guess):
        return []
    own = max(1, round(setting.interval / setting.step))
    steps = {max(1, round(guess * factor / setting.step)) for factor in (0.25, 0.5, 1.0, 2.0, 4.0)}
    least = max(1, math.ceil(saves.durable / setting.step))
    return [
        Row(
            str(count),
            study(replace(setting, interval=count * setting.step), runs, seed),
            f"checkpoint.everySteps: {count}",
            count == own,
        )
        for count in sorted({count for count in steps if count >= least} | {own})
    ]


def best(rows: Iterable[Row]) -> Row:
    """The row with the most goodput."""
    return max(rows, key=lambda row: row.result.goodput)


def spare_rows(setting: Setting, runs: int, seed: int = 0) -> list[Row]:
    """The job with 0, 1, 2, ... spare nodes, until another one makes no difference."""
    rows: list[Row] = []
    own = setting.policy.spares
    for count in sorted({*SPARES, own}):
        result = study(replace(setting, policy=replace(setting.policy, spares=count)), runs, seed)
        rows.append(Row(str(count), result, f"recovery.spareNodes: {count}", count == own))
        gained = len(rows) > 1 and result.goodput - rows[-2].result.goodput >= NEGLIGIBLE
        if len(rows) > 2 and not gained and count >= own:
            break
    return rows


def minimum_rows(setting: Setting, runs: int, seed: int = 0) -> list[Row]:
    """The job with other smallest sizes, from all units down to one. The name is the number of units."""
    units = setting.units
    counts = sorted({units, *(max(1, units - lost) for lost in (1, 2, 4, 8)), max(1, units // 2), 1}, reverse=True)
    rows = []
    for count in counts:
        policy = replace(setting.policy, shrinks=count < units, min_units=count)
        result = study(replace(setting, policy=policy), runs, seed)
        own = setting.policy.min_units if setting.policy.shrinks else units
        rows.append(Row(str(count), result, "", count == own))
        if count < units and count <= own and min(one.fewest_units for one in result.outcomes) > count:
            break  # a smaller one makes no difference
    return rows


def tier_rows(setting: Setting, runs: int, seed: int = 0) -> list[Row]:
    """The job with its checkpoints on storage only, and with copies in memory at several intervals."""
    rows = []
    for steps in (0, 1, 10, 100):
        inputs, policy = setting.inputs, replace(setting.policy, memory=bool(steps), in_memory=False, continues=False)
        memory = inputs.memory.model_copy(update={"every_steps": max(1, steps)})
        variant = replace(setting, policy=policy, inputs=inputs.model_copy(update={"memory": memory}))
        own = bool(steps) == setting.policy.memory and (not steps or steps == inputs.memory.every_steps)
        own = own and not setting.policy.in_memory
        name = f"storage and memory, every {steps} steps" if steps > 1 else "storage and memory, every step"
        rows.append(Row(name if steps else "storage only", study(variant, runs, seed), "", own))
    if setting.policy.in_memory:
        rows.append(Row("storage, and state in ranks that are left", study(setting, runs, seed), "", True))
    return rows


@dataclass(frozen=True, slots=True)
class Cost:
    """What one failure costs the job, on average over where it strikes between two checkpoints."""

    kind: str
    detecting: float
    """Seconds until the operator decides."""
    waiting: float
    """Seconds until there are enough nodes."""
    restarting: float
    """Seconds from the decision to the next step, without `waiting`, and of the resize back to full size."""
    redone: float
    """Seconds of training that are repeated."""


def costs(setting: Setting) -> list[Cost]:
    """What one failure of each kind costs, if nothing else fails and all times are mean ones."""
    faults = {
        name: kind.model_copy(
            update={field: mean(value) for field in _TIMES if (value := getattr(kind, field)) is not None}
        )
        for name, kind in setting.inputs.faults.items()
    }
    phases = setting.inputs.phases
    phases = phases.model_copy(
        update={name: mean(value) for name in type(phases).model_fields if (value := getattr(phases, name)) is not None}
    )
    inputs = setting.inputs
    inputs = inputs.model_copy(
        update={
            "faults": faults,
            "phases": phases,
            "start": 0.0,
            "save_before_stop": mean(inputs.save_before_stop),
        }
    )
    return [_cost(replace(setting, inputs=inputs), name) for name in faults]


def _cost(setting: Setting, kind: str) -> Cost:
    saves = setting.inputs.saves
    begin, period = saves.stall + saves.durable + 2.0 * setting.interval, setting.interval + saves.stall
    if math.isinf(setting.interval):  # a failure strikes anywhere in the run, and costs all of it until then
        begin, period = 0.0, min(setting.work, setting.horizon)
    each = []
    for place in range(_PLACES):
        at = begin + (place + 0.5) / _PLACES * period
        kinds = setting.inputs.faults[kind]
        span = 2.0 * at + _MOST_SECONDS + mean(kinds.repair)
        failures = TracedFailures([Failure(at, kind)])
        each.append(simulate(replace(setting, work=math.inf, horizon=span), 0, failures).seconds)

    def average(*causes: TimeCause) -> float:
        return statistics.fmean(sum(seconds[cause] for cause in causes) for seconds in each)

    return Cost(
        kind,
        average(TimeCause.DETECTING),
        average(TimeCause.QUEUED),
        average(TimeCause.RESTARTING, TimeCause.RESCALING),
        average(TimeCause.REDONE_STEPS),
    )


def enough(rows: list[Row], value: Callable[[Result], float]) -> Row:
    """The first row that is at most a negligible part below the best."""
    most = max(value(row.result) for row in rows)
    return next(row for row in rows if value(row.result) >= most - NEGLIGIBLE)


def ladder(setting: Setting, spares: int) -> list[tuple[str, str, Policy]]:
    """The rungs of recovery: (what it is, the fields that it needs, the policy). Each has those before it."""
    own = setting.policy
    gang = Policy(
        restarts_gang=True,
        replacement_seconds=own.replacement_seconds,
        pause_seconds=own.pause_seconds,
        min_units=own.min_units,
    )
    in_place = replace(gang, restarts_gang=False)
    spare = replace(in_place, spares=spares)
    rungs = [
        ("every failure restarts all pods", "", gang),
        ("only what failed restarts", "(default)", in_place),
        (f"{spares} spare node{'' if spares == 1 else 's'}", f"recovery.spareNodes: {spares}", spare),
    ]
    last = spare
    if setting.units > 1:
        at_once = own.at_once or not own.shrinks
        last = replace(spare, shrinks=True, at_once=at_once)
        rungs.append(("fewer replicas meanwhile", "elastic.onLoss: Shrink" if at_once else "elastic", last))
    last = replace(last, memory=True)
    rungs.append(("copies of the state in memory", "", last))
    last = replace(last, in_memory=True)
    if own.in_memory:  # the job's own way to keep it
        last = replace(last, memory=own.memory, state_units=own.state_units, copy_steps=own.copy_steps)
    rungs.append(("ranks that survive keep their state", "recovery.inMemory: true", last))
    if setting.units > 1:
        last = replace(last, continues=True)
        rungs.append(("other replicas continue at once", "onReplicaLoss: Continue", last))
    return rungs


def rung_rows(setting: Setting, spares: int, runs: int, seed: int = 0) -> list[Row]:
    """The job with each rung of recovery."""
    return [
        Row(name, study(replace(setting, policy=policy), runs, seed), fields, policy == setting.policy)
        for name, fields, policy in ladder(setting, spares)
    ]
