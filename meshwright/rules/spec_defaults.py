"""The defaults of the spec in each revision scheme: data about released versions, which no change of the code alters.

A revision is computed with the table of its scheme (`meshwright.rules.revision`). `FIRST` are the defaults of version
0.1.0. A later version that changes a default, adds a field with one, or changes when a field takes effect, adds a
table: `2: {**FIRST, "field": value}`. A test compares the last table with the classes in `meshwright.api`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

FIRST: Mapping[str, Any] = MappingProxyType(
    {
        "replicas": 1,
        "model.mixture.sharedIntermediateSize": 0,
        "model.mixture.denseLayers": 0,
        "model.mixture.every": 1,
        "model.mixture.router": "Softmax",
        "model.mixture.renormalize": True,
        "model.mixture.scaling": 1.0,
        "model.mixture.groups": 1,
        "model.mixture.groupsPerToken": 1,
        "model.mixture.balancing": "Auxiliary",
        "model.mixture.zLossWeight": 0.0,
        "model.mixture.biasRate": 0.001,
        "model.latent.queryRank": 0,
        "model.ropeScaling.kind": "Llama3",
        "model.ropeScaling.lowFrequencyFactor": 1.0,
        "model.ropeScaling.highFrequencyFactor": 4.0,
        "model.ropeScaling.scoreFactor": 1.0,
        "model.ropeScaling.originalLength": 8192,
        "data.source": "Files",
        "data.pattern": "**/*",
        "data.format": "Text",
        "data.field": "text",
        "data.heldOut": 0.0,
        "data.tokenizer": "Byte",
        "data.packing": "Text",
        "data.balance": False,
        "data.onCorruptRecord": "Fail",
        "data.mixture": [],
        "data.mixture[].weight": 1.0,
        "training.seed": 0,
        "training.precision": "fp32",
        "training.masterWeights": True,
        "training.fp8.scaling": "Tensorwise",
        "training.fp8.update": "Dynamic",
        "training.fp8.history": 16,
        "training.fp8.inputAmax": 16.0,
        "training.fp8.weightAmax": 4.0,
        "training.fp8.gradientAmax": 1.0,
        "training.lossScale": {},
        "training.lossScale.initial": 65536,
        "training.lossScale.growthInterval": 2000,
        "training.optimizer": {},
        "training.optimizer.name": "AdamW",
        "training.optimizer.momentum": 0.95,
        "training.optimizer.offload": "None",
        "training.optimizer.learningRate": 0.0003,
        "training.optimizer.minLearningRate": 0.0,
        "training.optimizer.warmupSteps": 0,
        "training.optimizer.weightDecay": 0.1,
        "training.optimizer.beta1": 0.9,
        "training.optimizer.beta2": 0.95,
        "training.optimizer.gradientClip": 1.0,
        "training.dropout": 0.0,
        "training.attentionDropout": 0.0,
        "training.checkpointEvery": 2,
        "training.activationOffload": False,
        "training.parameterOffload": False,
        "training.compile": False,
        "training.deterministic": True,
        "training.outer.everySteps": 50,
        "training.outer.learningRate": 0.7,
        "training.outer.momentum": 0.9,
        "training.outer.staleness": 8,
        "training.lora.rank": 8,
        "training.lora.alpha": 16.0,
        "training.lora.targets": ["Query", "Value"],
        "training.evaluation.everySteps": 100,
        "training.evaluation.samples": 64,
        "parallelism": {},
        "parallelism.sequence": True,
        "parallelism.expertTensor": True,
        "parallelism.tensorOverlap": False,
        "parallelism.contextMethod": "RingZigZag",
        "parallelism.stageBalance": "Layers",
        "parallelism.rematerialize": False,
        "parallelism.zeroStage": 0,
        "parallelism.dataParallel": {},
        "parallelism.dataParallel.bucketElements": 16777216,
        "parallelism.dataParallel.overlap": True,
        "parallelism.dataParallel.compression": "None",
        "parallelism.dataParallel.compressionRank": 4,
        "parallelism.dataParallel.compressionDensity": 0.01,
        "workers.imagePullSecrets": [],
        "workers.gpusPerWorker": 8,
        "workers.gpuResource": "nvidia.com/gpu",
        "workers.resources": {},
        "workers.env": [],
        "workers.env[].value": "",
        "workers.volumes": [],
        "workers.volumes[].readOnly": False,
        "workers.labels": {},
        "workers.annotations": {},
        "workers.nodeSelector": {},
        "workers.tolerations": [],
        "workers.tolerations[].operator": "Equal",
        "workers.terminationGracePeriodSeconds": 60,
        "runtime": {},
        "recovery": {},
        "recovery.maxRestarts": 10,
        "recovery.cordonedNodes": "Move",
        "recovery.spareNodes": 0,
        "recovery.exitCodes": [],
        "successPolicy": "AllWorkers",
        "priority": 0,
        "suspend": False,
    }
)
"""Path below `spec` -> value of an absent field. `[]` stands for every item of a list. Objects come before members."""

CHOSEN_BY_THE_PLANNER = ("parallelism.contextMethod", "parallelism.zeroStage")
"""Fields of `FIRST` that have no default from scheme 2 on: the planner chooses what is left out."""

SECOND: Mapping[str, Any] = MappingProxyType(
    {
        **{path: value for path, value in FIRST.items() if path not in CHOSEN_BY_THE_PLANNER},
        "elastic.minReplicas": 1,
        "elastic.fill": False,
        "elastic.replacementSeconds": 30,
        "elastic.onLoss": "Replace",
        "elastic.pauseSeconds": 300,
        "elastic.minGainPercent": 0,
        "preemptible": False,
        "updatePolicy": "Now",
        "elastic.replan": False,
        "training.tracking.jsonLines": True,
        "training.tracking.tensorBoard": False,
        "training.tracking.wandb.offline": False,
        "training.shardedMasters.gradients": "bf16",
        "training.anomalies.nonFinite": "Fail",
        "training.anomalies.spikeSigmas": 6.0,
        "training.anomalies.window": 128,
        "training.anomalies.goBackSteps": 100,
        "training.anomalies.maxSkipped": 10,
        "recovery.suspectNodes.failures": 2,
        "recovery.suspectNodes.windowSeconds": 3600,
        "recovery.suspectNodes.avoidSeconds": 86400,
        "preflight.mode": "Warn",
        "preflight.fatal": [],
        "preflight.ignored": [],
        "preflight.numaBinding": True,
    }
)
"""Of version 0.2.0, which adds `elastic`, `preemptible`, `updatePolicy`, `training.tracking`, `training.anomalies` and
`preflight`."""

DEFAULTS: Mapping[int, Mapping[str, Any]] = MappingProxyType({1: FIRST, 2: SECOND})
"""Scheme -> defaults."""

_LATER = (
    "preemptible",
    "updatePolicy",
    "preflight",
    "checkpoint.every",
    "checkpoint.keepFor",
    "checkpoint.keepEverySteps",
    "checkpoint.keepBest",
)
"""Fields of later versions that are in no revision, whatever its scheme: workers of older versions do not restart."""

_NO_RESTART_FIRST = (
    *_LATER,
    "suspend",
    "activeDeadlineSeconds",
    "ttlSecondsAfterFinished",
    "recovery",
    "successPolicy",
    "priority",
    "checkpoint.everySteps",
    "checkpoint.keep",
    "checkpoint.staging",
    "checkpoint.writer",
    "managedBy",
)

NO_RESTART: Mapping[int, tuple[str, ...]] = MappingProxyType({1: _NO_RESTART_FIRST, 2: (*_NO_RESTART_FIRST, "elastic")})
"""Scheme -> fields that restart no worker, which a revision does not cover."""

ELASTIC_SCHEME = 2
"""From this scheme on, a revision does not cover `replicas` if `elastic` is set: a resize keeps the pods."""

SCHEME = max(DEFAULTS)
"""The scheme of new revisions."""
