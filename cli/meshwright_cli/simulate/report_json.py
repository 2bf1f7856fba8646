"""The report of `meshwright simulate` as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from meshwright.api.goodput import TimeCause
from meshwright.simulation.study import Result, Row
from meshwright_cli.simulate.report import SimulationReport


def document(report: SimulationReport) -> dict[str, Any]:
    """The report. Times are in seconds; what is infinite is null."""
    setting, replay = report.setting, report.replay
    found: dict[str, Any] = {
        "job": {
            "name": report.name,
            "nodes": setting.nodes,
            "gpus": setting.gpus,
            "spareNodes": setting.policy.spares,
            "replicas": report.replicas,
            "stepSeconds": setting.step,
            "workSeconds": _finite(setting.work),
            "mtbfSeconds": _finite(setting.mtbf),
            "mtbfSource": report.mtbf_source,
            "checkpointIntervalSeconds": _finite(setting.interval),
        },
        "inputs": setting.inputs.wire(),
        "result": _result(report.result),
        "checkpointIntervals": _rows(report.intervals),
        "spareNodes": _rows(report.spares),
        "minReplicas": [
            {**shown, "name": str(report.replicas_of(row))}
            for row, shown in zip(report.minimum, _rows(report.minimum), strict=True)
        ],
        "checkpointTiers": _rows(report.tiers),
        "rungs": _rows(report.rungs),
        "recovery": _recovery(report),
        "advice": report.advice(),
        "notes": list(report.notes),
    }
    if replay is not None:
        found["ledger"] = {"goodput": replay.goodput, "seconds": dict(replay.seconds)}
    return found


def _recovery(report: SimulationReport) -> dict[str, Any]:
    """How the job recovers, and what one failure of each kind costs it."""
    policy = report.setting.policy
    return {
        "inMemory": policy.in_memory,
        "copyEverySteps": policy.copy_steps,
        "continues": policy.continues,
        "secondsLostByKind": {
            cost.kind: {
                "detecting": cost.detecting,
                "waitingForNodes": cost.waiting,
                "restarting": cost.restarting,
                "redoneSteps": cost.redone,
            }
            for cost in report.costs
        },
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _result(result: Result) -> dict[str, Any]:
    low, high = result.between(lambda one: one.goodput)
    first, last = result.between(lambda one: one.elapsed)
    kinds = result.setting.inputs.faults
    return {
        "runs": len(result.outcomes),
        "goodput": result.goodput,
        "goodput90PercentOfRuns": [low, high],
        "goodputError": _finite(result.error),
        "seconds": result.days * 86400.0,
        "seconds90PercentOfRuns": [first, last],
        "secondsByCause": {cause.value: result.mean(lambda one, c=cause: one.seconds[c]) for cause in TimeCause},  # type: ignore[misc]
        "failuresByKind": {kind: result.mean(lambda one, k=kind: float(one.failures[k])) for kind in kinds},  # type: ignore[misc]
        "degradedSeconds": result.mean(lambda one: one.degraded),
        "reachesMaxRestarts": result.reached_limit,
    }


def _rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {
            "name": row.name,
            "goodput": row.result.goodput,
            "goodputPerNode": row.result.per_node,
            "fields": row.fields,
            "isJob": row.is_job,
        }
        for row in rows
    ]
