"""The jobs that plans are recorded for: every preset, every GPU, every field that a plan depends on, refusals too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.models.presets import PRESETS
from meshwright.planner.cost.accelerators import ACCELERATORS
from tests.golden.planner.clusters import Draws, nodes

OBJECTIVES = ("time", "cost", "gpus", "robust")


@dataclass(frozen=True)
class Case:
    """One call of `meshwright plan`."""

    job: dict[str, Any]
    cluster: Any
    """Name of a cluster, or the content of an inventory file."""
    flags: tuple[str, ...] = ()


def job(preset: str, /, **changes: Any) -> dict[str, Any]:
    """A ParallelTrainingJob; `changes` are merged into its spec, and None takes a field away."""
    spec = {
        "replicas": 2,
        "model": {"preset": preset},
        "data": {"claimName": "text"},
        "training": {"steps": 100, "globalBatchSize": 64, "sequenceLength": 4096, "precision": "bf16"},
        "parallelism": {},
        "workers": {"image": "worker:1", "gpusPerWorker": 8},
    }
    return {
        "apiVersion": "meshwright.dev/v1alpha1",
        "kind": "ParallelTrainingJob",
        "metadata": {"name": "job"},
        "spec": merged(spec, changes),
    }


def merged(old: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON merge patch."""
    new = dict(old)
    for key, value in changes.items():
        if value is None:
            new.pop(key, None)
        elif isinstance(value, Mapping):
            before = new.get(key)
            new[key] = merged(before if isinstance(before, Mapping) else {}, value)
        else:
            new[key] = value
    return new


OFTEN = ("parallelism", "training", "refused", "command", "other")
"""Groups of cases that take little time."""


def often(name: str) -> bool:
    """Whether a case runs always: a third of those of cheap groups and some of the others. The rest are long tests."""
    return Draws(name).below(3 if name.startswith(OFTEN) else 24) == 0


def cases() -> dict[str, Case]:
    """Every case by name."""
    found = {
        **dict(_presets()),
        **dict(_accelerators()),
        **dict(_fields()),
        **dict(_inventories()),
        **dict(_objectives()),
        **dict(_refusals()),
    }
    return {name: found[name] for name in sorted(found)}


_SMALL = ("1 h100 node", "4 h100 nodes", "l40s", "t4", "v100", "16 a100 nodes", "h100 singles")
_MEDIUM = ("4 h100 nodes", "16 a100 nodes", "h100 racks", "mixed", "nvl72", "h200", "a100 holes", "h100 quarters")
_LARGE = ("32 h100 nodes", "128 h100 nodes", "nvl72 holes", "b300", "h100 spines", "h100 whole nodes taken")


def _presets() -> Iterator[tuple[str, Case]]:
    """Every preset twice, on clusters that fit its size more or less."""
    for preset, architecture in PRESETS.items():
        size = architecture.parameters
        clusters = _SMALL if size < 3e9 else _MEDIUM if size < 50e9 else _LARGE
        for again in range(2):
            draws = Draws(f"{preset} {again}")
            cluster = draws.choice(clusters)
            longest = architecture.positions or 8192
            replicas = draws.choice((1, 2, 4, 8))
            gpus = draws.choice((1, 2, 4) if "nvl72" in cluster or cluster == "t4" else (1, 2, 4, 8))
            length = min(longest, draws.choice((1024, 2048, 4096, 8192)))
            batch = draws.choice((8, 32, 128, 512))
            parallelism = {"zeroStage": draws.choice((0, 1, 2, 3))}
            wanted = job(
                preset,
                replicas=replicas,
                training={"sequenceLength": length, "globalBatchSize": batch},
                parallelism=parallelism,
                workers={"gpusPerWorker": gpus},
            )
            flags = ("--objective", OBJECTIVES[draws.below(4)]) if again else ()
            yield f"preset {preset} {again}: {cluster}", Case(wanted, cluster, flags)


def _accelerators() -> Iterator[tuple[str, Case]]:
    """Every GPU of the catalog, with a dense model and a mixture."""
    for name, gpu in ACCELERATORS.items():
        for model in ("llama-3-8b", "deepseek-v2-lite"):
            count = Draws(f"{name} {model}").choice((2, 4, 8))
            yield (
                f"gpu {name} x {count * gpu.node}: {model}",
                Case(
                    job(model, parallelism={"zeroStage": 3}, workers={"gpusPerWorker": min(4, gpu.node)}),
                    [nodes("n", count, gpu.node, name)],
                ),
            )


