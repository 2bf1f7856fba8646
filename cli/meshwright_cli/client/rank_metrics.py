"""What worker pods report about their ranks at /metrics, and which ranks are slow. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

_SERIES = re.compile(r"^(ptj_[a-z_]+)\{([^}]*)\} (\S+)(?: \d+)?$", re.MULTILINE)
_RANK = re.compile(r'(?:^|,)rank="(\d+)"')

PEAK = "ptj_memory_peak_bytes"
SLOW = 1.1
"""A rank is a straggler if its own work in a step takes this much longer than that of the median rank of its stage."""


@dataclass(slots=True)
class RankSample:
    """The values of one rank at one time."""

    values: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Last completed step."""
        return int(self.values.get("ptj_step", 0))

    @property
    def up(self) -> bool:
        """Whether the rank's process runs."""
        return bool(self.values.get("ptj_rank_up", 1.0))

    @property
    def step_seconds(self) -> float | None:
        """Mean time of a step since the rank's start."""
        count, seconds, _ = _steps(self)
        return seconds / count if count > 0 else None

    @property
    def peak_memory(self) -> float | None:
        """Peak of the rank's GPU memory in bytes, else of the host's, if it is measured."""
        return self.values.get(PEAK) or self.values.get(f"{PEAK}:host")


@dataclass(frozen=True, slots=True)
class RankTimes:
    """How fast a rank was between two samples, or since its start."""

    rank: int
    step: int
    up: bool
    step_seconds: float | None
    """Mean time of a step."""
    data_seconds: float | None
    """Mean time in which a step waited for data."""
    score: float | None
    """The rank's straggler score, if its pod reports one."""
    peak_memory: float | None


def read_samples(text: str) -> dict[int, RankSample]:
    """The values of each rank in a page of Prometheus metrics. Of several series of a rank, the largest counts."""
    found: dict[int, RankSample] = {}
    for name, labels, value in _SERIES.findall(text):
        if (rank := _RANK.search(labels)) is None:
            continue
        values = found.setdefault(int(rank[1]), RankSample()).values
        try:
            number = float(value)
        except ValueError:
            continue
        if name == PEAK and 'kind="host"' in labels:
            name = f"{PEAK}:host"
        if not name.endswith("_bucket"):
            values[name] = max(values.get(name, number), number)
    return found


def rank_times(now: Mapping[int, RankSample], before: Mapping[int, RankSample]) -> list[RankTimes]:
    """The times of each rank since `before`; since its start if it completed no step in between."""
    return [_times(rank, now[rank], before.get(rank)) for rank in sorted(now)]


def _times(rank: int, now: RankSample, before: RankSample | None) -> RankTimes:
    count, seconds, data = _steps(now)
    if before is not None:
        earlier = _steps(before)
        if earlier[0] < count:  # else no step since, or a new process
            count, seconds, data = (after - then for after, then in zip((count, seconds, data), earlier, strict=True))
    score = now.values.get("ptj_rank_straggler_ratio")
    if count <= 0:
        return RankTimes(rank, now.step, now.up, None, None, score, now.peak_memory)
    return RankTimes(rank, now.step, now.up, seconds / count, max(0.0, data) / count, score, now.peak_memory)


def _steps(sample: RankSample) -> tuple[float, float, float]:
    """Number of steps, their time, and the part of it in which they waited for data."""
    names = ("ptj_step_duration_seconds_count", "ptj_step_duration_seconds_sum", "ptj_data_wait_seconds_total")
    count, seconds, data = (sample.values.get(name, 0.0) for name in names)
    return count, seconds, data


def slowness(times: list[RankTimes], stages: Mapping[int, int] | None = None) -> dict[int, float]:
    """How much slower each rank is than the median rank of its pipeline stage: 0.2 for 20%.

    Stages have other layers, so their ranks take longer or shorter by design. If a stage has one rank, there is none to
    compare it with, and the median of all ranks counts. The pods' own straggler scores count if they report any: ranks
    that wait for a slow one have the same step time.
    """
    scores = {one.rank: one.score for one in times if one.score is not None}
    own = scores or {one.rank: one.step_seconds for one in times if one.step_seconds}
    stage_of = {rank: (stages or {}).get(rank, 0) for rank in own}
    if 1 in Counter(stage_of.values()).values():
        stage_of = dict.fromkeys(own, 0)
    peers = defaultdict[int, list[float]](list)
    for rank, value in own.items():
        peers[stage_of[rank]].append(value)
    middles = {stage: median(values) for stage, values in peers.items()}
    usual = {rank: middles[stage] for rank, stage in stage_of.items()}
    return {rank: value / usual[rank] - 1 for rank, value in own.items() if usual[rank] > 0}


def stragglers(times: list[RankTimes], stages: Mapping[int, int] | None = None) -> set[int]:
    """Ranks that are slow, are behind the others, or do not run although others do."""
    if not any(one.up for one in times):
        return set()
    slow = {rank for rank, more in slowness(times, stages).items() if more > SLOW - 1}
    furthest = max((one.step for one in times), default=0)
    # Ranks report at different moments: one step behind is normal.
    return slow | {one.rank for one in times if not one.up or one.step < furthest - 1}
