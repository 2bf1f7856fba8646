"""One simulated run of a job: from event to event, with every second booked to a cause of the ledger (`TimeCause`).

The events are failures, ends of repairs, resizes and the end of the run. Failures arrive at a constant rate for each
node while the job trains, saves or loads (Daly 2006; Aupy et al. 2013): the time until the next one is drawn once, in
hours of the full job. So the same seed gives the same failures to every policy and interval, and their difference is
not noise.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Protocol

from meshwright.api.goodput import TimeCause
from meshwright.rules.recovery_times import FAILURE_RESET_SECONDS, LOSSES, backoff_seconds
from meshwright.simulation.inputs import Duration, FaultKind, sample
from meshwright.simulation.running import Stretch
from meshwright.simulation.setting import Setting

LIMITED = frozenset({"RankFailure", "Hang", "PodFailed"})
"""Causes that count toward `recovery.maxRestarts`."""
BACKS_OFF = frozenset({"RankFailure", "Hang"})
"""Causes after which the next start waits longer after each failure."""
_TOLERANCE = 1e-6
"""Rounding of a position, in seconds."""
RESCALED = "Rescaled"
"""The cause of a resize, whose time the ledger books as `Rescaling`."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of a trace."""

    at: float
    """Seconds since the begin of the run. One that comes while the job does not train or load strikes when it does."""
    kind: str


class Failures(Protocol):
    """When the next failure comes, and of which kind it is."""

    def left(self, now: float, rate: float) -> float:
        """Seconds of training until the next failure, if the job fails at `rate` of the full job's."""

    def passed(self, seconds: float, rate: float) -> None:
        """Training went on for so long."""

    def take(self) -> str:
        """The kind of the failure that has come."""


class RandomFailures:
    """Failures at a constant rate, with kinds in proportion to their shares."""

    def __init__(self, setting: Setting, draw: random.Random) -> None:
        faults = setting.inputs.faults
        self._names, self._weights = list(faults), [kind.share for kind in faults.values()]
        unplanned = sum(kind.share for kind in faults.values() if not kind.planned)
        relative = sum(self._weights) / (unplanned or 1.0)
        self._mean = setting.mtbf / relative if relative else math.inf
        self._draw = draw
        self._left = self._next()

    def _next(self) -> float:
        return math.inf if math.isinf(self._mean) else self._draw.expovariate(1.0 / self._mean)

    def left(self, now: float, rate: float) -> float:
        """Seconds of training until the next failure."""
        return self._left / rate

    def passed(self, seconds: float, rate: float) -> None:
        """Training went on for so long."""
        self._left -= seconds * rate

    def take(self) -> str:
        """The kind of the failure that has come."""
        self._left = self._next()
        return self._draw.choices(self._names, self._weights)[0]


class TracedFailures:
    """Failures at given times, as they were injected or observed."""

    def __init__(self, failures: list[Failure]) -> None:
        self._failures = deque(sorted(failures, key=lambda failure: failure.at))

    def left(self, now: float, rate: float) -> float:
        """Seconds until the next failure; 0 if its time has passed."""
        return max(0.0, self._failures[0].at - now) if self._failures else math.inf

    def passed(self, seconds: float, rate: float) -> None:
        """Nothing: the times are absolute."""

    def take(self) -> str:
        """The kind of the failure that has come."""
        return self._failures.popleft().kind


@dataclass(slots=True)
class Outcome:
    """What a run came to."""

    seconds: dict[TimeCause, float] = field(default_factory=lambda: dict.fromkeys(TimeCause, 0.0))
    """Time by cause, as in `status.goodput`."""
    useful: float = 0.0
    """Training that counts, in seconds at full size."""
    degraded: float = 0.0
    """Seconds of training with fewer units."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failures by kind."""
    fewest_units: int = 0
    limit_reached: float | None = None
    """When `recovery.maxRestarts` would have ended the job. The run continues, as if the limit were higher."""

    @property
    def elapsed(self) -> float:
        """Seconds from the creation of the job to the end of the run."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Training that counts over all time; with fewer units in proportion to the speed."""
        return self.useful / self.elapsed if self.elapsed else 0.0


def simulate(setting: Setting, seed: int, failures: Failures | None = None) -> Outcome:
    """One run of the job.

    Args:
        setting: The job. Its `work` or its `horizon` is finite.
        seed: The same seed gives the same failures to every policy and interval.
        failures: Failures at given times. By default they are random.
    """
    if math.isinf(setting.work) and math.isinf(setting.horizon):
        raise ValueError("a simulation needs the length of the job, or of the simulated time")
    source = failures if failures is not None else RandomFailures(setting, random.Random(seed))
    return _Run(setting, source, random.Random(seed + 1_000_003)).run()


