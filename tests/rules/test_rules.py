"""Each rule in CEL and in Python says the same about the same spec."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.crd.definition import custom_resource_definition
from meshwright.crd.rule_placement import VALIDATIONS, add_rule, rules_of
from meshwright.rules.rule import Rule
from meshwright.rules.validation import SPEC_RULES, check_spec
from meshwright_local.apiserver.schema.cel import compile_expression, converted

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
ODD = {"parallelism.pipeline": 3, "parallelism.microBatches": 6, "training.globalBatchSize": 12}
LATENT: dict[str, Any] = {"model.latent": {"kvRank": 16, "ropeSize": 8}, "model.kvHeads": None}

CONFIG = '{"model_type": "llama", "hidden_size": 64}'

# (field that is blamed, changes to GOOD)
BAD: list[tuple[str, dict[str, Any]]] = [
    ("runtime.framework", {"runtime": {"framework": "TorchFT"}}),
    ("training.parameterOffloadPath", {"training.parameterOffloadPath": "/scratch"}),
    ("training.shardedMasters", {**MASTERS, "training.precision": "fp32"}),
    ("training.shardedMasters", {**MASTERS, "training.masterWeights": False}),
    ("training.shardedMasters", {**MASTERS, "parallelism.dataParallel.strategy": None}),
    ("training.shardedMasters", {**MASTERS, "parallelism.zeroStage": 2, **shards(strategy="FSDP")}),
    ("training.shardedMasters", {**MASTERS, "training.optimizer": {"name": "Muon"}}),
    ("training.shardedMasters", {**MASTERS, "training.optimizer": {"offload": "CPU"}}),
    ("training.shardedMasters", {**MASTERS, **ISLANDS}),
    ("workers.labels", {"workers.labels": {"meshwright.dev/job-name": "other"}}),
    ("workers.labels", {"workers.labels": {"queue": "a", "app.kubernetes.io/name": "mine"}}),
    ("workers.annotations", {"workers.annotations": {"prometheus.io/port": "1"}}),
    ("workers.annotations", {"workers.annotations": {"seccomp.security.alpha.kubernetes.io/pod": "unconfined"}}),
    ("workers.podGroup", {"workers.podGroup": {"kind": "Volcano"}}),
    ("workers.podGroup", {"workers.schedulerName": "kai-scheduler", "workers.podGroup": {"kind": "KAI"}}),
    (
        "workers.podGroup",
        {"workers.schedulerName": "default-scheduler", "workers.podGroup": {"kind": "Kubernetes", "queue": "q"}},
    ),
    ("recovery.spareNodes", {"workers.schedulerName": "volcano", "recovery": {"spareNodes": 1}}),
    ("parallelism.dataParallel.strategy", {"parallelism.dataParallel.strategy": "ZeRO", "parallelism.zeroStage": 0}),
    ("parallelism.dataParallel.strategy", {"parallelism.dataParallel.strategy": "DDP", "parallelism.zeroStage": 2}),
    ("parallelism.dataParallel.strategy", {"parallelism.zeroStage": 2, **shards(strategy="FULL_SHARD")}),
    (
        "parallelism.dataParallel.shardSize",
        {"parallelism.dataParallel.strategy": "HYBRID_SHARD", "parallelism.zeroStage": 3},
    ),
    ("parallelism.dataParallel.shardSize", {"parallelism.dataParallel.shardSize": 2, "parallelism.zeroStage": 0}),
    ("parallelism.dataParallel.shardSize", shards(shardSize=2, strategy="DDP")),
    ("parallelism.dataParallel.shardSize", {"parallelism.dataParallel.shardSize": 3, "parallelism.zeroStage": 1}),
    ("parallelism.dataParallel.reshardSize", {"parallelism.zeroStage": 2, **shards(reshardSize=2)}),
    ("parallelism.dataParallel.reshardSize", {"parallelism.dataParallel.reshardSize": 3, "parallelism.zeroStage": 3}),
    (
        "parallelism.dataParallel.compression",
        {"parallelism.dataParallel.compression": "Int8", "parallelism.zeroStage": 3},
    ),
    (
        "parallelism.dataParallel.reduceEveryMicroBatch",
        {"parallelism.zeroStage": 1, **shards(reduceEveryMicroBatch=True)},
    ),
    (
        "parallelism.dataParallel.reduceEveryMicroBatch",
        {"parallelism.zeroStage": 2, **shards(reduceEveryMicroBatch=True, strategy="ZeRO")},
    ),
    ("parallelism.dataParallel.reduceEveryMicroBatch", shards(reduceEveryMicroBatch=True, strategy="DDP")),
    ("checkpoint", {"checkpoint": {}}),
    ("checkpoint.uri", {"checkpoint": {"uri": "s3://key:secret@bucket/x"}}),
    ("checkpoint.uri", {"checkpoint": {"uri": "s3://key@bucket/x"}}),
    ("checkpoint.uri", {"checkpoint": {"uri": "abfs://box@account.dfs.core.windows.net/x?sig=abc"}}),
    ("checkpoint.uri", {"checkpoint": {"uri": "memory://bucket/x"}}),
    ("checkpoint.uri", {"checkpoint": {"uri": "simplecache://x::s3://bucket/x"}}),
    ("checkpoint.store", {"checkpoint": {"claimName": "c", "store": {}}}),
    ("checkpoint.store", {"checkpoint": {"uri": "gs://bucket/x", "store": {"encryption": "KMS"}}}),
    ("checkpoint.store.kmsKey", {"checkpoint": {"uri": "s3://b/x", "store": {"encryption": "S3", "kmsKey": "k"}}}),
    ("checkpoint.store.secretName", {"checkpoint": {"uri": "gs://bucket/x", "store": {"secretName": "s"}}}),
    ("checkpoint.store.everySteps", {"checkpoint": {"uri": "s3://b/x", "store": {"everySteps": 250}}}),
    ("checkpoint.every", {"checkpoint": {"claimName": "c", "every": "30m", "everySteps": 5}}),
    ("checkpoint.store.every", {"checkpoint": {"uri": "s3://b/x", "store": {"every": "Auto", "everySteps": 100}}}),
    ("training.tracking", {"training.tracking": {}, "checkpoint": {"uri": "s3://b/x"}}),
    ("training.outer.islands", {"training.outer": {"method": "DiLoCo", "islands": 3}}),
    (
        "training.outer.everySteps",
        {"training.outer": {"method": "DiLoCo", "everySteps": 30}, "checkpoint": {"claimName": "c"}},
    ),
    ("parallelism.dataParallel.shardSize", {**ISLANDS, "parallelism.zeroStage": 1, **shards(shardSize=2)}),
    ("parallelism.dataParallel.reshardSize", {"parallelism.zeroStage": 3, **shards(reshardSize=2)}),
    (
        "parallelism.dataParallel.reshardSize",
        {**ONE_STAGE, "parallelism.context": 2, "parallelism.zeroStage": 3, **shards(reshardSize=2)},
    ),
    (
        "parallelism.dataParallel.reshardSize",
        {**ONE_STAGE, **ISLANDS, "parallelism.zeroStage": 3, **shards(reshardSize=2)},
    ),
    (
        "parallelism.dataParallel.reshardSize",
        {**ONE_STAGE, "replicas": 8, "parallelism.zeroStage": 3, **shards(shardSize=2, reshardSize=4)},
    ),
    ("parallelism.zeroStage", {**mixture(), "parallelism.zeroStage": 1}),
    ("parallelism.zeroStage", {**mixture(), "parallelism.zeroStage": 2, **shards(strategy="ZeRO")}),
    (
        "parallelism.zeroStage",
        {**mixture(), "parallelism.tensor": 1, "parallelism.expert": 2, "parallelism.zeroStage": 1},
    ),
    ("parallelism.zeroStage", {"model.tieEmbeddings": True, "parallelism.zeroStage": 1}),
    ("parallelism.zeroStage", {"parallelism.schedule": "DualPipe", "parallelism.zeroStage": 1}),
    ("parallelism.zeroStage", {"training.optimizer.name": "Muon", "parallelism.zeroStage": 1}),
    ("parallelism.zeroStage", {**ROUNDED, "parallelism.zeroStage": 1}),
    ("training.parameterOffload", {"training.parameterOffload": True, "parallelism.zeroStage": 0}),
    ("training.parameterOffload", {"training.parameterOffload": True, **shards(strategy="NO_SHARD")}),
    ("parallelism.dataParallel.compression", shards(compression="Int8", strategy="FSDP")),
    ("replicas", {**BUDGET, "replicas": 2}),
    ("gpus", {**BUDGET, **ISLANDS, "training.outer": {"method": "DiLoCo", "islands": 2}}),
    ("gpus", {**BUDGET, "gpus": 1}),
    ("gpus", {**BUDGET, "gpus": 3}),
    ("gpus", {**BUDGET, "parallelism.context": 4}),
    ("training.parameterOffload", {"training.parameterOffload": True, "parallelism.zeroStage": 1}),
    (
        "training.parameterOffload",
        {"training.parameterOffload": True, "parallelism.zeroStage": 2, **shards(strategy="ZeRO")},
    ),
    (
        "training.parameterOffload",
        {"training.parameterOffload": True, "parallelism.zeroStage": 3, "replicas": 1, "parallelism.context": 1},
    ),
    (
        "training.parameterOffload",
        {**ISLANDS, "training.parameterOffload": True, "parallelism.zeroStage": 3, "parallelism.context": 1},
    ),
    ("training.outer.islands", {**ISLANDS, "replicas": 1}),
    ("training.outer", {**ISLANDS, "training.precision": "fp16"}),
    ("training.outer", {**ISLANDS, "training.fp8": {}}),
    ("training.outer", {**ISLANDS, **ROUNDED}),
    ("training.outer", {**ISLANDS, **STALE}),
    ("training.precision", {**STALE, "training.precision": "fp16"}),
    ("training.precision", {**STALE, "training.fp8": {}}),
    ("parallelism.expert", {**mixture(), **ISLANDS, "parallelism.expert": 2}),
    (
        "parallelism.expert",
        {**mixture(), "parallelism.expert": 2, "parallelism.zeroStage": 2, **shards(shardSize=2)},
    ),
    (
        "parallelism.expert",
        {**mixture(), "replicas": 1, "parallelism.context": 6, "parallelism.expert": 4, "training.fp8": {}},
    ),
    ("training.activationCheckpointing", SELECTIVE),
    ("training.activationCheckpointing", {**SELECTIVE, "parallelism.tensor": 1, "parallelism.context": 2}),
    (
        "training.activationCheckpointing",
        {**SELECTIVE, "parallelism.tensor": 1, "data.packing": "Documents"},
    ),
    ("training.activationCheckpointing", {**SELECTIVE, **mixture(), "parallelism.tensor": 1}),
    (
        "training.activationCheckpointing",
        {**SELECTIVE, "parallelism.tensor": 1, "training.fp8": {"update": "Delayed"}},
    ),
    ("training.activationCheckpointing", {**SELECTIVE, "parallelism.tensor": 1, "parallelism.schedule": "ZBH1"}),
    ("model.hiddenSize", {"model.hiddenSize": 130, "model.headSize": 32}),
    ("elastic", {"gpus": 16, "replicas": None, **elastic()}),
    ("runtime.command", {"model": None}),
    ("runtime.command", {"data": None}),
    ("runtime.command", {"training": None}),
    ("runtime.command", {"runtime.command": ["python"]}),
    ("runtime.scripts", {"runtime.scripts": "scripts"}),
    ("runtime.agent", {"runtime.agent": "Injected"}),
    ("checkpoint.verify", {"checkpoint": {"claimName": "c", "verify": ["true"]}}),
    ("runtime.progress", {"runtime.progress": {"totalSteps": 10}}),
    ("model.preset", {"model.preset": "llama-3-8b"}),
    ("model.preset", {"model": {"preset": "llama-3-8b", "tieEmbeddings": False}}),
    ("model.preset", {"model": {"preset": "llama-3-8b", "ropeTheta": 10000}}),
    ("model.preset", {"model": {"preset": "llama-3-8b", "huggingFace": CONFIG}}),
    ("model.huggingFace", {"model.huggingFace": CONFIG}),
    ("model.huggingFace", {"model": {"huggingFace": CONFIG, "tieEmbeddings": False}}),
    ("model.huggingFace", {"model": {"huggingFace": "meta-llama/Llama-3.1-8B"}}),
    ("model.huggingFace", {"model": {"huggingFace": "[" + CONFIG + "]"}}),
    ("model.huggingFace", {"model": {"huggingFace": '{"hidden_size": 64}'}}),
    ("model", {"model": {}}),
    ("model", {"model.layers": None}),
    ("model", {"model.hiddenSize": None}),
    ("model", {"model.intermediateSize": None}),
    ("model", {"model.heads": None}),
    ("model", {"model.vocabSize": None}),
    ("model.kvHeads", {"model.kvHeads": 3}),
    ("model.kvHeads", {"model.kvHeads": 8}),
    ("model.hiddenSize", {"model.hiddenSize": 130}),
    ("model.hiddenSize", {"model.hiddenSize": 4}),
    ("model.preset", {"model": {"preset": "gpt2", "norm": "LayerNorm"}}),
    ("model.headSize", {"model.headSize": 33}),
    ("model.biases", {"model.biases": True}),
    ("model.latent", {"model.latent": {"kvRank": 16, "ropeSize": 8}}),
    ("model.latent", {"model.kvHeads": 4, "model.latent": {"kvRank": 16, "ropeSize": 7}}),
    (
        "model.latent",
        {"model.kvHeads": None, "model.queryKeyNorms": True, "model.latent": {"kvRank": 8, "ropeSize": 8}},
    ),
    ("model.ropeScaling", {"model.ropeScaling": {"factor": 8, "lowFrequencyFactor": 4}}),
    ("model.ropeScaling", {"model.positions": 128, "model.ropeScaling": {"factor": 8}}),
    ("model.positions", {"model.positions": 64}),
    ("model.vocabSize", {"model.vocabSize": 256}),
    ("replicas", {"replicas": 65536, "training.globalBatchSize": 65536 * 4, "workers.gpusPerWorker": 1024}),
    ("workers.gpusPerWorker", {"workers.gpusPerWorker": 3}),
    ("workers.gpusPerWorker", {"workers.gpusPerWorker": 16}),
    ("workers.gpusPerWorker", {"replicas": 1024, "training.globalBatchSize": 4096}),
    ("workers.gpusPerWorker", {"parallelism.tensor": 4, "model.kvHeads": 4, "workers.gpusPerWorker": 6, "replicas": 3}),
    ("workers.gpusPerWorker", {"parallelism.tensor": 3, "parallelism.pipeline": None}),
    ("parallelism.tensor", {"model.heads": 6, "model.kvHeads": 6, "model.hiddenSize": 120, "parallelism.tensor": 4}),
    ("parallelism.tensor", {"parallelism.tensor": 4}),
    ("parallelism.tensor", {"model.intermediateSize": 383}),
    ("parallelism.tensor", {"training.sequenceLength": 129}),
    ("parallelism.tensor", {"model.vocabSize": 257}),
    ("parallelism.tensorOverlap", {"parallelism.tensorOverlap": True, "parallelism.sequence": False}),
    ("parallelism.tensorOverlap", {"parallelism.tensorOverlap": True, "parallelism.tensor": 1}),
    ("parallelism.tensorOverlap", {"parallelism.tensorOverlap": True, "parallelism.tensor": None}),
    ("parallelism.tensorOverlap", {"parallelism.tensorOverlap": True, "training.fp8": {}}),
    ("parallelism.tensorOverlap", {"parallelism.tensorOverlap": True, "training.lora": {}}),
    ("parallelism.microBatches", {"parallelism.microBatches": 1}),
    ("parallelism.pipeline", {"training.globalBatchSize": 2, "parallelism.microBatches": None}),
    ("parallelism.tensor", {"model.kvHeads": None, "parallelism.tensor": 8, "workers.gpusPerWorker": 8}),
    ("parallelism.pipeline", {"parallelism.pipeline": 8}),
    ("model.tieEmbeddings", {"model.tieEmbeddings": True, **STALE}),
    ("parallelism.virtualStages", {"parallelism.virtualStages": 2}),
    ("parallelism.activationLimit", {"parallelism.activationLimit": 2}),
    ("parallelism.layerSplit", {"parallelism.layerSplit": [1, 1, 2]}),
    ("parallelism.layerSplit", {"parallelism.schedule": "ZBV", "parallelism.layerSplit": [2, 2]}),
    ("parallelism.layerSplit", {"parallelism.layerSplit": [1, 2]}),
    ("parallelism.pipeline", {"parallelism.schedule": "ZBV", "model.layers": 3}),
    ("parallelism.pipeline", {"parallelism.schedule": "LoopedBFS", "parallelism.virtualStages": 3}),
    ("parallelism.microBatches", {**ROUNDS, "parallelism.microBatches": 5}),
    ("parallelism.pipeline", {"parallelism.schedule": "DualPipe", **ODD}),
    ("parallelism.microBatches", {"parallelism.schedule": "DualPipe", "parallelism.microBatches": 2}),
    ("parallelism.microBatches", {"parallelism.schedule": "DualPipeV", "parallelism.microBatches": 2}),
    ("parallelism.microBatches", {**STALE, "parallelism.schedule": "PipeDream"}),
    ("training.optimizer.gradientClip", {"parallelism.schedule": "PipeDream2BW"}),
    ("parallelism.zeroStage", {**STALE, "parallelism.zeroStage": 2}),
    ("model.mixture", {**STALE, **mixture()}),
    ("parallelism.expertTensor", {"parallelism.expertTensor": False, "parallelism.sequence": False, **mixture()}),
    ("parallelism.expertDispatch", {"parallelism.expertDispatch": "OncePerNode"}),
    ("parallelism.expertDispatch", {"parallelism.expertDispatch": "Padded", **mixture()}),
    ("parallelism.expertDispatch", {"parallelism.expertDispatch": "OncePerNode", "training.fp8": {}, **mixture()}),
    ("parallelism.expertTensor", {"parallelism.expertTensor": False, "training.fp8": {}, **mixture()}),
    ("parallelism.rematerialize", {**STALE, "parallelism.rematerialize": True}),
    ("training.globalBatchSize", {"training.globalBatchSize": 9, "parallelism.microBatches": None}),
    ("training.globalBatchSize", {"replicas": 3, "parallelism.microBatches": None}),
    ("parallelism.microBatches", {"parallelism.microBatches": 3}),
    ("parallelism.microBatches", {"training.globalBatchSize": 12}),
    ("data.claimName", {"data.claimName": "text"}),
    ("data.claimName", {"data": {}}),
    ("data.claimName", {"data": {"source": "Files"}}),
    ("training.evaluation", {"training.evaluation": {}}),
    ("data.claimName", {"data": {"claimName": "c", "uri": "s3://b/c"}}),
    ("data.source", {"data.pattern": "*.py"}),
    ("data.source", {"data.format": "Tokens"}),
    ("data.source", {"data.mixture": [{"path": "a"}]}),
    ("data.tokenizerFile", {"data": {"claimName": "c", "tokenizer": "BPE"}}),
    ("data.tokenizerFile", {"data": {"claimName": "c", "tokenizerFile": "a.json"}}),
    ("data.field", {"data": {"claimName": "c", "field": "body"}}),
    ("training.optimizer.warmupSteps", {"training.optimizer.warmupSteps": 101}),
    ("training.optimizer.decaySteps", {"training.optimizer": {"decaySteps": 101}}),
    ("training.optimizer.decaySteps", {"training.optimizer": {"decaySteps": 61, "warmupSteps": 40, "decay": "Linear"}}),
    ("training.optimizer.decaySteps", {"training.optimizer": {"decaySteps": 5, "decay": "Constant"}}),
    (
        "training.optimizer.decaySteps",
        {"training.optimizer": {"decaySteps": 5, "decay": "InverseSquareRoot", "warmupSteps": 5}},
    ),
    ("training.optimizer.warmupSteps", {"training.optimizer": {"decay": "InverseSquareRoot"}}),
    ("training.optimizer.minLearningRate", {"training.optimizer.minLearningRate": 0.01}),
    ("training.optimizer.minLearningRate", {"training.optimizer": {"learningRate": 0.5, "minLearningRate": 1}}),
    ("training.masterWeights", {"training.masterWeights": False}),
    (
        "training.masterWeights",
        {"training.precision": "bf16", "training.masterWeights": False, "training.optimizer.name": "Muon"},
    ),
    ("training.fp8", {"training.fp8": {}, "training.precision": "fp16"}),
    ("training.fp8", {"training.fp8": {}, "training.lora": {}}),
    ("training.tracking", {"training.tracking": {}}),
    ("recovery.copyEverySteps", {"recovery.copyEverySteps": 10}),
    ("recovery.copyEverySteps", {"recovery.copyEverySteps": 10, "recovery.inMemory": False}),
    ("recovery.onReplicaLoss", {**continuing(), "recovery.inMemory": None}),
    ("recovery.onReplicaLoss", {**continuing(), "elastic": None}),
    ("recovery.onReplicaLoss", continuing(replan=True)),
    ("recovery.onReplicaLoss", {**continuing(), "recovery.copyEverySteps": 10}),
    ("recovery.onReplicaLoss", {**continuing(), "parallelism.zeroStage": 1}),
    ("recovery.onReplicaLoss", {**continuing(), "model": {"preset": "tiny-mixture"}, "parallelism.expert": 2}),
    ("recovery.suspectNodes", {"recovery.suspectNodes": {}, "workers.schedulerName": "volcano"}),
    ("training.anomalies", {"training.anomalies": {"nonFinite": "GoBack"}}),
    ("training.anomalies", {"training.anomalies": {"spike": "GoBack"}}),
    ("parallelism.stageBalance", {"parallelism.stageBalance": "Measured"}),
    (
        "parallelism.stageBalance",
        {"parallelism.stageBalance": "Measured", "checkpoint": {"claimName": "c"}, "elastic": {"minReplicas": 1}},
    ),
    ("training.anomalies.repeatEverySteps", {**mixture(), "training.anomalies": {"repeatEverySteps": 100}}),
    (
        "training.anomalies.repeatEverySteps",
        {"training.anomalies": {"repeatEverySteps": 100}, "training.deterministic": False},
    ),
    (
        "training.anomalies.repeatEverySteps",
        {"training.anomalies": {"repeatEverySteps": 100}, "parallelism.dataParallel.compression": "BF16"},
    ),
    ("training.anomalies", {"training.anomalies": {}, "training.outer": {"method": "LocalSGD"}, "replicas": 2}),
    (
        "training.anomalies",
        {
            "training.anomalies": {},
            "parallelism": {"pipeline": 2, "schedule": "PipeDream", "microBatches": 1},
            "training.optimizer.gradientClip": 0.0,
        },
    ),
    ("training.fp8.update", {"training.fp8": {"scaling": "Rowwise", "update": "Delayed"}}),
    ("training.fp8.allGather", {**GATHERED, "training.fp8": {"scaling": "Rowwise", "allGather": True}}),
    ("training.fp8.allGather", {**GATHERED, "training.fp8": {"update": "Delayed", "allGather": True}}),
    ("training.fp8.allGather", {**GATHERED, "parallelism.zeroStage": 1}),
    ("training.fp8.allGather", {**GATHERED, **shards(strategy="ZeRO"), "parallelism.zeroStage": 2}),
    ("training.fp8.allGather", {**GATHERED, **ONE_STAGE, **shards(reshardSize=2)}),
    ("training.fp8.allGather", {**GATHERED, "training.parameterOffload": True}),
    ("training.optimizer.offload", {"training.optimizer": {"name": "Muon", "offload": "CPU"}}),
    ("training.optimizer.offloadPath", {"training.optimizer.offload": "File"}),
    ("training.optimizer.offloadPath", {"training.optimizer.offloadPath": "/scratch"}),
    ("training.lora.targets", {**LATENT, "training.lora": {"targets": ["Key", "Value"]}}),
    ("training.lora.targets", {"model.gated": False, "training.lora": {"targets": ["Gate"]}}),
    ("training.lora.targets", {**mixture(), "training.lora": {"targets": ["Gate", "Up", "Down"]}}),
    ("workers.env", {"workers.env": [{"name": "A"}, {"name": "MESHWRIGHT_TOKEN", "value": "x"}]}),
    ("workers.env", {"workers.env": [{"name": "TORCHELASTIC_RUN_ID", "value": "x"}]}),
    ("workers.env", {"workers.env": [{"name": "WORLD_SIZE", "value": "1"}]}),
    ("workers.env", {"workers.env": [{"name": "MASTER_ADDR", "value": "1.2.3.4"}]}),
    ("workers.resources.devices", {"workers.resources": {"devices": {"rdma": 1}}}),
    ("workers.resources.devices", {"workers.resources": {"devices": {"kubernetes.io/x": 1}}}),
    ("workers.resources.devices", {"workers.resources": {"devices": {"nvidia.com/gpu": 8}}}),
    ("workers.resources.hugePages", {"workers.resources": {"cpu": "1", "hugePages": {"2M": "2Mi"}}}),
    ("workers.resources.hugePages", {"workers.resources": {"hugePages": {"2Mi": "4Mi"}}}),
    ("workers.resources.exclusiveCpus", {"workers.resources": {"exclusiveCpus": True, "cpu": "500m", "memory": "1Gi"}}),
    ("workers.resources.exclusiveCpus", {"workers.resources": {"exclusiveCpus": True, "cpu": "8"}}),
    ("workers.resourceClaims", {"workers.resourceClaims": [{"name": "a"}]}),
    (
        "workers.resourceClaims",
        {"workers.resourceClaims": [{"name": "a", "resourceClaimName": "b", "resourceClaimTemplateName": "c"}]},
    ),
    ("workers.resourceClaims", {"workers.resourceClaims": [{"name": "nvlink", "resourceClaimName": "b"}]}),
    ("workers.tolerations", {"workers.tolerations": [{"operator": "Equal", "value": "x"}]}),
    ("workers.tolerations", {"workers.tolerations": [{"operator": "Exists", "key": "a", "value": "x"}]}),
    ("workers.tolerations", {"workers.tolerations": [{"key": "a", "tolerationSeconds": 5, "effect": "NoSchedule"}]}),
    ("workers.tolerations", {"workers.tolerations": [{"operator": "Exists", "tolerationSeconds": 5}]}),
    ("workers.env", {"workers.env": [{"name": "A", "value": "a", "valueFrom": SECRET_KEY}]}),
    ("workers.env", {"workers.env": [{"name": "A", "valueFrom": {}}]}),
    ("workers.env", {"workers.env": [{"name": "A", "valueFrom": {**SECRET_KEY, **CONFIG_KEY}}]}),
    ("workers.volumes", volumes({"claimName": None})),
    ("workers.volumes", volumes({"scratch": "1Gi"})),
    ("workers.volumes", volumes({"name": "shm"})),
    ("workers.volumes", volumes({"name": "checkpoints"})),
    ("workers.volumes", volumes({"mountPath": "/meshwright"})),
    ("workers.volumes", volumes({"mountPath": "/meshwright/data/more"})),
    ("workers.volumes", volumes({"mountPath": "/dev/shm"})),
    ("workers.volumes", volumes({"mountPath": "/a/../dev"})),
    ("workers.volumes", volumes({"mountPath": "//dev/shm"})),
    ("workers.volumes", volumes({"mountPath": "/./meshwright/data"})),
    ("workers.volumes", volumes({"mountPath": "/a/."})),
    ("workers.volumes", volumes({}, {"name": "other"})),
    ("recovery.maxRestarts", {"recovery": {"maxRestarts": 101, "restartWindowSeconds": 600}}),
    ("successPolicy", {"successPolicy": "FirstWorker"}),
    ("parallelism.context", {"parallelism.context": 64}),
    ("workers.gpusPerWorker", {"parallelism.context": 3, "replicas": 1, "workers.gpusPerWorker": 8}),
    ("parallelism.ulysses", {"parallelism.ulysses": 2}),
    ("parallelism.ulysses", {"parallelism.context": 2, "parallelism.contextMethod": "RingUlysses"}),
    ("parallelism.ulysses", {**MIXED, "parallelism.ulysses": 3}),
    ("parallelism.context", {"parallelism.context": 4, "parallelism.contextMethod": "Ulysses"}),
    ("parallelism.ulysses", {**MIXED, "model.heads": 8, "model.kvHeads": 6, "parallelism.ulysses": 4}),
    ("parallelism.context", {"parallelism.context": 128, "parallelism.contextMethod": "Ring"}),
    ("parallelism.context", {**MIXED, "parallelism.context": 54, "parallelism.ulysses": 3}),
    ("training.sequenceLength", {**mixture(), "parallelism.context": 2, "training.sequenceLength": 126}),
    ("training.attentionDropout", {"parallelism.context": 2, "training.attentionDropout": 0.1}),
    ("model.mixture.capacityFactor", {**mixture(capacityFactor=1.25), "parallelism.context": 2}),
    ("data.balance", {"data.balance": True}),
    ("training.varlenAttention", {"training.varlenAttention": True}),
    (
        "training.varlenAttention",
        {"data.packing": "Documents", "training.varlenAttention": True, "training.attentionDropout": 0.1},
    ),
    ("model.preset", {"model": {"preset": "tiny", "mixture": mixture()["model.mixture"]}}),
    ("model.mixture.perToken", mixture(perToken=9)),
    ("model.mixture.groups", mixture(groups=3)),
    ("model.mixture.groupsPerToken", mixture(groupsPerToken=2)),
    ("model.mixture.groupsPerToken", mixture(groups=8)),
    ("model.mixture.renormalize", mixture(perToken=1)),
    ("model.mixture.auxiliaryWeight", mixture(balancing="None", auxiliaryWeight=0.1)),
    ("model.mixture.denseLayers", mixture(denseLayers=4)),
    ("model.mixture.denseLayers", mixture(denseLayers=2, every=3)),
    ("model.mixture", {**mixture(), "model.gated": False}),
    ("model.mixture", {**mixture(), "model.activation": "GELU"}),
    ("model.mixture", {**mixture(), "model.biases": True, "model.norm": "LayerNorm"}),
    ("parallelism.expert", {"parallelism.expert": 2}),
    ("parallelism.expert", {**mixture(), "parallelism.expert": 4}),
    ("parallelism.expert", {**mixture(experts=9), "parallelism.expert": 2}),
    ("parallelism.tensor", mixture(intermediateSize=63)),
    ("parallelism.tensor", mixture(sharedIntermediateSize=63)),
    ("elastic.minReplicas", elastic(minReplicas=3)),
    ("elastic.maxReplicas", elastic(maxReplicas=1)),
    ("elastic.maxReplicas", elastic(fill=True)),
    ("elastic.scaledBatch", elastic(replan=True, scaledBatch={"replicas": 2, "learningRate": "Linear"})),
    ("elastic.scaledBatch.replicas", elastic(scaledBatch={"replicas": 3, "learningRate": "Linear"})),
    ("topology", {"topology": {"data": {"required": "rack"}}, "workers.schedulerName": "volcano"}),
    ("elastic", {**elastic(), "checkpoint": None}),
    ("elastic", {**elastic(), "workers.schedulerName": "volcano"}),
    ("preemptible", {"preemptible": True, "workers.schedulerName": "volcano"}),
    ("updatePolicy", {"updatePolicy": "AtCheckpoint", "checkpoint": None}),
    ("elastic", {**elastic(), **ISLANDS}),
    ("elastic.maxReplicas", {"gpus": 16, "replicas": None, **elastic(replan=True, maxReplicas=2)}),
    ("elastic.replan", {**elastic(replan=True), **STALE}),
    ("elastic.minGpus", elastic(minGpus=2)),
    ("elastic.minGpus", {"gpus": 16, "replicas": None, **elastic(replan=True, minGpus=17)}),
]
BAD_COMMANDS: list[tuple[str, dict[str, Any]]] = [
    ("runtime.framework", {"runtime.framework": "TorchTitan"}),
    (
        "runtime.command",
        {"runtime.framework": "TorchFT", "training": {"steps": 1, "globalBatchSize": 4, "sequenceLength": 8}},
    ),
    ("runtime.framework", {"runtime.framework": "TorchFT", "parallelism": {"tensor": 1, "pipeline": 3}, "replicas": 4}),
    (
        "runtime.agent",
        {"runtime.agent": "Injected", **volumes({"name": "meshwright-agent", "mountPath": "/agent"})},
    ),
    ("runtime.command", {"data": {"source": "PythonStdlib"}}),
    ("runtime.command", {"training": {"steps": 1, "globalBatchSize": 4, "sequenceLength": 8}}),
    ("checkpoint", {"checkpoint": {"claimName": "c", "everySteps": 5}}),
    ("checkpoint.keep", {"checkpoint": {"uri": "s3://bucket/x", "keep": 5}}),
    ("checkpoint", {"checkpoint": {"claimName": "c", "every": "Auto"}}),
    ("checkpoint", {"checkpoint": {"claimName": "c", "keepFor": "7d"}}),
    ("checkpoint", {"checkpoint": {"claimName": "c", "staging": "Overlapped"}}),
    ("checkpoint", {"checkpoint": {"claimName": "c", "writer": "Process"}}),
    ("checkpoint.store", {"checkpoint": {"uri": "s3://bucket/x", "store": {"keep": 5}}}),
    ("checkpoint.store", {"checkpoint": {"uri": "s3://bucket/x", "store": {"every": "1h"}}}),
    ("parallelism", {"parallelism.microBatches": 2}),
    ("parallelism", {"parallelism.zeroStage": 3}),
    ("parallelism", {"parallelism.sequence": False}),
    ("parallelism", {"parallelism": {"tensor": 2, "tensorOverlap": True}}),
    ("parallelism", {"parallelism.contextMethod": "Ring"}),
    ("parallelism", {"parallelism": {"context": 2, "contextMethod": "RingUlysses", "ulysses": 2}}),
    ("parallelism.dataParallel", {"parallelism.dataParallel.strategy": "DDP"}),
    ("parallelism.dataParallel", {"parallelism.dataParallel.compression": "FP16"}),
    ("parallelism.dataParallel", {"parallelism.dataParallel.reduceEveryMicroBatch": True}),
    ("parallelism.expert", {"parallelism.expert": 2}),
    ("workers.gpusPerWorker", {"replicas": 3}),
    ("workers.gpusPerWorker", {"replicas": 2050, "workers.gpusPerWorker": 1}),
    ("elastic.maxReplicas", {"elastic": {"maxReplicas": 3}}),
    ("elastic.scaledBatch", {"elastic": {"scaledBatch": {"replicas": 1, "learningRate": "Constant"}}}),
    ("elastic.replan", {"elastic": {"replan": True}}),
]
FINE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (GOOD, {**MASTERS, "training.shardedMasters": {"gradients": "fp32"}, "parallelism.zeroStage": None}),
    (GOOD, {}),
    (GOOD, {"runtime": {"command": ["x"], "framework": "MegatronLM"}, "data": None, "parallelism.zeroStage": 1}),
    (GOOD, {"runtime": {"command": ["x"], "framework": "DeepSpeed"}, "data": None, "parallelism.microBatches": 4}),
    (GOOD, {"training.optimizer": {"decaySteps": 60, "warmupSteps": 40}}),
    (GOOD, {"training.optimizer": {"decay": "SquareRoot", "decaySteps": 100}}),
    (GOOD, {"training.optimizer": {"decay": "InverseSquareRoot", "warmupSteps": 1}}),
    (GOOD, {"training.optimizer": {"decay": "Constant"}}),
    (GOOD, {"parallelism": None}),
    (GOOD, {"model": {"preset": "llama-3-8b"}}),
    (GOOD, {"model": {"huggingFace": CONFIG}}),
    (GOOD, {"model": {"huggingFace": " \t\r\n " + CONFIG + "\n"}, "parallelism.expert": 2}),
    (GOOD, {"model.kvHeads": None}),
    (GOOD, {"model.tieEmbeddings": True}),
    (GOOD, STALE),
    (GOOD, {"parallelism.schedule": "Naive", "parallelism.microBatches": 1}),
    (GOOD, {"parallelism.schedule": "Interleaved1F1B", "parallelism.layerSplit": [1, 1, 1, 1]}),
    (GOOD, {"parallelism.schedule": "Automatic", "parallelism.activationLimit": 3}),
    (GOOD, {"training.sequenceLength": 129, "parallelism.sequence": False}),
    (GOOD, {"parallelism.tensorOverlap": True}),
    (GOOD, {"data": {"source": "Files", "claimName": "text", "pattern": "*.txt"}}),
    (GOOD, {"parallelism.pipeline": None, "workers.gpusPerWorker": 1}),
    (GOOD, {"workers.env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}),
    (GOOD, {"workers.tolerations": [{"operator": "Exists"}, {"key": "gpu", "value": "yes"}]}),
    (GOOD, {"workers.resources": {"devices": {"rdma/ib": 1, "vpc.amazonaws.com/efa": 32}}}),
    (GOOD, {"workers.resources": {"cpu": "8", "memory": "1Gi", "exclusiveCpus": True, "hugePages": {"2Mi": "5120Mi"}}}),
    (GOOD, {"workers.resources": {"exclusiveCpus": False, "devices": {}}}),
    (GOOD, {"workers.resourceClaims": [{"name": "a", "resourceClaimTemplateName": "b", "request": "c"}]}),
    (GOOD, {"topology.multiNodeNVLink": True, "workers.profile": "rdma"}),
    (GOOD, {"checkpoint": {"claimName": "c", "everySteps": 5, "keep": 1}}),
    (GOOD, {"parallelism.dataParallel": {"strategy": "HYBRID_SHARD", "shardSize": 2}, "parallelism.zeroStage": 3}),
    (GOOD, {**ONE_STAGE, "parallelism.zeroStage": 3, **shards(reshardSize=2)}),
    (GOOD, {"parallelism.tensor": None, "parallelism.pipeline": None, "parallelism.zeroStage": 3}),
    (GOOD, {"model.headSize": 16, "model.hiddenSize": 130}),
    (GOOD, {**mixture(), "parallelism.context": 2, "training.sequenceLength": 124}),
    (GOOD, {**mixture(), "parallelism.tensor": 1, "parallelism.zeroStage": 1}),
    (GOOD, {"training.parameterOffload": True, "parallelism.zeroStage": 3, "replicas": 1}),
    (GOOD, {"parallelism.tensor": 1, **SELECTIVE}),
    (GOOD, {"parallelism.tensor": None, "parallelism.pipeline": None, **SELECTIVE}),
    (GOOD, {"training.outer": {"method": "FedAvg"}, "data": {"source": "Files", "claimName": "c"}}),
    (GOOD, {"parallelism.context": 64, "parallelism.contextMethod": "Ring"}),
    (GOOD, {"parallelism.dataParallel.strategy": "ZeRO", "parallelism.zeroStage": 2}),
    (GOOD, {"parallelism.zeroStage": 2, **shards(reduceEveryMicroBatch=True)}),
    (GOOD, GATHERED),
    (GOOD, {**GATHERED, "training.fp8": {"update": "Static", "allGather": True}, "parallelism.zeroStage": None}),
    (GOOD, {"training.fp8": {"allGather": False, "scaling": "Rowwise"}, "parallelism.zeroStage": 0}),
    (GOOD, shards(reduceEveryMicroBatch=True)),
    (GOOD, shards(reduceEveryMicroBatch=False, strategy="DDP")),
    (GOOD, {"parallelism.schedule": "ZBH1", "parallelism.zeroStage": 3, **shards(reduceEveryMicroBatch=True)}),
    (GOOD, {"parallelism.dataParallel": {"strategy": "NO_SHARD", "compression": "PowerSGD"}}),
    (GOOD, {"training.outer": {"method": "DiLoCo", "islands": 2}, "checkpoint": {"claimName": "c"}}),
    (GOOD, {"training.outer": {"method": "DiLoCo", "everySteps": 30}, "checkpoint": {"claimName": "c", "every": "1h"}}),
    (GOOD, {"checkpoint": {"claimName": "c", "every": "30m", "uri": "s3://b/x", "store": {"everySteps": 70}}}),
    (COMMAND, {}),
    (COMMAND, {"checkpoint": {"uri": "s3://bucket/runs", "store": {"secretName": "s", "encryption": "KMS"}}}),
    (GOOD, {"checkpoint": {"uri": "abfs://box@account.dfs.core.windows.net/runs", "store": {"secretName": "s"}}}),
    (GOOD, {"checkpoint": {"claimName": "c", "staging": "Overlapped", "writer": "Process"}}),
    (GOOD, {"checkpoint": {"claimName": "c", "uri": "gs://bucket/runs", "store": {"everySteps": 300, "keep": 9}}}),
    (COMMAND, {"runtime.agent": "Injected", **volumes({})}),
    (COMMAND, {"runtime.agent": "Image", **volumes({"name": "meshwright-agent", "mountPath": "/agent"})}),
    (COMMAND, {"checkpoint": {"claimName": "c", "keep": 5, "verify": ["python", "verify.py"]}}),
    (COMMAND, {"runtime.scripts": "scripts", "checkpoint": {"claimName": "c"}}),
    (COMMAND, {"runtime.progress": {"patterns": ["at (?P<step>[0-9]+)"], "totalSteps": 10}}),
    (COMMAND, {"parallelism": {"tensor": 2}}),
    (COMMAND, {"runtime.framework": "TorchFT"}),
    (COMMAND, {"runtime.framework": "TorchFT", "parallelism": {"tensor": 2, "context": 2}}),
    (COMMAND, {"successPolicy": "FirstWorker"}),
    (GOOD, {"workers.env": [{"name": "A", "valueFrom": SECRET_KEY}, {"name": "B", "valueFrom": CONFIG_KEY}]}),
    (GOOD, volumes({}, {"name": "more", "mountPath": "/developer"}, {"name": "b", "mountPath": "/extra/..b"})),
    (GOOD, volumes({"claimName": None, "scratch": "10Gi"}, {"claimName": None, "secretName": "s", "mountPath": "/s"})),
    (GOOD, {"parallelism.context": 4}),
    (GOOD, MIXED),
    (GOOD, {"parallelism.context": 2, "parallelism.contextMethod": "Ulysses"}),
    (GOOD, {"parallelism.context": 32, "parallelism.contextMethod": "AllGather", "parallelism.sequence": False}),
    (GOOD, {"data.packing": "Documents", "data.balance": True}),
    (GOOD, {"data.packing": "Documents", "training.varlenAttention": True}),
    (GOOD, {"training.varlenAttention": False}),
    (COMMAND, {"parallelism": {"context": 2}}),
    (GOOD, {**mixture(), "parallelism.expert": 2}),
    (GOOD, {**mixture(intermediateSize=33), "parallelism.expertTensor": False}),
    (GOOD, {**mixture(), "parallelism.expertDispatch": "OncePerNode"}),
    (GOOD, {**mixture(capacityFactor=1.5), "parallelism.expertDispatch": "Padded"}),
    (GOOD, {**mixture(), "parallelism.expertDispatch": "PerExpert", "training.fp8": {}}),
    (GOOD, mixture(groups=4, groupsPerToken=2, router="Sigmoid", balancing="Bias", auxiliaryWeight=0.0001)),
    (GOOD, mixture(perToken=1, renormalize=False, capacityFactor=1.25, every=2)),
    (GOOD, {"model": {"preset": "tiny-mixture"}, "parallelism.expert": 2}),
    (
        GOOD,
        {"training.parameterOffload": True, "training.parameterOffloadPath": "/scratch", "parallelism.zeroStage": 3},
    ),
    (GOOD, {"training.tracking": {"tensorBoard": True}, "checkpoint": {"claimName": "c"}}),
    (GOOD, {"training.anomalies": {"nonFinite": "GoBack", "spike": "Skip"}, "checkpoint": {"claimName": "c"}}),
    (GOOD, {"training.anomalies": {"spike": "Skip"}}),
    (GOOD, {"training.anomalies": {"repeatEverySteps": 100}}),
    (GOOD, {"recovery.copyEverySteps": 10, "recovery.inMemory": True}),
    (GOOD, continuing()),
    (GOOD, {**continuing(), "parallelism.zeroStage": 0}),
    (GOOD, {"recovery.onReplicaLoss": "Wait"}),
    (GOOD, {"parallelism.stageBalance": "Measured", "checkpoint": {"claimName": "c"}}),
    (GOOD, {"recovery.suspectNodes": {"failures": 3}}),
    (GOOD, {**LATENT, "training.lora": {}}),
    (GOOD, {**mixture(), "training.lora": {"targets": ["Value", "Gate"]}}),
    (GOOD, {"model.gated": False, "training.lora": {"targets": ["Gate", "Up"]}}),
    (GOOD, {"training.lora": {"targets": ["Gate"]}}),
    (GOOD, {"recovery": {"maxRestarts": 100, "restartWindowSeconds": 600}}),
    (GOOD, shards(strategy="FULL_SHARD")),
    (GOOD, shards(strategy="ZeRO")),
    (GOOD, shards(shardSize=2)),
    (GOOD, {**ONE_STAGE, **shards(reshardSize=2)}),
    (GOOD, {"training.parameterOffload": True}),
    (GOOD, shards(compression="Int8")),
    (GOOD, BUDGET),
    (GOOD, {**BUDGET, "replicas": 1, "parallelism": None}),
    (GOOD, {**BUDGET, "gpus": 7}),
    (GOOD, {**BUDGET, **shards(shardSize=2)}),
    (GOOD, {**BUDGET, **ONE_STAGE, "gpus": 4, **shards(reshardSize=4)}),
    (GOOD, {**BUDGET, "training.parameterOffload": True, "parallelism.context": 1}),
    (GOOD, {**BUDGET, **mixture(), "parallelism.expert": 2}),
    (COMMAND, {**BUDGET, "gpus": 5}),
    (GOOD, {"recovery": {"exitCodes": [{"values": [2, 137], "action": "FailJob"}]}}),
    (GOOD, elastic()),
    (GOOD, elastic(minReplicas=2, maxReplicas=2)),
    (GOOD, elastic(maxReplicas=16, fill=True)),
    (GOOD, elastic(replan=True, minGpus=2)),
    (GOOD, {"gpus": 16, "replicas": None, **elastic(replan=True, minGpus=16)}),
    (COMMAND, {"elastic": {"maxReplicas": 16, "fill": True, "pauseSeconds": 10}}),
]
CASES = [
    *((GOOD, changes, field) for field, changes in BAD),
    *((COMMAND, changes, field) for field, changes in BAD_COMMANDS),
]


def broken_in_cel(spec: ParallelTrainingJobSpec) -> list[Rule[ParallelTrainingJobSpec]]:
    """The rules that CEL refuses, over the spec with the defaults that the API server fills in."""
    defaulted = converted({"self": spec.wire()})
    return [rule for rule in SPEC_RULES if compile_expression(rule.cel).evaluate(defaulted) is not True]


def broken_in_schema(node: dict[str, Any], value: dict[str, Any], path: str = "") -> list[tuple[str, str]]:
    """Field and message of the rules in a schema that CEL refuses, each evaluated on its own object if that exists."""
    variables = converted({"self": value})
    found = [
        ((path + rule.get("fieldPath", "")).lstrip("."), rule["message"])
        for rule in node.get(VALIDATIONS, ())
        if compile_expression(rule["rule"]).evaluate(variables) is not True
    ]
    for name, child in node.get("properties", {}).items():
        if isinstance(value.get(name), dict):
            found += broken_in_schema(child, value[name], f"{path}.{name}")
    return found


@cache
def spec_schema() -> dict[str, Any]:
    """The schema of a spec in the CRD."""
    (version,) = custom_resource_definition()["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


@pytest.mark.parametrize(("base", "changes", "field"), CASES)
def test_a_bad_spec_is_refused_by_both_languages_for_the_same_rules(
    base: dict[str, Any], changes: dict[str, Any], field: str
) -> None:
    spec = ParallelTrainingJobSpec.model_validate(changed(base, changes))
    problems = check_spec(spec)
    assert field in [problem.field for problem in problems]
    assert [(p.field, p.message) for p in problems] == [(r.field, r.message) for r in broken_in_cel(spec)]
    assert sorted(broken_in_schema(spec_schema(), spec.wire())) == sorted((p.field, p.message) for p in problems)


@pytest.mark.parametrize(("base", "changes"), FINE)
def test_a_good_spec_passes_in_both_languages(base: dict[str, Any], changes: dict[str, Any]) -> None:
    spec = ParallelTrainingJobSpec.model_validate(changed(base, changes))
    assert check_spec(spec) == []
    assert broken_in_cel(spec) == []
    assert broken_in_schema(spec_schema(), spec.wire()) == []


def test_the_table_is_long_and_breaks_every_rule() -> None:
    assert len(CASES) >= 40
    specs = [ParallelTrainingJobSpec.model_validate(changed(base, changes)) for base, changes, _ in CASES]
    never = [rule.message for rule in SPEC_RULES if all(rule.holds(spec) for spec in specs)]
    assert never == []


def test_an_explicit_null_is_the_same_as_a_field_left_out() -> None:
    spec = ParallelTrainingJobSpec.model_validate(changed(GOOD, {"model": {"preset": "tiny", "layers": None}}))
    assert "layers" in spec.model_dump()["model"]
    assert check_spec(spec) == []


def test_a_rule_on_one_object_stands_there_and_costs_nothing_without_it() -> None:
    """The API server evaluates each rule that it finds at every write of a job, also of its status."""
    schema = spec_schema()["properties"]
    assert len(rules_of(spec_schema())) == len(SPEC_RULES)
    assert len(spec_schema()[VALIDATIONS]) < 0.55 * len(SPEC_RULES)
    held = {rule.get("fieldPath"): rule["rule"] for rule in schema["model"][VALIDATIONS]}
    assert held[".headSize"] == "!has(self.headSize) || self.headSize % 2 == 0"
    assert all("self.mixture" not in rule["rule"] for rule in schema["model"]["properties"]["mixture"][VALIDATIONS])


@pytest.mark.parametrize(
    ("condition", "place"),
    [
        ("!has(self.a) || self.a.x > 1", (".a", "self.x > 1")),
        ("!has(self.a) || !has(self.a.b) || self.a.b.y == 2", (".a.b", "self.y == 2")),
        ("!has(self.a) || (self.a.x > 1 ? self.a.x < 9 : true)", (".a", "(self.x > 1 ? self.x < 9 : true)")),
        ("!has(self.a) || self.a.x > 1 ? true : false", ("", None)),
        ("has(self.a) || self.a.x > 1", ("", None)),
        ("self.a.x > 1", ("", None)),
        ("self.d.x > 1", (".d", "self.x > 1")),
        ("!has(self.a) || self.a.x > self.d.x", ("", None)),
        ("!has(self.a) || self.a.list.all(i, i > 1)", (".a", "self.list.all(i, i > 1)")),
    ],
)
def test_where_a_rule_stands(condition: str, place: tuple[str, str | None]) -> None:
    number, texts = {"type": "integer"}, {"type": "array"}
    b = {"type": "object", "properties": {"y": number}}
    a = {"type": "object", "properties": {"x": number, "list": texts, "b": b}}
    schema: dict[str, Any] = {"properties": {"a": a, "d": {"default": {}, "properties": {"x": number}}}}
    path, left = place
    deepest = ".a.b.y" if path == ".a.b" else ".d.x" if ".d" in path else ".a.x"
    add_rule(schema, condition, {"fieldPath": deepest, "message": "m"})
    assert rules_of(schema) == [{"rule": left or condition, "fieldPath": deepest, "message": "m"}]
    node: dict[str, Any] = schema
    for name in path.split(".")[1:]:
        node = node["properties"][name]
    assert len(node[VALIDATIONS]) == 1


def test_no_two_rules_say_the_same() -> None:
    assert len({rule.cel for rule in SPEC_RULES}) == len(SPEC_RULES)
    assert len({(rule.field, rule.message) for rule in SPEC_RULES}) == len(SPEC_RULES)
