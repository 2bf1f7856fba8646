"""Causes of restarts: what each of them means, in code and in docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.api.field_docstrings import field_docstrings
from meshwright.api.spec import RecoverySpec
from meshwright.api.status import MeshStatus
from meshwright.rules import recovery_times
from meshwright.rules.recovery_times import backoff_seconds
from meshwright_operator.decide import report_interval
from meshwright_operator.decide.restart_policy import (
    CAUSES,
    HANG,
    RestartCause,
    backoff_left,
    cause_named,
    declare,
)
from tests.operator.builders import ago, observed, running_status

RECOVERY = (Path(__file__).parents[2] / "docs" / "recovery.md").read_text()


@pytest.mark.parametrize(("failed", "seconds"), [(0, 0), (1, 0), (2, 2), (3, 4), (5, 16), (100, 60)])
def test_backoff_grows_to_a_minute(failed: int, seconds: float) -> None:
    assert backoff_seconds(failed) == seconds


@pytest.mark.parametrize("name", sorted(CAUSES))
def test_a_generation_waits_only_after_causes_that_back_off(name: str) -> None:
    status = running_status(mesh=MeshStatus(generation=1, pending_cause=name, pending_since=ago(1), failures=3))
    left, pause = backoff_left(observed(status=status), CAUSES[name])
    assert (left, pause) == ((3.0, 4.0) if name in ("Hang", "RankFailure") else (0.0, 0.0))


def test_a_cause_has_one_declaration() -> None:
    with pytest.raises(ValueError, match="Hang is declared twice"):
        declare(RestartCause("Hang"))
    assert cause_named("Hang") is HANG


def test_a_status_may_name_a_cause_of_another_version() -> None:
    unknown = cause_named("Sabotage")
    assert (unknown.name, unknown.limited, unknown.backs_off) == ("Sabotage", False, False)


def test_the_docs_say_of_every_cause_whether_it_counts() -> None:
    rows = re.findall(r"^\| .* \| `(\w+)` \| (yes|no) \|$", RECOVERY, re.MULTILINE)
    assert dict(rows) == {c.name: "yes" if c.limited else "no" for c in CAUSES.values() if c.restarts}


def test_the_description_of_the_field_and_the_docs_give_the_numbers_of_the_hang_rule() -> None:
    words = {10: "ten times"}[recovery_times.TIMEOUT_STEPS]
    description = field_docstrings(RecoverySpec)["hang_timeout_seconds"]
    for text, unit in ((description, "seconds"), (" ".join(RECOVERY.split()), "s")):
        assert words in text
        assert f"at least {recovery_times.MIN_TIMEOUT_SECONDS:.0f} {unit}" in text
        assert re.search(rf"(less than|at least) {recovery_times.FIRST_STEP_SECONDS:.0f} {unit}", text)
    assert f"not reported for {report_interval.SILENT_SECONDS:.0f} s" in RECOVERY
