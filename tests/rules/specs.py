"""Specs that tests of rules change: two that break no rule, and fragments that many changes have in common."""

from __future__ import annotations

import copy
from typing import Any

GOOD: dict[str, Any] = {
    "replicas": 2,
    "model": {
        "layers": 4,
        "hiddenSize": 128,
        "intermediateSize": 384,
        "heads": 4,
        "kvHeads": 2,
        "vocabSize": 320,
    },
    "data": {"source": "PythonStdlib"},
    "training": {"steps": 100, "globalBatchSize": 16, "sequenceLength": 128},
    "parallelism": {"tensor": 2, "pipeline": 2, "microBatches": 4},
    "workers": {"image": "worker", "gpusPerWorker": 2},
}
COMMAND: dict[str, Any] = {
    "replicas": 4,
    "runtime": {"command": ["python", "train.py"]},
    "workers": {"image": "worker", "gpusPerWorker": 2},
}


def changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with dotted paths set, or removed where the value is None."""
    spec = copy.deepcopy(base)
    for path, value in changes.items():
        *parents, last = path.split(".")
        at = spec
        for name in parents:
            at = at.setdefault(name, {})
        if value is None:
            at.pop(last, None)
        else:
            at[last] = value
    return spec


SECRET_KEY = {"secretKeyRef": {"name": "hub", "key": "token"}}
CONFIG_KEY = {"configMapKeyRef": {"name": "hub", "key": "url"}}


def volumes(*changes: dict[str, Any]) -> dict[str, Any]:
    """Volumes of a claim, each with these changes."""
    claim = {"name": "extra", "mountPath": "/extra", "claimName": "c"}
    return {"workers.volumes": [{k: v for k, v in {**claim, **c}.items() if v is not None} for c in changes]}


MIXED = {"parallelism.context": 4, "parallelism.contextMethod": "RingUlysses", "parallelism.ulysses": 2}


def mixture(**fields: Any) -> dict[str, Any]:
    """A mixture of 8 experts with these changes."""
    return {"model.mixture": {"experts": 8, "perToken": 2, "intermediateSize": 64, **fields}}


def shards(**fields: Any) -> dict[str, Any]:
    """`parallelism.dataParallel` with these fields."""
    return {f"parallelism.dataParallel.{name}": value for name, value in fields.items()}


def elastic(**fields: Any) -> dict[str, Any]:
    """An elastic job with these fields of `elastic`."""
    return {"elastic": fields, "checkpoint": {"claimName": "c"}}


def continuing(**fields: Any) -> dict[str, Any]:
    """An elastic job with these fields of `elastic`, whose replicas continue without lost ones."""
    return {**elastic(**fields), "recovery.inMemory": True, "recovery.onReplicaLoss": "Continue"}


BUDGET = {"gpus": 8, "replicas": None}
"""A number of GPUs instead of replicas, of which each has four."""
ISLANDS = {"training.outer": {"method": "DiLoCo"}}
MASTERS = {
    "training.precision": "bf16",
    "training.shardedMasters": {},
    "parallelism.zeroStage": 1,
    "parallelism.dataParallel.strategy": "ZeRO",
}
GATHERED = {"training.fp8": {"allGather": True}, "parallelism.zeroStage": 3}
ONE_STAGE = {"parallelism.tensor": 1, "parallelism.pipeline": 1}
ROUNDED = {"training.precision": "bf16", "training.masterWeights": False}
SELECTIVE = {"training.activationCheckpointing": "Selective", "training.compile": True}
STALE = {"parallelism.schedule": "PipeDream2BW", "training.optimizer": {"gradientClip": 0}}
ROUNDS = {"parallelism.schedule": "Interleaved1F1B", "training.globalBatchSize": 20}
BEST: dict[str, Any] = {
    "data.heldOut": 0.1,
    "training.evaluation": {"everySteps": 50},
    "checkpoint": {"claimName": "c", "keepBest": 2},
}
ODD = {"parallelism.pipeline": 3, "parallelism.microBatches": 6, "training.globalBatchSize": 12}
LATENT: dict[str, Any] = {"model.latent": {"kvRank": 16, "ropeSize": 8}, "model.kvHeads": None}

CONFIG = '{"model_type": "llama", "hidden_size": 64}'
