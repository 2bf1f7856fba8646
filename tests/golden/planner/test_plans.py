"""What `meshwright plan -o json` decides, counts and says, for every preset, GPU, field, inventory and objective.

The command makes the operator's own plan and placement, compares the plan with its neighbors, and searches the whole
cluster with every degree free. Recorded through the command alone, so that no internal name stands between.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from meshwright_cli.main import main
from tests.golden.files import SAME_FLOAT, check, check_sample
from tests.golden.planner.clusters import CLUSTERS
from tests.golden.planner.jobs import Case, cases, often
from tests.golden.planner.records import refusal
from tests.tiers import mostly_long

CASES = cases()
SAMPLE = (
    "parallelism CP 4 TP 2",
    "placed workers of 1: h100 racks",
    "preset gpt2-large 0: t4",
    "refused configuration that is not built",
    "refused workers of 16",
)
"""Long cases that take little time."""


def run(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """(decisions and numbers, text) of one case, in the current directory."""
    Path("job.yaml").write_text(json.dumps(case.job))
    nodes = CLUSTERS[case.cluster] if isinstance(case.cluster, str) else case.cluster
    Path("nodes.yaml").write_text(json.dumps(nodes))
    words = ["plan", "-f", "job.yaml", "--inventory", "nodes.yaml", "-o", "json", *case.flags]
    result = CliRunner().invoke(main, words, standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        error = result.exception.__cause__ or result.exception
        return refusal(error), {"error": str(error)}
    document = json.loads(result.stdout)
    return without_nothing({"exit": result.exit_code, **decisions(document)}), without_nothing(sentences(document))


def decisions(document: dict[str, Any]) -> dict[str, Any]:
    """Everything but text; of layouts that were not taken, what tells them apart."""
    wider, placement, quality = (document[key] or {} for key in ("wholeCluster", "placement", "placementQuality"))
    return {
        "plan": {key: value for key, value in document["plan"].items() if key not in ("summary", "reasons")},
        "estimate": document["estimate"],
        "unplaced": (document["estimateUnplaced"] or {}).get("stepSeconds"),
        "placement": {
            **{key: value for key, value in placement.items() if key != "workers"},
            **{key: value for key, value in quality.items() if key != "notes"},
            "nodes": " ".join(worker["node"] for worker in placement.get("workers", ())),
        },
        "pending": bool(document["pending"]),
        "notChosen": [one["timeRatio"] for one in document["notChosen"]],
        "whatIf": [one["speedup"] for one in document["whatIf"]],
        "wholeCluster": wider
        and {
            "gpus": wider["gpus"],
            "best": {key: value for key, value in wider["best"].items() if key != "summary"},
            "asGood": [short(one) for one in wider["asGood"]],
            "alternatives": [short(one) for one in wider["alternatives"]],
            "spec": wider["spec"],
        },
    }


def short(layout: dict[str, Any]) -> dict[str, Any]:
    """A layout of many: its choices but for what the job fixed, and its step."""
    choices = {key: value for key, value in layout["choices"].items() if key not in ("settings", "numbers")}
    estimate = layout["estimate"]
    return {
        "choices": " ".join(f"{key}={value}" for key, value in sorted(choices.items()) if value not in DEFAULTS),
        "seconds": estimate["stepSeconds"],
        "memory": estimate["memoryBytes"],
        "afterALostNode": layout["stepSecondsAfterALostNode"],
    }


DEFAULTS = (None, False, 1, "none")


def sentences(document: dict[str, Any]) -> dict[str, Any]:
    """The text that people see."""
    wider = document["wholeCluster"] or {}
    return {
        "plan": document["plan"]["summary"],
        "reasons": document["plan"].get("reasons"),
        "notes": (document["placementQuality"] or {}).get("notes"),
        "pending": document["pending"],
        "notChosen": [f"{one['change']}: {one['reason']}" for one in document["notChosen"]],
        "wholeCluster": wider and [wider["best"]["summary"], *wider["reasons"]],
        "whatIf": [f"{one['change']} | {one['sentence']}" for one in document["whatIf"]],
        "warnings": document["warnings"],
    }


def without_nothing(value: Any) -> Any:
    """The value without fields that are null, false, 0 or empty: recorded outputs of the command show those."""
    if isinstance(value, dict):
        kept = {key: without_nothing(one) for key, one in value.items()}
        return {key: one for key, one in kept.items() if one and one != "0" and not _rounded(one)}
    return [without_nothing(one) for one in value] if isinstance(value, list) else value


def _rounded(value: Any) -> bool:
    """Whether a number is 0 but for rounding."""
    return isinstance(value, float) and abs(value) < SAME_FLOAT


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tier", mostly_long(["plans", "plans-long"], lambda tier: tier == "plans"))
def test_plans(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = {name: case for name, case in CASES.items() if often(name) == (tier == "plans")}
    found = {name: run(case) for name, case in chosen.items()}
    check(f"planner/{tier}.jsonl", {name: one for name, (one, _) in found.items()})
    check(f"planner/{tier}-text.jsonl", {name: text for name, (_, text) in found.items()})


def test_a_sample_of_the_long_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = {name: run(CASES[name]) for name in SAMPLE}
    check_sample("planner/plans-long.jsonl", {name: one for name, (one, _) in found.items()})
    check_sample("planner/plans-long-text.jsonl", {name: text for name, (_, text) in found.items()})


def test_there_are_at_least_300() -> None:
    assert len(CASES) >= 300
