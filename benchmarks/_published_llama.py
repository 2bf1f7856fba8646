"""Readers of the published runs of Llama-like models: torchtitan and nanotron. `READERS` lists every scored table."""

from __future__ import annotations

from _published import (
    Case,
    Reader,
    Row,
    UnusableRow,
    gpu_of,
    korthikanti_time,
    sailor,
    sc21,
    vtrain_multi,
    vtrain_single,
    whole,
    zero_bubble,
)

from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.training import ActivationCheckpointing
from meshwright.models.architecture import Architecture
from meshwright.models.counts import training_flops
from meshwright.models.presets import PRESETS
from meshwright.planner.cost.fabric import Fabric
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright.planner.units import GIB

LLAMA_31 = {"8B": "llama-3.1-8b", "70B": "llama-3.1-70b", "405B": "llama-3.1-405b"}


def torchtitan(row: Row) -> Case:
    """FSDP2 with tensor, context and pipeline parallelism; a pipeline runs as many micro-batches as it has stages."""
    preset = LLAMA_31.get(str(row["model"]))
    if preset is None:
        raise UnusableRow(f"unknown model {row['model']!r}")
    gpu, model, variant = gpu_of(row), PRESETS[preset], str(row["variant"]).lower()
    pipeline, local = int(row.get("pp") or 1), int(row["lbs"])
    chunks = 2 if "interleaved" in variant and pipeline > 1 else 1
    micro_batches = min(local, pipeline * chunks) if pipeline > 1 else 1
    strategy = Strategy(
        tensor=int(row["tp"]),
        context=int(row.get("cp") or 1),
        pipeline=pipeline,
        data=int(row["fsdp"]),
        zero_stage=int(row.get("zero") or 3),
        schedule=PipelineSchedule.INTERLEAVED if chunks > 1 else PipelineSchedule.ONE_F_ONE_B,
        virtual_stages=chunks,
        micro_batch_size=whole(local, micro_batches, "local batch"),
        micro_batches=micro_batches,
        checkpointing=ActivationCheckpointing(row["recompute"].capitalize()),
        fp8="fp8" in variant,
    )
    sequence = int(row["seq"])
    work = Workload(model, sequence, local * int(row["fsdp"]))
    tokens = float(row["tok_s_per_gpu"]) * int(row["gpus"])
    memory = float(row["mem_gib"]) * GIB if row.get("mem_gib") else None
    nic = float(row["nic_gbps_per_gpu"]) / 8 * 1e9 if row.get("nic_gbps_per_gpu") else None
    return Case(
        table="torchtitan_202412_h100",
        model=str(row["model"]),
        runtime=runtime_of(variant),
        gpu=gpu,
        fabric=Fabric.of(gpu, nic=nic),
        work=work,
        strategy=strategy,
        seconds=work.tokens / tokens,
        memory=memory,
        certain=True,
    )


def runtime_of(variant: str) -> str:
    """Torchtitan by what its variant overlaps."""
    if "eager" in variant:
        return "torchtitan-eager"
    return "torchtitan-async" if "async" in variant else "torchtitan"


NANOTRON_TIED = 10_000
"""Width of feed-forward layers below which nanotron's benchmark ties embeddings (`scripts/scaling_benchmarks.py`)."""


def nanotron_split(model: Architecture, stages: int) -> tuple[int, ...] | None:
    """The layers of each stage: nanotron fills a stage until its products exceed an equal part, the head's included.

    The layer that exceeds it still belongs to the stage (`build_model` in `src/nanotron/models/base.py`).
    """
    if stages == 1:
        return None
    layer = (4 * model.hidden_size + 3 * model.intermediate_size) * model.hidden_size
    total = model.layers * layer + model.vocab_size * model.hidden_size
    split, stage = [0] * stages, 0
    for count in range(1, model.layers + 1):
        split[stage] += 1
        if count * layer * stages > total * (stage + 1):
            stage += 1
    return tuple(split)


def nanotron(row: Row) -> Case:
    """Best configurations; multi-head attention; model FLOPs over the peak give the seconds.

    The memory is that of global rank 0, on the first stage: only it writes the table (`log_throughput` in
    `src/nanotron/helpers.py`).
    """
    gpu, sequence = gpu_of(row), int(row["seq"])
    heads = int(row["heads"])
    model = Architecture(
        layers=int(row["layers"]),
        hidden_size=int(row["hidden"]),
        intermediate_size=int(row["ffn"]),
        heads=heads,
        kv_heads=heads,
        vocab_size=int(row["vocab"]),
        tie_embeddings=int(row["ffn"]) < NANOTRON_TIED,
    )
    batch = int(row["gbs_seqs"])
    strategy = Strategy(
        tensor=int(row["tp"]),
        pipeline=int(row["pp"]),
        data=int(row["dp"]),
        layer_split=nanotron_split(model, int(row["pp"])),
        zero_stage=int(row["zero"]),
        micro_batch_size=int(row["mbs"]),
        micro_batches=int(row["grad_accum"]),
    )
    work = Workload(model, sequence, batch)
    flops = work.tokens * training_flops(model, sequence)
    seconds = flops / (float(row["mfu_pct"]) / 100 * gpu.half * int(row["gpus"]))
    return Case(
        table="nanotron_best_configs",
        model=str(row["model"]),
        runtime="nanotron",
        gpu=gpu,
        fabric=Fabric.of(gpu),
        work=work,
        strategy=strategy,
        seconds=seconds,
        memory=float(row["mem_gb"]) * GIB if row.get("mem_gb") else None,
        stage=0,
    )


READERS: dict[str, Reader] = {
    "vtrain_multi_node": vtrain_multi,
    "vtrain_single_node": vtrain_single,
    "megatron_sc21_table1": sc21,
    "korthikanti_table5_time": korthikanti_time,
    "zero_bubble_table4": zero_bubble,
    "sailor_validation": sailor,
    "torchtitan_202412_h100": torchtitan,
    "nanotron_best_configs": nanotron,
}
"""Scored table -> what reads one of its rows."""