_PARALLELISM: Mapping[str, dict[str, Any]] = {
    "TP 1": {"tensor": 1},
    "TP 8": {"tensor": 8},
    "TP 2 PP 2": {"tensor": 2, "pipeline": 2},
    "PP 4": {"pipeline": 4},
    "PP 4 micro-batches 8": {"pipeline": 4, "microBatches": 8},
    "micro-batches 4": {"microBatches": 4},
    "all pinned": {"tensor": 4, "pipeline": 2, "context": 1, "expert": 1, "microBatches": 16, "schedule": "1F1B"},
    "CP 2": {"context": 2},
    "CP 4 TP 2": {"context": 4, "tensor": 2},
    "CP 2 Ring": {"context": 2, "contextMethod": "Ring"},
    "CP 2 Ulysses": {"context": 2, "contextMethod": "Ulysses"},
    "CP 2 AllGather": {"context": 2, "contextMethod": "AllGather"},
    "CP 4 RingUlysses": {"context": 4, "contextMethod": "RingUlysses", "ulysses": 2},
    "no sequence parallelism": {"sequence": False, "tensor": 4},
    "tensor overlap": {"tensorOverlap": True, "tensor": 4},
    "stage balance": {"stageBalance": "Flops", "pipeline": 4},
    "layer split": {"pipeline": 4, "layerSplit": [9, 8, 8, 7]},
    "rematerialize": {"rematerialize": True, "pipeline": 4},
    "zero 1": {"zeroStage": 1},
    "zero 2": {"zeroStage": 2},
    "zero 3": {"zeroStage": 3},
    "zero 3 PP 2": {"zeroStage": 3, "pipeline": 2},
    "zero 2 flat": {"zeroStage": 2, "dataParallel": {"strategy": "ZeRO"}},
    "hybrid shards": {"zeroStage": 3, "dataParallel": {"strategy": "HYBRID_SHARD", "shardSize": 2}},
    "compressed Int8": {"tensor": 4, "dataParallel": {"compression": "Int8"}},
    "compressed PowerSGD": {"tensor": 4, "dataParallel": {"compression": "PowerSGD"}},
    "buckets": {"dataParallel": {"bucketElements": 1000000, "overlap": False}},
    **{
        f"schedule {name}": {"pipeline": 4, "schedule": name}
        for name in (
            *("Naive", "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "ZBH1", "ZBH2", "ZBV", "Automatic"),
            *("DualPipe", "DualPipeV"),
        )
    },
    "Interleaved1F1B with 4 chunks": {"pipeline": 4, "schedule": "Interleaved1F1B", "virtualStages": 4},
    "LoopedBFS with 2 chunks": {"pipeline": 2, "schedule": "LoopedBFS", "virtualStages": 2},
    "Automatic within a limit": {"pipeline": 4, "schedule": "Automatic", "activationLimit": 6},
    "ZBV layer split": {"pipeline": 2, "schedule": "ZBV", "layerSplit": [9, 8, 8, 7]},
    "schedule without pipeline": {"pipeline": 1, "schedule": "GPipe"},
}
_TRAINING: Mapping[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "fp16": {"precision": "fp16"},
    "fp64": {"precision": "fp64"},
    "fp8": {"fp8": {}},
    "fp8 rowwise": {"fp8": {"scaling": "Rowwise"}},
    "no masters": {"masterWeights": False},
    "Muon": {"optimizer": {"name": "Muon"}},
    "optimizer on CPU": {"optimizer": {"offload": "CPU"}},
    "optimizer in files": {"optimizer": {"offload": "File", "offloadPath": "/scratch"}},
    "activations on CPU": {"activationOffload": True},
    "checkpointing None": {"activationCheckpointing": "None"},
    "checkpointing Full": {"activationCheckpointing": "Full"},
    "checkpointing Selective": {"activationCheckpointing": "Selective"},
    "checkpointing EveryK": {"activationCheckpointing": "EveryK", "checkpointEvery": 4},
    "checkpointing Sqrt": {"activationCheckpointing": "Sqrt"},
    "compiled": {"compile": True},
    "not deterministic": {"deterministic": False},
    "attention dropout": {"attentionDropout": 0.1},
    "dropout": {"dropout": 0.1},
    "loss in chunks": {"lossChunkTokens": 1024},
    "LoRA": {"lora": {"rank": 16}},
    "LoRA everywhere": {"lora": {"rank": 64, "targets": ["Query", "Key", "Value", "Output", "Gate", "Up", "Down"]}},
    "LocalSGD": {"outer": {"method": "LocalSGD"}},
    "DiLoCo": {"outer": {"method": "DiLoCo", "islands": 2}},
    "AsyncSGD": {"outer": {"method": "AsyncSGD"}},
    "long rows": {"sequenceLength": 65536},
    "very long rows": {"sequenceLength": 524288, "globalBatchSize": 8},
    "short rows": {"sequenceLength": 512, "globalBatchSize": 2048},
    "one sequence a replica": {"globalBatchSize": 4},
    "odd batch": {"globalBatchSize": 60},
}
_MIXTURE: Mapping[str, dict[str, Any]] = {
    "EP 1": {"parallelism": {"expert": 1}},
    "EP 4": {"parallelism": {"expert": 4}},
    "EP 8 CP 2": {"parallelism": {"expert": 8, "context": 2}},
    "whole experts": {"parallelism": {"expertTensor": False, "tensor": 2}},
    "PP 3": {"parallelism": {"pipeline": 3}},
    "PP 3 ZBH1": {"parallelism": {"pipeline": 3, "schedule": "ZBH1"}},
    "zero 1": {"parallelism": {"zeroStage": 1}},
    "zero 3": {"parallelism": {"zeroStage": 3}},
    "stage balance": {"parallelism": {"pipeline": 3, "stageBalance": "Flops"}},
    "fp8": {"training": {"fp8": {}}},
    "LoRA": {"training": {"lora": {"rank": 8}}},
    "DiLoCo": {"training": {"outer": {"method": "DiLoCo"}}},
    "Full": {"training": {"activationCheckpointing": "Full"}},
    "masters off": {"training": {"masterWeights": False}},
}
_STALE = {"training": {"optimizer": {"gradientClip": 0}}}
_OTHER: Mapping[str, dict[str, Any]] = {
    "PipeDream": {"parallelism": {"pipeline": 4, "schedule": "PipeDream"}, **_STALE},
    "PipeDream2BW": {"parallelism": {"pipeline": 4, "schedule": "PipeDream2BW"}, **_STALE},
    "reshard": {
        "replicas": 8,
        "parallelism": {"zeroStage": 3, "tensor": 1, "pipeline": 1, "dataParallel": {"reshardSize": 2}},
    },
    "16 replicas of small workers": {"replicas": 16, "workers": {"gpusPerWorker": 1}},
    "workers of 2": {"workers": {"gpusPerWorker": 2}},
    "spare nodes": {"recovery": {"spareNodes": 2}},
    "more spare nodes than there are": {"recovery": {"spareNodes": 30}},
    "CPU and memory": {"workers": {"resources": {"cpu": "16", "memory": "64Gi"}}},
    "parameters on CPU": {"training": {"parameterOffload": True}, "parallelism": {"zeroStage": 3}},
    "parameters on CPU, zero 2": {"training": {"parameterOffload": True}, "parallelism": {"zeroStage": 2}},
    "LoRA zero 3": {"training": {"lora": {"rank": 8}}, "parallelism": {"zeroStage": 3}},
    "Muon zero 2": {"training": {"optimizer": {"name": "Muon"}}, "parallelism": {"zeroStage": 2}},
    "compiled TP 2": {"training": {"compile": True}, "parallelism": {"tensor": 2}},
    "tied and asynchronous": {"model": {"preset": "llama-3.2-1b"}, "parallelism": {"schedule": "PipeDream"}},
}
_COMMAND: Mapping[str, dict[str, Any]] = {
    "command of workers of 4": {"workers": {"gpusPerWorker": 4}},
    "command TP 4 PP 2": {"parallelism": {"tensor": 4, "pipeline": 2}},
    "command CP 2 of workers of 1": {"parallelism": {"context": 2}, "workers": {"gpusPerWorker": 1}},
    "command of 20 replicas": {"replicas": 20, "parallelism": {"tensor": 8}},
}


def _fields() -> Iterator[tuple[str, Case]]:
    """Every field of a spec that a plan depends on, alone."""
    on = "4 h100 nodes"
    for name, changes in _PARALLELISM.items():
        yield f"parallelism {name}", Case(job("llama-3-8b", replicas=4, parallelism=changes), on)
    for name, changes in _TRAINING.items():
        yield f"training {name}", Case(job("llama-3-8b", replicas=4, training=changes), on)
        if "row" in name or "precision" in changes:
            yield f"training {name} tiny", Case(job("tiny", training=changes, workers={"gpusPerWorker": 1}), on)
    for name, changes in _MIXTURE.items():
        yield f"mixture {name}", Case(job("deepseek-v2-lite", **merged({"replicas": 4}, changes)), on)
    for name, changes in _OTHER.items():
        yield f"other {name}", Case(job("llama-3-8b", **merged({"replicas": 4}, changes)), on)
    without = {"model": None, "data": None, "training": None, "runtime": {"command": ["python", "train.py"]}}
    for name, changes in _COMMAND.items():
        yield name, Case(job("", **merged({**without, "replicas": 4}, changes)), on)
        yield f"{name} with holes", Case(job("", **merged({**without, "replicas": 4}, changes)), "h100 holes")


_PLACED: Mapping[str, dict[str, Any]] = {
    "8 replicas": {"replicas": 8, "parallelism": {"zeroStage": 2}},
    "PP 4": {"replicas": 4, "parallelism": {"pipeline": 4, "tensor": 2}, "workers": {"gpusPerWorker": 2}},
    "CP 2": {"replicas": 2, "parallelism": {"context": 2}, "training": {"sequenceLength": 16384}},
    "workers of 1": {"replicas": 8, "workers": {"gpusPerWorker": 1}, "parallelism": {"zeroStage": 3}},
}
_PLACED_ON = (
    *("one gpu", "1 h100 node", "h100 racks", "h100 holes", "h100 whole nodes taken", "h100 quarters"),
    *("h100 singles", "h100 spines", "h100 spines with holes", "full", "nvl72", "nvl72 holes", "a100 holes", "mixed"),
    *("mixed and short", "l40s", "t4", "v100", "h200", "unknown gpus with memory", "unknown gpus", "no gpus"),
    "strange",
)


def _inventories() -> Iterator[tuple[str, Case]]:
    """Jobs on clusters with racks, domains of several nodes, holes, several GPUs, and nodes that may not be used."""
    for cluster in _PLACED_ON:
        for name, changes in _PLACED.items():
            small = cluster in ("nvl72", "nvl72 holes", "t4") and "workers" not in changes
            workers = {"workers": {"gpusPerWorker": 4}} if small else {}
            yield f"placed {name}: {cluster}", Case(job("llama-3-8b", **changes, **workers), cluster)
    tolerations = [{"key": "dedicated", "operator": "Exists"}]
    wide = merged(_PLACED["workers of 1"], {"workers": {"tolerations": tolerations}, "recovery": {"spareNodes": 1}})
    yield "placed with tolerations: strange", Case(job("llama-3-8b", **wide), "strange")
    chosen = {"workers": {"gpusPerWorker": 8, "nodeSelector": {"network.topology.nvidia.com/leaf": "rack2"}}}
    yield "placed by selector: h100 racks", Case(job("llama-3-8b", **chosen), "h100 racks")
    other = {"workers": {"gpuResource": "example.com/gpu"}}
    yield "placed by resource: 4 h100 nodes", Case(job("llama-3-8b", **other), "4 h100 nodes")
    cpu = {"workers": {"resources": {"cpu": "90"}}}
    yield "placed short of CPU: strange", Case(job("llama-3-8b", replicas=8, **cpu), "strange")


def _objectives() -> Iterator[tuple[str, Case]]:
    """Every objective, among this runtime's techniques and all of them, with what a better cluster would give."""
    wanted = {
        "gpt2": ("1 h100 node", {"training": {"sequenceLength": 1024}, "workers": {"gpusPerWorker": 1}}),
        "llama-3-8b": ("4 h100 nodes", {}),
        "llama-3-70b": ("h100 racks", {"replicas": 4, "parallelism": {"zeroStage": 1}}),
        "mixtral-8x7b": ("16 a100 nodes", {"parallelism": {"zeroStage": 2}}),
        "deepseek-v2-lite": ("nvl72", {"workers": {"gpusPerWorker": 4}}),
    }
    for model, (cluster, changes) in wanted.items():
        for objective in OBJECTIVES:
            for every in ((), ("--every-technique",)):
                flags = ("--objective", objective, *every)
                name = f"objective {objective}{' among all' if every else ''}: {model}"
                yield name, Case(job(model, **changes), cluster, flags)
        yield f"what if: {model}", Case(job(model, **changes), cluster, ("--what-if",))


_NOT_BUILT = (
    '{"model_type": "qwen2_moe", "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, '
    '"intermediate_size": 5632, "moe_intermediate_size": 1408, "num_experts": 60, "num_experts_per_tok": 4, '
    '"vocab_size": 151936}'
)
_REFUSED: Mapping[str, dict[str, Any]] = {
    "no replicas": {"replicas": 0},
    "unknown preset": {"model": {"preset": "llama-9"}},
    "configuration that is not built": {"model": {"preset": None, "huggingFace": _NOT_BUILT}},
    "unknown field": {"paralelism": {}},
    "no model": {"model": None},
    "half a model": {"model": {"preset": None, "layers": 4}},
    "no training": {"training": None},
    "wrong type": {"training": {"steps": "many"}},
    "TP 3": {"parallelism": {"tensor": 3}},
    "TP 16": {"parallelism": {"tensor": 16}},
    "TP 16 of 32 heads": {"parallelism": {"tensor": 16}, "model": {"preset": "llama-1-7b"}},
    "schedule that clips": {"parallelism": {"pipeline": 4, "schedule": "PipeDream"}},
    "TP 6 workers of 4": {"parallelism": {"tensor": 6}, "workers": {"gpusPerWorker": 4}},
    "workers of 16": {"workers": {"gpusPerWorker": 16}},
    "workers of 3": {"workers": {"gpusPerWorker": 3}},
    "PP 64": {"parallelism": {"pipeline": 64}},
    "batch of 3": {"training": {"globalBatchSize": 3}},
    "micro-batches 7": {"parallelism": {"microBatches": 7}},
    "fewer micro-batches than stages": {"parallelism": {"pipeline": 4, "microBatches": 2}},
    "split of another model": {"parallelism": {"pipeline": 2, "layerSplit": [1, 2]}},
    "chunks of 1F1B": {"parallelism": {"virtualStages": 2, "schedule": "1F1B"}},
    "odd DualPipe": {"parallelism": {"pipeline": 3, "schedule": "DualPipe"}},
    "ulysses alone": {"parallelism": {"ulysses": 2}},
    "expert without mixture": {"parallelism": {"expert": 2}},
    "context of dropout": {"parallelism": {"context": 2}, "training": {"attentionDropout": 0.1}},
    "CP 3": {"parallelism": {"context": 3}},
    "short rows for CP": {"parallelism": {"context": 8}, "training": {"sequenceLength": 8}},
    "strategy of another stage": {"parallelism": {"dataParallel": {"strategy": "FSDP"}}},
    "shards of 3": {"parallelism": {"zeroStage": 3, "dataParallel": {"shardSize": 3}}},
    "Muon on flat shards": {"parallelism": {"zeroStage": 1}, "training": {"optimizer": {"name": "Muon"}}},
    "offload without a path": {"training": {"optimizer": {"offload": "File"}}},
    "parameters on CPU unsharded": {"training": {"parameterOffload": True}},
    "one island": {"replicas": 1, "training": {"outer": {"method": "DiLoCo"}}},
    "command and model": {"runtime": {"command": ["python"]}},
    "bad Hugging Face config": {"model": {"preset": None, "huggingFace": '{"model_type": ["x"]}'}},
    "too large for the cluster": {"model": {"preset": "llama-3.1-405b"}},
    "too large when pinned": {
        "parallelism": {"tensor": 1, "pipeline": 1},
        "model": {"preset": "llama-3-70b"},
        "workers": {"gpusPerWorker": 1},
    },
    "no room": {"replicas": 64},
    "overlap of no tensor parallelism": {"parallelism": {"tensorOverlap": True, "tensor": 1}},
    "compressed shards": {"parallelism": {"zeroStage": 2, "dataParallel": {"compression": "FP16"}}},
    "fp8 in fp16": {"training": {"precision": "fp16", "fp8": {}}},
    "no masters in fp32": {"training": {"precision": "fp32", "masterWeights": False}},
}


def _refusals() -> Iterator[tuple[str, Case]]:
    """Specs that are refused, and those that have no room."""
    for name, changes in _REFUSED.items():
        yield f"refused {name}", Case(job("llama-3-8b", **changes), "4 h100 nodes")
