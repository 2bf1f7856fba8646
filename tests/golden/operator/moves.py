"""Changes of a spec, as dotted paths with values; None removes a field. Specs are drawn from these."""

from __future__ import annotations

import copy
from typing import Any

from meshwright.api.objects import KubeObject

Move = dict[str, Any]

BASE: KubeObject = {
    "replicas": 2,
    "model": {
        "layers": 8,
        "hiddenSize": 128,
        "intermediateSize": 384,
        "heads": 8,
        "kvHeads": 4,
        "vocabSize": 512,
    },
    "data": {"source": "PythonStdlib"},
    "training": {"steps": 1000, "globalBatchSize": 48, "sequenceLength": 128},
    "workers": {"image": "registry.example.com/worker:1", "gpusPerWorker": 2},
}
COMMAND: KubeObject = {
    "replicas": 4,
    "runtime": {"command": ["python", "train.py", "--steps", "100"]},
    "workers": {"image": "registry.example.com/worker:1", "gpusPerWorker": 2},
}
SMALL_CONFIGURATION = """
{
  "model_type": "qwen3",
  "vocab_size": 512,
  "hidden_size": 128,
  "intermediate_size": 384,
  "num_hidden_layers": 4,
  "num_attention_heads": 8,
  "num_key_value_heads": 4,
  "head_dim": 32,
  "hidden_act": "silu",
  "max_position_embeddings": 4096,
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0,
  "tie_word_embeddings": true
}
"""
PRESETS = (
    *("tiny", "tiny-gpt", "tiny-qwen", "tiny-latent", "tiny-mixture", "tiny-deepseek", "gpt2", "llama-3.2-1b"),
    *("qwen2.5-0.5b", "tinyllama-1.1b", "gpt3-125m", "gpt3-1.3b", "mixtral-8x7b", "deepseek-v2-lite", "llama-3-8b"),
)
MIXTURE = {"experts": 8, "perToken": 2, "intermediateSize": 64}


def one(path: str, *values: Any) -> list[Move]:
    """The field at each of these values."""
    return [{path: value} for value in values]


def part(path: str, *fields: KubeObject) -> list[Move]:
    """Several fields below a path at a time."""
    return [{f"{path}.{name}": value for name, value in some.items()} for some in fields]


