"""Reports of jobs that do not run read the stored timeline once, and say why if they cannot."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshwright.schedules.measured import RankTimeline, stored_text
from meshwright_cli.client.errors import ForbiddenError
from meshwright_cli.client.objects import Job
from meshwright_cli.report import cluster_source
from tests.cli.live_server import condition, job, running

TEXT = "".join(stored_text(RankTimeline(3, stage, 2, [(f"F{stage}.0", -400, 400)])) for stage in range(2))


def finished(**spec: Any) -> Job:
    made = job("lm", **spec)
    made["metadata"] |= {"namespace": "research", "uid": "01234567"}
    return Job({**made, "status": running(conditions=[condition("Complete", "True", "Completed")])})


def read_twice(made: Job, monkeypatch: pytest.MonkeyPatch, answer: str | Exception) -> tuple[list[Any], list[str], int]:
    """What two refreshes of a live page show, their notes, and how often the claim was read."""
    calls = []

    async def read(*arguments: Any) -> str:
        calls.append(arguments)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(cluster_source, "read_on_claim", read)
    stored: cluster_source.Stored = {}
    notes: list[str] = []

    async def refresh() -> Any:
        return await cluster_source._stored(None, made, [], notes, stored)  # type: ignore[arg-type]

    found = [asyncio.run(refresh()) for _ in range(2)]
    return found, notes, len(calls)


def test_it_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, notes, reads = read_twice(finished(), monkeypatch, TEXT)
    assert [one.step for one in found] == [3, 3]
    assert (notes, reads) == ([], 1)


def test_why_it_cannot_be_read_is_a_note_of_each_page(monkeypatch: pytest.MonkeyPatch) -> None:
    found, notes, reads = read_twice(finished(), monkeypatch, ForbiddenError("you may not create pods"))
    assert found == [None, None]
    assert notes == ["No measured timeline, because claim runs cannot be read: you may not create pods"] * 2
    assert reads == 1


def test_a_job_without_a_claim_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_twice(finished(checkpoint=None), monkeypatch, TEXT) == ([None, None], [], 0)
