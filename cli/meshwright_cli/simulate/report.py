"""What `meshwright simulate` reports: the job's runs, its variants, and what follows for its manifest. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from meshwright.figures import format_number
from meshwright.rules.checkpoint_interval import best_interval_seconds
from meshwright.simulation.replay import Replay
from meshwright.simulation.setting import Setting
from meshwright.simulation.study import (
    NEGLIGIBLE,
    Cost,
    Result,
    Row,
    best,
    costs,
    enough,
    interval_rows,
    minimum_rows,
    rung_rows,
    spare_rows,
    study,
    tier_rows,
)

SHARE_OF_RUNS = 5
"""A variant has one run for so many of the job's: all have the same failures, so fewer runs show the difference."""
FEWEST_RUNS = 10


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """All that is reported."""

    name: str
    result: Result
    replicas: int
    """Replicas at full size."""
    mtbf_source: str
    """What the rate of failures is from."""
    intervals: list[Row] = field(default_factory=list)
    spares: list[Row] = field(default_factory=list)
    minimum: list[Row] = field(default_factory=list)
    tiers: list[Row] = field(default_factory=list)
    rungs: list[Row] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    """What one failure of each kind costs the job."""
    replay: Replay | None = None
    notes: tuple[str, ...] = ()

    @property
    def setting(self) -> Setting:
        """The job as it is."""
        return self.result.setting

    @property
    def best_interval(self) -> Row | None:
        """The interval with the most goodput."""
        return best(self.intervals) if self.intervals else None

    @property
    def best_spares(self) -> Row | None:
        """The number of spare nodes with the most goodput for each node that is set aside."""
        return enough(self.spares, lambda result: result.per_node) if self.spares else None

    @property
    def best_minimum(self) -> Row | None:
        """The largest minimum that costs nothing."""
        return enough(self.minimum, lambda result: result.goodput) if self.minimum else None

    def replicas_of(self, row: Row) -> int:
        """The replicas of a smallest size, whose name is the number of units."""
        return int(row.name) * self.replicas // self.setting.units

    def advice(self) -> list[str]:
        """What to change, the most useful first."""
        found: list[tuple[float, str]] = [*self._interval_advice(), *self._node_advice()]
        lines = [text for gain, text in sorted(found, key=lambda pair: -pair[0]) if gain >= NEGLIGIBLE]
        return [*self._limit_advice(), *lines]

    def _limit_advice(self) -> list[str]:
        share, recovery = self.result.reached_limit, self.setting.recovery
        if share < 0.01:
            return []
        times = [one.limit_reached for one in self.result.outcomes if one.limit_reached is not None]
        days = sorted(times)[len(times) // 2] / 86400.0
        change = "raise it" if recovery.restart_window_seconds is not None else "set recovery.restartWindowSeconds"
        return [
            f"recovery.maxRestarts: {recovery.max_restarts} ends {share:.0%} of the runs, half of them within"
            f" {format_number(days)} days: {change}. The goodput above assumes that it does not"
        ]

    def _interval_advice(self) -> list[tuple[float, str]]:
        if math.isinf(self.setting.interval) and not math.isinf(self.setting.mtbf):
            return [(1.0, "add `checkpoint`: without it every failure repeats the training from step 0")]
        own, row = next((one for one in self.intervals if one.is_job), None), self.best_interval
        if own is None or row is None or own is row:
            return []
        gain = row.result.goodput - own.result.goodput
        return [(gain, f"{row.fields}: {points(gain)}")]

    def _node_advice(self) -> list[tuple[float, str]]:
        found = []
        spare, own = self.best_spares, next((one for one in self.spares if one.is_job), None)
        if spare is not None and own is not None and spare is not own:
            gain, more = spare.result.per_node - own.result.per_node, spare.result.goodput - own.result.goodput
            found.append(
                (gain, f"{spare.fields}: {points(gain)} for each node that is set aside (goodput {points(more)})")
            )
        least, is_now = self.best_minimum, next((one for one in self.minimum if one.is_job), None)
        if least is not None and is_now is not None and least is not is_now:
            gain = least.result.goodput - is_now.result.goodput
            found.append((gain, f"elastic.minReplicas: {self.replicas_of(least)}: {points(gain)}"))
        return found


def points(gain: float) -> str:
    """A difference of goodput."""
    return f"{100 * gain:+.1f} points"


def simulation_report(
    name: str,
    setting: Setting,
    replicas: int,
    mtbf_source: str,
    runs: int,
    seed: int,
    *,
    replayed: Replay | None = None,
    notes: tuple[str, ...] = (),
) -> SimulationReport:
    """Simulate the job and its variants."""
    result, few = study(setting, runs, seed), max(FEWEST_RUNS, runs // SHARE_OF_RUNS)
    if math.isinf(setting.mtbf):
        return SimulationReport(name, result, replicas, mtbf_source, replay=replayed, notes=notes)
    intervals = interval_rows(setting, few, seed)
    if replayed is not None:  # the ledger does not say which nodes were lost
        return SimulationReport(name, result, replicas, mtbf_source, intervals, replay=replayed, notes=notes)
    spares = spare_rows(setting, few, seed)
    chosen = int(enough(spares, lambda one: one.per_node).name)
    saves = setting.inputs.saves
    guess = max(setting.step, best_interval_seconds(saves.stall, setting.mtbf, saves.durable))
    tiered = setting if not math.isinf(setting.interval) else None
    return SimulationReport(
        name,
        result,
        replicas,
        mtbf_source,
        intervals,
        spares,
        minimum_rows(setting, few, seed) if setting.units > 1 else [],
        tier_rows(tiered, few, seed) if tiered is not None and guess > setting.step else [],
        rung_rows(setting, max(1, chosen, setting.policy.spares), few, seed),
        costs(setting),
        notes=notes,
    )