MODEL: list[Move] = [
    *one("model", *({"preset": name} for name in PRESETS), {"huggingFace": SMALL_CONFIGURATION}),
    *one("model.layers", 4, 6, 16),
    *one("model.heads", 4, 16),
    *one("model.kvHeads", None, 2, 8),
    *one("model.intermediateSize", 256, 512),
    *one("model.hiddenSize", 256),
    *one("model.vocabSize", 1024, 50304),
    *one("model.ropeTheta", 500000),
    *one("model.tieEmbeddings", True, False),
    *one("model.headSize", 16, 32),
    *one("model.valueSize", 24),
    *one("model.gated", False, True),
    *one("model.activation", "GELU", "GELUTanh", "ReLU", "SiLU"),
    *one("model.norm", "LayerNorm", "RMSNorm"),
    {"model.norm": "LayerNorm", "model.biases": True},
    *one("model.normEpsilon", 1e-6),
    *one("model.attentionBiases", True),
    *one("model.queryKeyNorms", True),
    *one("model.positions", 512, 4096),
    {"model.kvHeads": None, "model.latent": {"kvRank": 32, "ropeSize": 16}},
    {"model.kvHeads": None, "model.latent": {"kvRank": 64, "ropeSize": 8, "queryRank": 48}},
    *one("model.ropeScaling", {"factor": 8.0}, {"kind": "Llama3", "factor": 2.0}),
    *one("model.ropeScaling", {"kind": "YaRN", "factor": 40.0, "scoreFactor": 1.2}),
    *one(
        "model.ropeScaling",
        {"factor": 4.0, "lowFrequencyFactor": 2.0, "highFrequencyFactor": 16.0, "originalLength": 4096},
    ),
    *one("model.mixture", MIXTURE, {**MIXTURE, "sharedIntermediateSize": 128, "denseLayers": 1}, None),
    *one("model.mixture", {**MIXTURE, "every": 2, "router": "Sigmoid", "balancing": "Bias", "biasRate": 0.01}),
    *one("model.mixture", {**MIXTURE, "balancing": "None", "renormalize": False, "scaling": 2.5}),
    *one("model.mixture", {**MIXTURE, "groups": 4, "groupsPerToken": 2, "router": "Softmax", "zLossWeight": 0.001}),
    *one("model.mixture", {**MIXTURE, "perToken": 1, "renormalize": False, "capacityFactor": 1.25}),
    *one("model.mixture", {**MIXTURE, "balancing": "Auxiliary", "auxiliaryWeight": 0.02}),
]
FILES = {"source": "Files", "claimName": "corpus"}
DATA: list[Move] = [
    *one("data", {"source": "PythonStdlib"}, FILES, {"claimName": "corpus", "pattern": "**/*.txt"}),
    *one("data", {"uri": "s3://bucket/text", "format": "Text", "tokenizer": "Byte", "onCorruptRecord": "Fail"}),
    *one("data", {**FILES, "format": "JSONLines", "field": "body", "onCorruptRecord": "Skip"}),
    *one("data", {**FILES, "format": "Parquet", "field": "content", "tokenizer": "BPE", "tokenizerFile": "t.json"}),
    *one("data", {**FILES, "format": "Tokens", "tokenizer": "SentencePiece", "tokenizerFile": "t.model"}),
    *one("data", {**FILES, "format": "PromptCompletion"}),
    *one("data", {**FILES, "mixture": [{"path": "web", "weight": 3.0}, {"path": "books"}]}),
    *one("data.heldOut", 0.01, 0.5),
    *one("data.packing", "Documents", "Text"),
    {"data.packing": "Documents", "data.balance": True},
    {"data.heldOut": 0.02, "training.evaluation": {}},
    {"data.heldOut": 0.1, "training.evaluation": {"everySteps": 50, "samples": 16}},
]
TRAINING: list[Move] = [
    *one("training.steps", 1, 50000),
    *one("training.globalBatchSize", 24, 64, 96),
    *one("training.sequenceLength", 64, 256, 1024),
    *one("training.seed", 7),
    *one("training.precision", "bf16", "fp16", "fp64", "fp32"),
    {"training.precision": "bf16", "training.masterWeights": False},
    {"training.precision": "fp16", "training.lossScale": {"initial": 1024, "growthInterval": 100}},
    *one("training.fp8", {}, {"scaling": "Rowwise", "update": "Dynamic"}, {"update": "Delayed", "history": 8}),
    *one("training.fp8", {"update": "Static", "inputAmax": 8.0, "weightAmax": 2.0, "gradientAmax": 0.5}),
    *one("training.fp8", {"scaling": "Tensorwise"}, None),
    *part("training.optimizer", {"name": "Muon", "momentum": 0.9}, {"name": "AdamW", "beta1": 0.8, "beta2": 0.99}),
    *part("training.optimizer", {"offload": "CPU"}, {"offload": "File", "offloadPath": "/scratch/a"}),
    *part("training.optimizer", {"offload": "None"}, {"gradientClip": 0.0}, {"gradientClip": 0.5}),
    *part("training.optimizer", {"learningRate": 1e-3, "minLearningRate": 1e-5, "warmupSteps": 1}),
    *part("training.optimizer", {"weightDecay": 0.0}, {"warmupSteps": 0}),
    *part("training.optimizer", {"decay": "Linear", "decaySteps": 20}, {"decay": "SquareRoot"}, {"decay": "Constant"}),
    *part("training.optimizer", {"decay": "InverseSquareRoot", "warmupSteps": 10}, {"decaySteps": 30}),
    *one("training.dropout", 0.1),
    *one("training.attentionDropout", 0.1),
    *one("training.lossChunkTokens", 64),
    *one("training.activationCheckpointing", "None", "Full", "Selective", "Sqrt", "EveryK", None),
    *part("training", {"activationCheckpointing": "EveryK", "checkpointEvery": 4}),
    *one("training.activationOffload", True),
    *part("training", {"parameterOffload": True}, {"parameterOffload": True, "parameterOffloadPath": "/scratch/p"}),
    *one("training.compile", True),
    *one("training.deterministic", False),
    *one("training.outer", {"method": "LocalSGD"}, {"method": "FedAvg", "everySteps": 20}, None),
    *one("training.outer", {"method": "DiLoCo", "islands": 2, "learningRate": 0.5, "momentum": 0.8}),
    *one("training.outer", {"method": "AsyncSGD", "staleness": 0}),
    *one("training.initialWeights", "/weights"),
    *part("training.tracking", {}, {"tensorBoard": True, "wandb": {"project": "lm", "offline": True}}),
    *part("training.anomalies", {}, {"nonFinite": "GoBack", "spike": "Skip", "window": 64}),
    *one("training.lora", {}, {"rank": 4, "alpha": 8.0, "targets": ["Query", "Key", "Value", "Output"]}, None),
    *one("training.lora", {"targets": ["Gate", "Up", "Down"]}, {"initialAdapter": "/adapters/a"}),
]
PARALLELISM: list[Move] = [
    *one("replicas", 1, 2, 3, 4),
    *one("parallelism.tensor", None, 1, 2, 4),
    *one("parallelism.pipeline", None, 1, 2, 4),
    *one("parallelism.expert", 1, 2, 4),
    *one("parallelism.sequence", False, True),
    *one("parallelism.expertTensor", False),
    {"parallelism.tensor": 2, "parallelism.tensorOverlap": True},
    *one("parallelism.context", None, 1, 2, 4),
    *one("parallelism.contextMethod", "Ring", "RingZigZag", "Ulysses", "AllGather"),
    *part("parallelism", {"context": 4, "contextMethod": "RingUlysses", "ulysses": 2}),
    *part("parallelism", {"pipeline": 2, "schedule": "Naive"}, {"pipeline": 2, "schedule": "GPipe"}),
    *part("parallelism", {"pipeline": 2, "schedule": "1F1B"}, {"pipeline": 2, "schedule": "ZBH1"}),
    *part("parallelism", {"pipeline": 4, "schedule": "ZBH2"}, {"pipeline": 2, "schedule": "ZBV"}),
    *part("parallelism", {"pipeline": 2, "schedule": "Automatic", "activationLimit": 4}),
    *part("parallelism", {"pipeline": 2, "schedule": "Interleaved1F1B", "virtualStages": 2, "microBatches": 4}),
    *part("parallelism", {"pipeline": 2, "schedule": "LoopedBFS", "virtualStages": 4}),
    *part("parallelism", {"pipeline": 2, "schedule": "DualPipe", "microBatches": 4}),
    *part("parallelism", {"pipeline": 2, "schedule": "DualPipeV", "microBatches": 4}),
    {
        **part("parallelism", {"pipeline": 2, "schedule": "PipeDream", "microBatches": 1})[0],
        "training.optimizer.gradientClip": 0.0,
    },
    {
        **part("parallelism", {"pipeline": 2, "schedule": "PipeDream2BW", "microBatches": 4})[0],
        "training.optimizer.gradientClip": 0.0,
    },
    {"model.layers": 8, "parallelism.pipeline": 2, "parallelism.layerSplit": [5, 3]},
    *one("parallelism.stageBalance", "Flops", "Layers"),
    *one("parallelism.rematerialize", True),
    *one("parallelism.microBatches", None, 1, 2, 4, 8),
    *one("parallelism.zeroStage", 0, 1, 2, 3),
    *part("parallelism", {"zeroStage": 0, "dataParallel.strategy": "DDP", "dataParallel.bucketElements": 4096}),
    *part("parallelism", {"zeroStage": 1, "dataParallel.strategy": "ZeRO", "dataParallel.overlap": False}),
    *part("parallelism", {"zeroStage": 2, "dataParallel.strategy": "FSDP"}),
    *part("parallelism", {"zeroStage": 0, "dataParallel.strategy": "NO_SHARD"}),
    *part("parallelism", {"zeroStage": 2, "dataParallel.strategy": "SHARD_GRAD_OP"}),
    *part("parallelism", {"zeroStage": 3, "dataParallel.strategy": "FULL_SHARD"}),
    *part("parallelism", {"zeroStage": 2, "dataParallel": {"strategy": "HYBRID_SHARD_ZERO2", "shardSize": 2}}),
    *part("parallelism", {"zeroStage": 3, "dataParallel": {"strategy": "HYBRID_SHARD", "shardSize": 2}}),
    *part("parallelism", {"zeroStage": 3, "tensor": 1, "pipeline": 1, "dataParallel": {"reshardSize": 2}}),
    *part("parallelism", *({"zeroStage": 0, "dataParallel": {"compression": c}} for c in ("FP16", "BF16", "Int8"))),
    *part("parallelism", {"zeroStage": 0, "dataParallel": {"compression": "TopK", "compressionDensity": 0.1}}),
    *part("parallelism", {"zeroStage": 0, "dataParallel": {"compression": "PowerSGD", "compressionRank": 2}}),
    *one("parallelism.dataParallel.compression", "None"),
]
ENV = [
    {"name": "NCCL_DEBUG", "value": "WARN"},
    {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
    {"name": "HUB", "valueFrom": {"configMapKeyRef": {"name": "hub", "key": "url"}}},
]
VOLUMES = [
    {"name": "weights", "mountPath": "/weights", "claimName": "weights", "readOnly": True},
    {"name": "settings", "mountPath": "/etc/settings", "configMapName": "settings"},
    {"name": "keys", "mountPath": "/etc/keys", "secretName": "keys"},
    {"name": "scratch", "mountPath": "/scratch", "scratch": "100Gi"},
]
TOLERATIONS = [
    {"key": "example.com/dedicated", "value": "training", "effect": "NoSchedule"},
    {"operator": "Exists", "key": "gpu", "effect": "NoExecute", "tolerationSeconds": 60},
    {"key": "spot", "operator": "Equal", "value": "yes", "effect": "PreferNoSchedule"},
]
PODS: list[Move] = [
    *one("workers.image", "worker:latest"),
    *one("workers.imagePullPolicy", "Always", "IfNotPresent", "Never"),
    *one("workers.imagePullSecrets", [{"name": "registry"}]),
    *one("workers.gpusPerWorker", None, 1, 2, 4, 8),
    *one("workers.gpuResource", "example.com/accelerator"),
    *one("workers.resources", {"cpu": "16", "memory": "64Gi"}, {"cpu": "500m"}, {"memory": "1.5Gi"}),
    *one("workers.env", ENV[:1], ENV),
    *one("workers.volumes", VOLUMES[:1], VOLUMES[1:], VOLUMES),
    *one("workers.labels", {"queue": "research"}),
    *one("workers.annotations", {"scheduling.k8s.io/group-name": "gang"}),
    *one("workers.schedulerName", "volcano", "default-scheduler", None),
    *one("workers.nodeSelector", {"pool": "training"}),
    *one("workers.tolerations", TOLERATIONS[:1], TOLERATIONS),
    *one("workers.serviceAccountName", "trainer"),
    *one("workers.terminationGracePeriodSeconds", 300),
    *one("priorityClassName", "high"),
]
LIFE: list[Move] = [
    *one("checkpoint", {"claimName": "checkpoints"}, {"claimName": "c", "everySteps": 200, "keep": 5}, None),
    *one("checkpoint", {"claimName": "c", "resumeFrom": "base-0a1b2c3d"}),
    *one("recovery", {"maxRestarts": 0}, {"maxRestarts": 5, "restartWindowSeconds": 3600}),
    *one("recovery", {"hangTimeoutSeconds": 900, "cordonedNodes": "Stay"}, {"cordonedNodes": "Move", "spareNodes": 1}),
    *one("recovery", {"exitCodes": [{"values": [64], "action": "FailJob"}, {"values": [75, 137], "action": "Ignore"}]}),
    *one("recovery", {"exitCodes": [{"values": [1], "action": "Count"}]}),
    *one("successPolicy", "AllWorkers", "FirstWorker"),
    *one("priority", 5, -3),
    *one("suspend", True, False, False, False),
    *one("activeDeadlineSeconds", 86400),
    *one("ttlSecondsAfterFinished", 3600),
    *one("managedBy", "meshwright.dev/operator", "example.com/other"),
    *one("runtime.scripts", "scripts"),
    *one("runtime.command", ["torchrun-script"]),
]
NATIVE = (MODEL, DATA, TRAINING, PARALLELISM, PARALLELISM, PODS, LIFE)
OF_COMMANDS = (PARALLELISM, PODS, LIFE)

MALFORMED: list[Move] = [
    *one("replicas", 0, "two", 70000, 1.5),
    *one("model", [], "llama", {"preset": ""}, {"layers": "8"}),
    *one("model.layers", 0, 5000),
    *one("model.activation", "Swish"),
    *one("model.depth", 3),
    *one("data.source", "Internet"),
    *one("data.mixture", [{"weight": 1.0}]),
    *one("data.uri", "no-scheme"),
    *one("training.steps", None, 0),
    *one("training.precision", "int8"),
    *one("training.optimizer", {"beta1": 1.0, "beta2": 2.0}, {"decay": "Exponential", "decaySteps": 0}),
    *one("training.outer", {}),
    *one("training.lora", {"targets": []}, {"initialAdapter": "adapters"}),
    *one("parallelism.zeroStage", 4),
    *one("parallelism.schedule", "1f1b"),
    *one("parallelism.virtualStages", 1),
    *one("workers", None, {}),
    *one("workers.image", "", 7),
    *one("workers.env", [{"name": "1A"}], [{"value": "x"}]),
    *one("workers.volumes", [{"name": "A", "mountPath": "relative"}]),
    *one("workers.tolerations", [{"operator": "In"}]),
    *one("workers.resources", {"cpu": "many"}),
    *one("recovery", {"maxRestarts": -1, "exitCodes": [{"values": [0], "action": "Retry"}]}),
    *one("checkpoint", {}, {"claimName": "c", "resumeFrom": "/base"}),
    *one("managedBy", "nobody"),
    *one("suspend", "maybe"),
]


def applied(spec: KubeObject, move: Move) -> KubeObject:
    """The spec with a move's fields set, or removed where the value is None."""
    found = copy.deepcopy(spec)
    for path, value in move.items():
        *parents, last = path.split(".")
        at = found
        for name in parents:
            below = at.setdefault(name, {})
            if not isinstance(below, dict):
                break
            at = below
        if value is None:
            at.pop(last, None)
        else:
            at[last] = copy.deepcopy(value)
    return found
