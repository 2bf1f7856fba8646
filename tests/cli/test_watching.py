"""A watch prints each change once: `list -w`, `status -w`, and the lines of `wait`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from meshwright_cli.client.objects import Job
from meshwright_cli.jobs.changes import ChangedRows, ChangeLines
from meshwright_cli.jobs.list_view import list_header, list_row
from tests.cli.live_server import PROGRAM, LiveServer, condition, job, live_server, running
from tests.patience import patient

NOW = datetime(2026, 1, 2, 4, 0, tzinfo=UTC)
JOBS = "/apis/meshwright.dev/v1alpha1/namespaces/default/paralleltrainingjobs"


def made(step: int = 0, total: int = 1000, **status) -> Job:
    body = job("lm")
    body["metadata"] |= {"namespace": "ml", "creationTimestamp": "2026-01-02T03:00:00Z"}
    return Job({**body, "status": running(step=step, totalSteps=total, **status)})


def lines_of(states) -> list[str]:
    changes = ChangeLines()
    return [line for time, state in states if (line := changes.line(state, time)) is not None]


def test_progress_is_told_every_minute_or_every_twentieth_of_the_steps():
    every_ten_seconds = [(10.0 * tick, made(tick)) for tick in range(13)]
    assert lines_of(every_ten_seconds) == [f"Running: step {n} of 1,000" for n in (0, 6, 12)]
    fast = [(0.1 * tick, made(20 * tick)) for tick in range(51)]
    assert lines_of(fast)[:3] == [f"Running: step {n} of 1,000" for n in (0, 60, 120)]
    assert lines_of(fast)[-1] == "Running: step 1,000 of 1,000"
    assert len(lines_of(fast)) <= 21


def test_a_change_of_the_state_is_told_at_once_and_once():
    queued = made(conditions=[condition("Ready", "False", "DoesNotFit", "3 of 4 workers fit")])
    restart = made(5, conditions=[condition("Ready", "False", "Restarting", "a pod was lost")])
    unreported = Job({**queued.raw, "status": {}})  # at each `submit`: no reason to send people to `doctor`
    states = [unreported, queued, queued, made(1), made(2), restart, restart, made(5), made(5), None]
    assert lines_of((0.1 * index, state) for index, state in enumerate(states)) == [
        "Pending",
        "DoesNotFit: 3 of 4 workers fit",
        "Running: step 1 of 1,000",
        "Restarting: a pod was lost",
        "Running: step 5 of 1,000",
        "deleted",
    ]


def tokenizing(percent: int, ranks: int = 0) -> Job:
    text = f"{ranks} of 4 ranks are training in generation 1. Tokenizing the data: {percent}% of 1.2 GB at 25 MB/s"
    return made(conditions=[condition("Ready", "False", "Starting", f"{text} on worker 0")])


def test_how_much_text_is_tokenized_is_told_every_minute():
    lines = lines_of((10.0 * tick, tokenizing(tick)) for tick in range(13))
    assert [line.split("%")[0].split()[-1] for line in lines] == ["0", "6", "12"]
    assert len(lines_of([(0.0, tokenizing(1)), (1.0, tokenizing(1, ranks=2))])) == 2, "more than progress"
    assert len(rows_of([tokenizing(1), tokenizing(2), tokenizing(3, ranks=1)], wide=True)) == 3, "with the header"


def rows_of(jobs, *, wide: bool = False) -> list[str]:
    rows = ChangedRows(list_header(wide=wide, namespaces=False))
    found = []
    for index, one in enumerate(jobs):
        row = None if one is None else list_row(one, NOW + timedelta(minutes=index), wide=wide, namespaces=False)
        found += rows.lines(("ml", "lm"), row)
    return found


@pytest.mark.parametrize("wide", [False, True])
def test_a_row_is_printed_again_only_if_a_column_changes_that_is_no_time(wide):
    # The ledger, the rate and the estimate change with each write of the status, and so do ages.
    same = [made(7, etaSeconds=100 - index, tokensPerSecond=1000 + index) for index in range(5)]
    lines = rows_of([*same, made(8), made(8), None, None], wide=wide)
    assert [line.split()[0] for line in lines] == ["NAME", "lm", "lm", "lm"]
    assert [line.split()[3] for line in lines[1:]] == ["7/1000", "8/1000", "8/1000"]
    assert lines[-1].split()[1] == "Deleted"
    starts = {line.index(word) for line, word in zip(lines, ("RANKS", "4/4", "4/4", "4/4"), strict=True)}
    assert len(starts) == 1, lines


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("server"), "embedded") as made:
        yield made


async def watched(server: LiveServer, *words: str, states: list[dict]) -> list[str]:
    """The lines of a command that watches while the status is written, each time with another estimate."""
    process = await asyncio.create_subprocess_exec(
        PROGRAM, *words, "--kubeconfig", str(server.kubeconfig), env={**os.environ, "COLUMNS": "200"},
        stdout=asyncio.subprocess.PIPE, stderr=sys.stderr,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []

    async def until(text: str) -> None:
        while not lines or text not in lines[-1]:
            line = await process.stdout.readline()
            assert line, lines
            lines.append(line.decode().rstrip())

    try:
        async with asyncio.timeout(patient(60)):
            for state in states:
                await until(state.pop("before"))
                for eta in range(3):
                    body = {"status": {**state, "etaSeconds": eta}}
                    path, kind = f"{JOBS}/watched/status", "application/merge-patch+json"
                    await asyncio.to_thread(server.call, "PATCH", path, body, kind)
            await until("Completed")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    return lines


COMPLETE = [condition("Ready", "False", "Completed", "done"), condition("Complete", "True", "Completed")]


@pytest.mark.parametrize("words", [("list", "-w"), ("list", "-A", "-w", "-o", "wide"), ("status", "watched", "-w")])
def test_commands_that_watch_repeat_nothing(server, words):
    server.apply(JOBS, {**job("watched"), "status": running(step=1)})
    mark = "Running:" if words[0] == "status" else "1/60"
    states = [
        {"before": mark, "step": 5},
        {"before": "step 5 of" if words[0] == "status" else "5/60", "step": 60, "conditions": COMPLETE},
    ]
    lines = asyncio.run(watched(server, *words, states=states))
    start = next(index for index, line in enumerate(lines) if mark in line)
    assert len(set(lines[start:])) == len(lines[start:]) == 3, lines


def test_a_watch_has_no_machine_readable_form(server):
    assert "--watch cannot be used with -o json" in server.cli("list", "-w", "-o", "json", code=2).stderr
