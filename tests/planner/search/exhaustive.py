"""Random jobs, and every strategy for one of them: written without the search, whose result it is compared with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from meshwright.api.parallelism import ContextMethod, PipelineSchedule
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.training import ActivationCheckpointing
from meshwright.layout import Layout
from meshwright.models.presets import resolve
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cluster.limits import usable_memory
from meshwright.planner.cost.accelerators import accelerator
from meshwright.planner.cost.memory import worst_stage
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.cost_model import CostModel, cost_model_for
from meshwright.planner.plan import Plan
from meshwright.planner.run_config import runnable
from meshwright.rules.validation import check_spec
from meshwright.schedules.registry import kind_of
from tests.golden.planner.clusters import raw_node
from tests.planner.builders import inventory

PRODUCTS = ("NVIDIA-H100-80GB-HBM3", "NVIDIA-A100-SXM4-40GB", "NVIDIA-L40S", "Tesla-V100-SXM2-16GB")
SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBH1", "ZBH2", "ZBV", "DualPipe", "DualPipeV")
"""Synchronous schedules, of which a planner may choose one."""
METHODS = (ContextMethod.RING_ZIG_ZAG, ContextMethod.ULYSSES, ContextMethod.ALL_GATHER)
CHECKPOINTING = (
    ActivationCheckpointing.NONE,
    ActivationCheckpointing.SELECTIVE,
    ActivationCheckpointing.FULL,
    ActivationCheckpointing.SQRT,
)
SHORTEST_SLICE = 2048
"""Tokens of a rank, below which sequences are not shared."""


@dataclass(frozen=True)
class RandomJob:
    """A job and the nodes that it is planned for."""

    spec: ParallelTrainingJobSpec
    inventory: Inventory


def random_job(seed: int) -> RandomJob:
    """A valid job for up to 64 GPUs, with a budget or with replicas, that leaves some of its layout open."""
    draws = random.Random(seed)
    while True:
        budget = draws.random() < 0.6
        each = draws.choice((1, 2, 4, 8))
        gpus = max(each, draws.choice((1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)))
        spec = ParallelTrainingJobSpec.model_validate(
            {
                **({"gpus": gpus} if budget else {"replicas": draws.choice((1, 2, 3, 4, 8))}),
                "model": _model(draws),
                "data": {"source": "PythonStdlib"},
                "training": _training(draws),
                "parallelism": _parallelism(draws),
                "workers": {"image": "worker", "gpusPerWorker": each},
            }
        )
        if not check_spec(spec):
            labels = {"nvidia.com/gpu.product": draws.choice(PRODUCTS)}
            return RandomJob(spec, inventory(*(raw_node(f"n{i}", labels=labels) for i in range(8))))


def _model(draws: random.Random) -> dict[str, Any]:
    heads, size = draws.choice((8, 12, 16, 32)), draws.choice((64, 128))
    model: dict[str, Any] = {
        "layers": draws.choice((3, 4, 6, 8, 12, 16)),
        "hiddenSize": heads * size,
        "intermediateSize": heads * size * draws.choice((3, 4)),
        "heads": heads,
        "kvHeads": draws.choice((heads, heads // 4)),
        "vocabSize": draws.choice((32000, 128256)),
        "tieEmbeddings": draws.random() < 0.2,
    }
    if draws.random() < 0.25:
        experts = draws.choice((4, 6, 8))
        model["mixture"] = {"experts": experts, "perToken": 2, "intermediateSize": heads * size}
    return model


def _training(draws: random.Random) -> dict[str, Any]:
    training: dict[str, Any] = {
        "steps": 10,
        "globalBatchSize": draws.choice((8, 12, 16, 24, 32, 48, 64, 96)),
        "sequenceLength": draws.choice((1024, 2048, 4096, 8192, 16384)),
        "precision": draws.choice(("bf16", "bf16", "fp32")),
    }
    if draws.random() < 0.2:
        training["activationCheckpointing"] = draws.choice(("None", "Selective", "Full"))
    if draws.random() < 0.1:
        training["optimizer"] = {"name": "Muon"}
    return training


def _parallelism(draws: random.Random) -> dict[str, Any]:
    open_fields = {
        "tensor": (1, 2, 4),
        "pipeline": (1, 2, 3, 4),
        "context": (1, 1, 2),
        "zeroStage": (0, 1, 2, 3),
        "microBatches": (2, 4, 8),
        "schedule": ("1F1B", "ZBH1", "Interleaved1F1B"),
        "contextMethod": ("Ulysses", "AllGather"),
    }
    return {name: draws.choice(values) for name, values in open_fields.items() if draws.random() < 0.25}


def faster_strategy(job: RandomJob, plan: Plan, than: float) -> Strategy | None:
    """A strategy that the job allows, that fits and whose step is shorter than so many seconds. None if there is none.

    With a budget any number of GPUs up to it is tried; with replicas as many as the plan has, with its context degree.
    """
    spec, architecture = job.spec, plan.architecture
    assert architecture is not None
    cost_model = cost_model_for(spec, architecture, job.inventory)
    assert cost_model is not None
    accepted, limit = runnable(spec, architecture), _limit(job)
    for one in _strategies(job, plan, cost_model):
        memory = worst_stage(cost_model.work, one, cost_model.job.runtime).total
        if memory <= limit and cost_model.estimate(one).seconds < than and accepted(one):
            return one
    return None


def _limit(job: RandomJob) -> float:
    return float(min(usable_memory(node.gpu_memory_bytes or 0) for node in job.inventory.usable))


def _strategies(job: RandomJob, plan: Plan, cost_model: CostModel) -> Iterator[Strategy]:
    spec, layers = job.spec, cost_model.work.model.layers
    stated, batch = spec.parallelism, cost_model.work.global_batch
    for layout in _layouts(job, plan, layers):
        rows = batch // layout.data
        counts = [stated.micro_batches] if stated.micro_batches else [m for m in range(1, rows + 1) if rows % m == 0]
        schedules = _schedules(spec, layout, layers)
        methods = [stated.context_method] if stated.context_method else METHODS
        for count, (schedule, chunks), method in product(
            counts, schedules, methods if layout.context > 1 else methods[:1]
        ):
            if rows % count or not kind_of(schedule).accepts(layout.pipeline, count) or count < layout.pipeline:
                continue
            yield from _with_savings(spec, cost_model, layout, count, schedule, chunks, method)


def _with_savings(
    spec: ParallelTrainingJobSpec,
    cost_model: CostModel,
    layout: Layout,
    count: int,
    schedule: PipelineSchedule,
    chunks: int | None,
    method: ContextMethod,
) -> Iterator[Strategy]:
    stated, asked = spec.parallelism.zero_stage, spec.training
    assert asked is not None
    stages = (0,) if layout.shard_ranks == 1 else (0, 1, 2, 3) if stated is None else (stated,)
    again = [asked.activation_checkpointing] if asked.activation_checkpointing else CHECKPOINTING
    base = cost_model.job.strategy(layout, count, schedule, virtual_stages=chunks, context_method=method)
    for stage, option in product(stages, again):
        yield replace(base, zero_stage=stage, checkpointing=option)


def _schedules(spec: ParallelTrainingJobSpec, layout: Layout, layers: int) -> list[tuple[PipelineSchedule, int | None]]:
    if layout.pipeline == 1:
        return [(spec.parallelism.order, None)]
    found: list[tuple[PipelineSchedule, int | None]] = []
    for name in [spec.parallelism.schedule] if spec.parallelism.schedule else SCHEDULES:
        kind = kind_of(PipelineSchedule(name))
        for chunks in (2, 4) if kind.virtual_stages else (None,):
            if kind.stages_per_rank(chunks or 1) * layout.pipeline <= layers:
                found.append((PipelineSchedule(name), chunks))
    return found


def _layouts(job: RandomJob, plan: Plan, layers: int) -> Iterator[Layout]:
    spec, each = job.spec, job.spec.workers.gpus_per_worker
    stated, most = spec.parallelism, spec.gpus or plan.layout.world_size
    assert spec.training is not None
    architecture = resolve(spec.model) if spec.model is not None else None
    experts = architecture.mixture.experts if architecture is not None and architecture.mixture is not None else 1
    batch, length = spec.training.global_batch_size, spec.training.sequence_length
    tensors = [stated.tensor] if stated.tensor else range(1, 9)
    pipelines = [stated.pipeline] if stated.pipeline else range(1, layers + 1)
    contexts = (
        [stated.context] if stated.context else [c for c in (1, 2, 4, 8) if length // c >= SHORTEST_SLICE or c == 1]
    )
    for tensor, pipeline, context in product(tensors, pipelines, contexts if spec.gpus else [plan.layout.context]):
        for data in range(1, most // (tensor * pipeline * context) + 1) if spec.gpus else [spec.replicas]:
            world = tensor * pipeline * context * data
            if batch % data or world % each or (tensor % each and each % tensor) or world > most:
                continue
            if not spec.gpus and world != most:
                continue
            if spec.gpus and not stated.pipeline and not _may_have_stages(job, plan, tensor * context, pipeline):
                continue
            for expert in [e for e in range(1, experts + 1) if experts % e == 0 and data * context % e == 0]:
                if stated.expert in (None, expert):
                    yield Layout(tensor, pipeline, data, context, expert)


def _may_have_stages(job: RandomJob, plan: Plan, ranks: int, pipeline: int) -> bool:
    """Whether a budget may have this pipeline: only across NVLink domains, unless the plan has one inside a domain."""
    gpu = accelerator(job.inventory.usable[0].gpu_product or "")
    assert gpu is not None
    domain = 8 if gpu.domain > 1 else 1
    used = plan.layout
    inside = used.pipeline > 1 and used.replica_size <= domain
    return inside or pipeline == 1 or ranks * pipeline > domain