class _Run:
    """The state of one run."""

    def __init__(self, setting: Setting, failures: Failures, draw: random.Random) -> None:
        self._setting, self._policy, self._inputs = setting, setting.policy, setting.inputs
        self._failures, self._draw = failures, draw
        self._now = self._position = self._furthest = 0.0
        self._saved = 0.0
        """Position of the newest complete checkpoint on the volume."""
        self._units = setting.units
        self._free = setting.policy.spares
        """Nodes that work and are not part of the job: spares, and what is left of a unit that lost a node."""
        self._repairs: list[float] = []
        self._resized = self._available = -math.inf
        """When the size changed, and since when the nodes of one more unit are free."""
        self._join_seconds = 0.0
        """Time that the pods of the next growth need."""
        self._failed_in_a_row = 0
        self._went_on = -math.inf
        """Position from which ranks went on last with the state that they had in memory."""
        self._limited: deque[float] = deque()
        self._out = Outcome(fewest_units=setting.units)

    def run(self) -> Outcome:
        """Run until the work is done or the horizon is reached."""
        self._book(TimeCause.STARTING, self._sample(self._inputs.start))
        while self._now < self._setting.horizon and self._position < self._setting.work:
            self._train()
        self._out.useful = self._furthest
        return self._out

    # Time.

    def _sample(self, duration: Duration) -> float:
        return sample(duration, self._draw)

    def _book(self, cause: TimeCause, seconds: float) -> None:
        seconds = min(seconds, max(0.0, self._setting.horizon - self._now))
        self._out.seconds[cause] += seconds
        self._now += seconds
        while self._repairs and self._repairs[0] <= self._now:
            self._set_free(self._free + 1, heapq.heappop(self._repairs))

    def _set_free(self, nodes: int, at: float) -> None:
        if self._free < self._setting.nodes_per_unit <= nodes:
            self._available = at
        self._free = nodes

    @property
    def _hazard(self) -> float:
        """Failures of the present size, relative to full size."""
        return self._units / self._setting.units

    # Training.

    def _stretch(self) -> Stretch:
        setting, memory, policy = self._setting, self._inputs.memory, self._policy
        every = memory.every_steps if policy.memory else policy.copy_steps if policy.in_memory else None
        rate = setting.rate(self._units) * (1.0 - memory.overhead / every if every is not None else 1.0)
        return Stretch(self._position, rate, setting.interval, self._inputs.saves.stall)

    def _train(self) -> None:
        """Train until something happens, and handle it."""
        stretch = self._stretch()
        ends = max(0.0, min(stretch.seconds_to(self._setting.work), self._setting.horizon - self._now))
        grows = max(0.0, self._growth_time() - self._now)
        fails = self._failures.left(self._now, self._hazard)
        seconds = min(ends, grows, fails)
        self._failures.passed(seconds, self._hazard)
        if seconds == fails and fails < min(ends, grows):
            self._fail(self._failures.take(), stretch, seconds)
            return
        self._advance(stretch, seconds)
        if seconds == ends:
            if math.isfinite(self._setting.work) and stretch.seconds_to(self._setting.work) <= seconds:
                self._position = self._furthest = max(self._furthest, self._setting.work)
            return
        self._grow()

    def _advance(self, stretch: Stretch, seconds: float) -> None:
        """Books a stretch of training, and moves on."""
        position = stretch.position(seconds)
        saved = stretch.durable(seconds, self._inputs.saves.durable)
        if saved is not None:
            self._saved = max(self._saved, saved)
        trained = position - stretch.begin
        redone = min(trained, max(0.0, self._furthest - stretch.begin))
        moving = trained / self._setting.rate(self._units)
        share = redone / trained if trained else 0.0
        stalls = max(0.0, seconds - moving)
        self._book(TimeCause.REDONE_STEPS, moving * share)
        self._book(TimeCause.TRAINING, moving * (1.0 - share))
        self._book(TimeCause.CHECKPOINT_STALL, stalls)
        if self._units < self._setting.units:
            self._out.degraded += moving
        if seconds >= FAILURE_RESET_SECONDS:
            self._failed_in_a_row = 0
        self._position = position
        self._furthest = max(self._furthest, position)

    # Failures.

    def _fail(self, name: str, stretch: Stretch, seconds: float) -> None:
        """A failure after so many seconds of training: what is lost, and all that follows until the next step."""
        kind = self._inputs.faults[name]
        lost, _, may_shrink = self._left_after(kind)
        saves = not math.isinf(self._setting.interval)
        if kind.planned and (not saves or (self._free < lost and not may_shrink)):
            self._advance(
                stretch, seconds
            )  # workers stay on a cordoned node if they cannot save, or if no other is free
            return
        detection = self._sample(self._setting.detection(kind))
        if kind.silent:  # training goes on, and what it trains and saves from here on is wrong
            self._advance(stretch, seconds)
            good = self._saved
            self._advance(self._stretch(), min(detection, self._setting.horizon - self._now))
            self._saved, detection = good, 0.0
        else:
            self._advance(stretch, seconds)
        self._recover(name, detection)

    def _restored(self, kind: FaultKind, kept: int | None) -> float:
        """The position from which the job continues; `kept` as of `_keeps`."""
        if kind.planned:
            self._saved = max(self._saved, self._position)
            return self._position
        lag = self._inputs.memory.durable * self._setting.rate(self._units)
        if kept is not None:
            return self._newest(kept, lag if kept > 1 else 0.0)
        if not self._is_copied(kind):
            return self._saved
        return max(self._saved, self._newest(self._inputs.memory.every_steps, lag))

    def _newest(self, steps: int, lag: float) -> float:
        """The newest position that is a multiple of so many steps, and complete after `lag`."""
        size = self._setting.step * steps
        done = math.floor((max(0.0, self._position - lag) + _TOLERANCE) / size) * size
        return min(done, self._position)

    def _is_copied(self, kind: FaultKind) -> bool:
        """Whether a copy in memory outlives the failure: it is in another unit, or in the pods that stay."""
        return self._policy.memory and not kind.silent and self._leaves_peer(kind)

    def _leaves_peer(self, kind: FaultKind) -> bool:
        return kind.nodes <= min(self._setting.nodes_per_unit, self._setting.nodes - 1)

    def _has_peers(self, kind: FaultKind) -> bool:
        """Whether ranks that are left have all the state: the nodes that are lost are neighbors."""
        size = self._policy.state_units
        if size is None:
            return False
        units = -(-kind.nodes // self._setting.nodes_per_unit)
        return -(-units // size) < max(1, self._units // size)

    def _keeps(self, kind: FaultKind) -> int | None:
        """Steps to whose multiples ranks go back that keep their processes and state after the failure, while the
        others get theirs. None if all ranks restart.
        """
        policy = self._policy
        if not policy.in_memory or kind.cause not in LOSSES or kind.silent:
            return None
        if self._has_peers(kind):
            return 1
        every = self._inputs.memory.every_steps if policy.memory else policy.copy_steps
        return every if self._leaves_peer(kind) else None

    def _recover(self, name: str, detection: float) -> None:
        """From a failure to the next step. A failure while the state is loaded begins again."""
        while True:
            kind = self._inputs.faults[name]
            self._count(name, kind)
            self._book(TimeCause.DETECTING, detection)
            cause, loads = self._restart(kind)
            fails = self._failures.left(self._now, self._hazard)
            self._failures.passed(min(fails, loads), self._hazard)
            self._book(cause, min(fails, loads))
            if fails >= loads or self._now >= self._setting.horizon:
                return
            name = self._failures.take()
            kind = self._inputs.faults[name]
            detection = 0.0 if kind.silent else self._sample(self._setting.detection(kind))

    def _count(self, name: str, kind: FaultKind) -> None:
        self._out.failures[name] += 1
        if kind.planned:
            return
        self._failed_in_a_row += 1
        recovery = self._setting.recovery
        if kind.cause not in LIMITED:
            return
        self._limited.append(self._now)
        window = recovery.restart_window_seconds
        while window is not None and self._limited[0] < self._now - window:
            self._limited.popleft()
        if len(self._limited) > recovery.max_restarts and self._out.limit_reached is None:
            self._out.limit_reached = self._now

    # Recovery.

    def _restart(self, kind: FaultKind) -> tuple[TimeCause, float]:
        """All that comes before the state is loaded; the cause and the time of the load."""
        policy, phases = self._policy, self._inputs.phases
        cause = TimeCause.RESCALING if kind.cause == RESCALED else TimeCause.RESTARTING
        if kind.planned:
            self._book(cause, self._sample(self._inputs.save_before_stop))
        units, kept = self._units, self._keeps(kind)
        new_pods = self._replace(kind) if kind.nodes else kind.pods
        # With another number of units ranks keep their state only if the job asks for it.
        shrunk = self._units < units
        if shrunk and not policy.continues:
            kept = None
        self._position = self._restored(kind, kept)
        if kind.restart is not None:
            self._book(cause, self._sample(kind.restart))
            return cause, 0.0
        # A recovery in memory that goes on from a later step than the one before does not wait.
        if kind.cause in BACKS_OFF and (kept is None or self._position <= self._went_on):
            self._book(cause, backoff_seconds(self._failed_in_a_row))
        if policy.restarts_gang:
            self._book(cause, self._sample(phases.place) + self._sample(phases.all_pods))
        elif new_pods:
            self._book(cause, self._sample(phases.place) + self._sample(phases.pod))
        if kept is not None:
            self._went_on = self._position
            self._book(cause, self._sample(self._setting.regroup) + (0.0 if shrunk else self._sample(phases.spawn)))
            return cause, 0.0 if shrunk else self._sample(phases.load_from_memory)
        self._book(cause, self._sample(phases.spawn) + self._sample(self._setting.rendezvous))
        return cause, self._load(kind) + self._sample(phases.first_step)

    def _load(self, kind: FaultKind) -> float:
        phases = self._inputs.phases
        from_memory = self._is_copied(kind) and self._position > self._saved
        return self._sample(phases.load_from_memory if from_memory else phases.load)

    def _replace(self, kind: FaultKind) -> bool:
        """Takes nodes away, and replaces them, or shrinks the job.

        Returns whether new pods have to start before the job trains again.
        """
        policy, lost, left, may_shrink = self._policy, *self._left_after(kind)
        for _ in range(lost):
            heapq.heappush(self._repairs, self._now + self._sample(kind.repair))
        if kind.planned and policy.shrinks and self._free >= lost:
            self._free -= lost  # the new pods have started beside the job
            return False
        if may_shrink and (policy.at_once or policy.continues):
            self._shrink(left, lost)
            return False
        if self._free < lost and may_shrink:
            self._wait(lost, policy.replacement_seconds)
            if self._free < lost:
                self._shrink(left, lost)
                return False
        self._wait(lost, math.inf)
        self._free = max(0, self._free - lost)
        return True

    def _left_after(self, kind: FaultKind) -> tuple[int, int, bool]:
        """Nodes that a failure takes away, the units that are left, and whether the job may continue with these."""
        each, policy = self._setting.nodes_per_unit, self._policy
        lost = min(kind.nodes, self._units * each)
        left = self._units - -(-lost // each)
        return lost, left, policy.shrinks and left >= max(1, policy.min_units)

    def _wait(self, nodes: int, longest: float) -> None:
        """Waits until so many nodes are free, at most for so long."""
        end = self._now + longest
        while self._free < nodes and self._now < min(end, self._setting.horizon):
            until = min(end, self._repairs[0]) if self._repairs else end
            self._book(TimeCause.QUEUED, until - self._now)

    def _shrink(self, units: int, lost: int) -> None:
        self._set_free(self._free + (self._units - units) * self._setting.nodes_per_unit - lost, self._now)
        self._units = units
        self._out.fewest_units = min(self._out.fewest_units, units)
        self._resized = self._now
        self._join_seconds = self._sample(self._inputs.phases.place) + self._sample(self._inputs.phases.pod)
        if self._policy.continues:
            self._join_seconds += self._sample(self._inputs.phases.spawn)

    # Growth.

    def _growth_time(self) -> float:
        """When the job grows next: its new pods have started beside it, and the pause after a resize is over."""
        if self._units >= self._setting.units:
            return math.inf
        missing = self._setting.nodes_per_unit - self._free
        if missing > len(self._repairs):
            return math.inf
        available = self._available if missing <= 0 else heapq.nsmallest(missing, self._repairs)[-1]
        pause = 0.0 if self._policy.continues else self._policy.pause_seconds
        return max(self._now, max(self._resized + pause, available) + self._join_seconds)

    def _grow(self) -> None:
        """Resizes to all nodes that are free: a checkpoint, a new mesh, and the load."""
        joining = min(self._free // self._setting.nodes_per_unit, self._setting.units - self._units)
        if joining < 1:  # a repair that has just ended, and rounding
            self._book(TimeCause.TRAINING, 1e-6)
            return
        self._free -= joining * self._setting.nodes_per_unit
        self._units += joining
        self._resized = self._now
        phases, cause = self._inputs.phases, TimeCause.RESCALING
        if self._policy.continues:
            self._book(cause, self._sample(self._setting.regroup) + self._sample(phases.load_from_memory))
            return
        self._book(cause, self._sample(self._inputs.save_before_stop))
        self._saved = max(self._saved, self._position)
        restart = (phases.spawn, self._setting.rendezvous, phases.load, phases.first_step)
        self._book(cause, sum(self._sample(one) for one in restart))
