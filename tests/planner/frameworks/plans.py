"""Random jobs, planned for a framework."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.api.parsing import parse_spec
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.errors import PlanError
from meshwright.planner.frameworks.planning import launch_of
from meshwright.planner.frameworks.target import Launch, Target
from meshwright.planner.plan import Plan, make_plans
from meshwright_cli.plan.inventory_file import NodeEntry, nodes_of

H100 = "NVIDIA-H100-80GB-HBM3"
MODELS = {
    "megatron-lm": (
        *("llama-2-7b", "llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "mixtral-8x7b", "gpt3-6.7b"),
        *("qwen3-30b-a3b", "deepseek-v2-lite"),
    ),
    "torchtitan": ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b"),
    "deepspeed": ("llama-2-7b", "llama-3.1-8b", "llama-3-70b"),
    "nanotron": ("llama-2-7b", "llama-2-13b", "llama-3-8b", "llama-3-70b"),
}


@dataclass(frozen=True)
class Planned:
    plan: Plan
    launch: Launch


def cluster(nodes: int = 64) -> Inventory:
    entry = NodeEntry(name="node", gpus=8, product=H100, count=nodes)
    raw = [node for node, _ in nodes_of(entry, "nvidia.com/gpu")]
    return Inventory.from_objects(raw, [], gpu_resource="nvidia.com/gpu", node_selector={}, tolerations=[])


def job(model: str, parallelism: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "meshwright.dev/v1alpha1",
        "kind": "ParallelTrainingJob",
        "metadata": {"name": "job"},
        "spec": {
            "model": {"preset": model},
            "data": {"source": "PythonStdlib"},
            "training": {"steps": 100, "globalBatchSize": 256, "sequenceLength": 4096, "precision": "bf16"},
            "parallelism": parallelism,
            "workers": {"image": "train:1", "gpusPerWorker": 8},
            "checkpoint": {"claimName": "checkpoints"},
            **spec,
        },
    }


def planned(target: Target, seed: int = 0) -> Iterator[Planned]:
    """Plans of different layouts, without end."""
    draw, inventory, seen = random.Random(seed), cluster(), set()
    while True:
        asked: dict[str, Any] = {"tensor": draw.choice([1, 2, 4, 8]), "pipeline": draw.choice([1, 1, 2, 4, 8])}
        if draw.random() < 0.3:
            asked["context"] = draw.choice([2, 4])
            asked["contextMethod"] = draw.choice(target.techniques.context or ["RingZigZag"])
        if draw.random() < 0.5:
            asked["zeroStage"] = draw.choice(target.techniques.zero_stages)
        if asked["pipeline"] > 1 and draw.random() < 0.5:
            asked["schedule"] = draw.choice(target.techniques.schedules)
        replica = asked["tensor"] * asked["pipeline"] * asked.get("context", 1)
        replicas = draw.choice([1, 2, 4, 8, 16]) * max(1, 8 // replica)
        try:
            spec = parse_spec(job(draw.choice(MODELS[target.name]), asked, replicas=replicas))
            plan = make_plans(spec, inventory, max_plans=1, target=target)[0]
        except PlanError:
            continue
        if (key := (plan.architecture, plan.strategy)) not in seen and plan.architecture is not None:
            seen.add(key)
            yield Planned(plan, launch_of(spec, plan.architecture, plan.strategy, target))
