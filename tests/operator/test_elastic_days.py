"""A part of a day of `benchmarks/elastic_days.py`: every job ends, elastic ones earlier, with few resizes."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks import elastic_days
from benchmarks._day_traces import trace
from benchmarks._virtual_days import DayJob


@pytest.mark.long
def test_elastic_jobs_use_more_of_a_day_than_rigid_ones() -> None:
    rigid, elastic = (elastic_days.run_day(3, jobs=14, load=1.0, hours=4.0, elastic=kind) for kind in (False, True))
    assert len(rigid.waits) == len(elastic.waits) == 14, "every job has ended"
    assert elastic.occupancy > rigid.occupancy
    assert sum(elastic.turnarounds) < sum(rigid.turnarounds)
    assert rigid.resizes == 0 < elastic.resizes
    assert elastic.early_resizes == []


def test_the_same_seed_gives_the_same_day() -> None:
    assert trace(5, 20, 1.0, 24.0) == trace(5, 20, 1.0, 24.0) != trace(6, 20, 1.0, 24.0)
    day = trace(5, 20, 0.5, 24.0)
    assert day.work == pytest.approx(0.5 * 64 * 86400.0, rel=1e-6)
    assert all(arrival.least <= arrival.replicas <= arrival.most for arrival in day.arrivals)


def test_a_resize_before_the_pause_has_passed_is_counted_unless_it_need_not_wait() -> None:
    arrivals = trace(5, 20, 1.0, 24.0).arrivals
    low = next(arrival for arrival in arrivals if not arrival.priority)
    high = next(arrival for arrival in arrivals if arrival.priority)
    job, jobs = DayJob(low), {one.name: DayJob(one) for one in (low, high)}
    job.resized(0.0, "From 2 replicas to 4: the new workers are ready")
    job.resized(100.0, f"From 4 replicas to 3: job default/{high.name}, which waits, comes first")
    job.resized(200.0, "From 3 replicas to 2: that is what the free nodes allow")
    assert list(elastic_days._early(job, jobs)) == []
    job.resized(300.0, f"From 2 replicas to 1: job default/{low.name}, which waits, comes first")
    assert len(list(elastic_days._early(job, jobs))) == 1
    job.resized(350.0, "From 1 replica to 2: the new workers are ready")
    assert len(list(elastic_days._early(job, jobs))) == 2
    job.resized(400.0, "From 2 replicas to 3: that is what the free nodes allow", starts=True)
    assert len(list(elastic_days._early(job, jobs))) == 2


def test_parts_are_combined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = []
    for seed in (1, 2):
        parts.append(str(tmp_path / f"{seed}.json"))
        run = ["--days", "1", "--seed", str(seed), "--jobs", "3", "--load", "0.02", "--json", parts[-1]]
        monkeypatch.setattr(sys, "argv", ["elastic_days", *run])
        with pytest.raises(SystemExit):  # so few jobs gain nothing
            elastic_days.main()
    both = tmp_path / "both.json"
    monkeypatch.setattr(sys, "argv", ["elastic_days", "--combine", *parts, "--json", str(both)])
    with pytest.raises(SystemExit):
        elastic_days.main()
    found = json.loads(both.read_text())
    assert [(run["seed"], run["elastic"]) for run in found["days"]] == [(1, False), (1, True), (2, False), (2, True)]
    assert "2 days" in capsys.readouterr().out


def test_a_run_that_was_cut_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "days.json"
    ran: list[int] = []

    def run(seed: int, jobs: int, load: float, hours: float, *, elastic: bool) -> elastic_days.Run:
        ran.append(seed)
        return run_day(seed, jobs, load, hours, elastic=elastic)

    run_day = elastic_days.run_day
    monkeypatch.setattr(elastic_days, "run_day", run)
    monkeypatch.setattr(elastic_days, "ProcessPoolExecutor", lambda processes: ThreadPoolExecutor(1))
    for days in ("1", "2"):
        words = ["--days", days, "--jobs", "3", "--load", "0.02", "--json", str(file)]
        monkeypatch.setattr(sys, "argv", ["elastic_days", *words])
        with pytest.raises(SystemExit):  # so few jobs gain nothing
            elastic_days.main()
    assert ran == [1, 1, 2, 2]
    assert [run["seed"] for run in json.loads(file.read_text())["days"]] == ran
    assert "2 days: " in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["elastic_days", "--jobs", "4", "--json", str(file)])
    with pytest.raises(SystemExit, match="name another file"):
        elastic_days.main()
