"""Jobs to report about: planned by the real planner, with a status as the operator writes it."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshwright_cli.plan.inventory_file import NodeEntry, nodes_of
from meshwright_cli.plan.report import plan_report

H100 = "NVIDIA-H100-80GB-HBM3"
NOW = datetime(2026, 11, 25, 18, 0, 0, tzinfo=UTC)
HOSTILE = "<img src=x onerror=alert(1)>"


def nodes(racks: int = 4, per_rack: int = 2, *, gpus: int = 8, busy: int = 0) -> list[dict[str, Any]]:
    """Nodes in racks. The first `busy` racks have one node less, so that replicas must leave a rack."""
    found = []
    for rack in range(racks):
        for node in range(per_rack - (rack < busy)):
            labels = {"network.topology.nvidia.com/leaf": f"rack-{rack}", "fabric.topograph.run/tier-0": f"rack-{rack}"}
            entry = NodeEntry(name=f"rack{rack}-node{node}", gpus=gpus, product=H100, labels=labels)
            found += [made for made, _ in nodes_of(entry, "nvidia.com/gpu")]
    return found


def manifest(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "meshwright.dev/v1alpha1",
        "kind": "ParallelTrainingJob",
        "metadata": {"name": "llama-70b", "namespace": "research", "uid": "u1"},
        "spec": {
            "replicas": 2,
            "model": {"preset": "llama-3-8b"},
            "parallelism": {"tensor": 4, "pipeline": 4, "microBatches": 8, "schedule": "1F1B"},
            "data": {"source": "PythonStdlib"},
            "training": {"steps": 1000, "globalBatchSize": 64, "sequenceLength": 8192, "precision": "bf16"},
            "workers": {"image": "worker:1", "gpusPerWorker": 8},
            **spec,
        },
    }


def running_job(job: dict[str, Any], cluster: list[dict[str, Any]]) -> dict[str, Any]:
    """The object of a job that runs, as planned and placed on a cluster."""
    found = plan_report(job, cluster, [])
    assert found.placement is not None
    since = "2026-11-25T17:59:50Z"
    status = {
        "plan": found.plan.to_status().model_dump(mode="json", by_alias=True, exclude_none=True),
        "placement": found.placement.to_status(job["metadata"]["name"], {}).model_dump(
            mode="json", by_alias=True, exclude_none=True
        ),
        "step": 612,
        "totalSteps": 1000,
        "loss": "2.1874",
        "tokensPerSecond": 171000,
        "etaSeconds": 1200,
        "readyRanks": "32/32",
        "restartCount": 2,
        "replicas": 2,
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "lastTransitionTime": since,
                "reason": "Running",
                "message": "32 ranks train in generation 3",
            }
        ],
        "goodput": {
            "cause": "Training",
            "since": since,
            "booked": [
                {"cause": "Queued", "milliseconds": 92000},
                {"cause": "Starting", "milliseconds": 61000},
                {"cause": "Training", "milliseconds": 5_940_000},
                {"cause": "Detecting", "milliseconds": 12_000},
                {"cause": "Restarting", "milliseconds": 44_000},
                {"cause": "RedoneSteps", "milliseconds": 130_000},
                {"cause": "CheckpointStall", "milliseconds": 21_000},
                {"cause": "Rescaling", "milliseconds": 3_400},
            ],
            "furthestStep": 612,
        },
    }
    return {**job, "status": status}


def history_lines(steps: int = 612) -> str:
    """A tracker's file: a loss that falls, a restart and a rescale."""
    lines = []
    for step in range(1, steps + 1):
        slow = 0.5 if 250 <= step < 400 else 1.0
        record = {
            "step": step,
            "loss": 2.0 + 8.0 * math.exp(-step / 90) + 0.05 * math.sin(step * 1.7),
            "tokensPerSecond": 171_000 * slow * (1 + 0.01 * math.sin(step)),
            "stepSeconds": 3.1 / slow,
            "pipelineBubble": 0.29,
        }
        if step % 100 == 0:
            record["evaluationLoss"] = 2.1 + 8.0 * math.exp(-step / 90)
        lines.append(json.dumps(record))
        if step == 180:
            lines.append(json.dumps({"step": 180, "event": "Restart", "cause": "PodLost", "generation": 2}))
        if step in (249, 399):
            lines.append(json.dumps({"step": step, "event": "Rescale", "cause": "Rescaled", "generation": 3}))
    return "\n".join(lines) + "\n"


def write(path: Path, content: str) -> Path:
    path.write_text(content)
    return path
