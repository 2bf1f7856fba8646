"""Published runs as cases for the cost model: which tables and columns are scored, which are not and why.

Rows are read as they come: a row without an input that its table always needs is skipped and counted, never guessed
at. What a table leaves out for all its rows (the vocabulary of a GPT, the sequence length of a benchmark page) is
stated once in its reader.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.precision import Precision
from meshwright.api.training import ActivationCheckpointing
from meshwright.models.architecture import Architecture
from meshwright.planner.cost.accelerators import Accelerator, accelerator
from meshwright.planner.cost.fabric import Fabric
from meshwright.planner.cost.frameworks import FRAMEWORKS
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright.planner.units import GIB

Row = dict[str, Any]
GPT_VOCABULARY = 51200
"""Of Megatron's GPT, where a table does not give it: GPT-2's, padded."""

LEFT_OUT = {
    "megatron_2020_model_parallel": "shapes of the larger models and the sequence length are not given",
    "megatron_core_r0_8_h100": "micro-batch size, virtual stages and recomputation are not given",
    "korthikanti_table4_layer": "times of one layer, not of a step",
    "korthikanti_fig1_memory": "a closed form and no measurement: an exact unit test",
    "korthikanti_fig7_activation_pct": "read off a plot of the same closed form: a unit test",
    "torchtitan_202506_asynctp": "the sequence length is not given",
    "megascale_table2": "the micro-batch size is not given",
    "zero_bubble_table5": "computed by its authors from profiles: a test of the schedules",
    "own_memory_check_zero_bubble": "a computation and no measurement",
    "deepseek_v3_isca25_table4": "the micro-batch size and recomputation are not given; one model of its kind",
    "nanotron_tp_scaling_3b": "shape, batch and number of GPUs are not given",
    "megatron_bridge_25_11": "recomputation, layer split and what is offloaded or captured in graphs are not given",
    "llama1_gpu_hours": "layouts are not given",
    "vtrain_nccl_allreduce": "collectives, not steps: a test of the collectives",
    "autoparallel_h100_collectives": "collectives, not steps: a test of the collectives",
    "planner_reported_accuracy": "other planners' figures",
    "placement_micro_instances": "placement, not cost",
}
"""Tables that are not scored -> why."""


@dataclass(frozen=True)
class Case:
    """One measured run and everything its estimate needs."""

    table: str
    model: str
    """What leave-one-model-out leaves out."""
    runtime: str
    gpu: Accelerator
    fabric: Fabric
    work: Workload
    strategy: Strategy
    seconds: float | None = None
    """Measured seconds of one step."""
    memory: float | None = None
    """Measured bytes of the fullest rank, or of one of `stage`."""
    stage: int | None = None
    """The stage whose rank was measured. None if it was the fullest."""
    certain: bool = False
    """Whether the unit of `memory` is certain."""
    rivals: str | None = None
    """Cases with the same value did the same work on as many GPUs: a planner chooses among them."""

    @property
    def pair(self) -> str:
        """(accelerator, runtime) as one key."""
        runtime = FRAMEWORKS[self.runtime]
        return f"{self.gpu.name}/{runtime.family or runtime.name}"


@dataclass
class Loaded:
    """What a data file gave."""

    cases: list[Case] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    """Table -> why rows of it were skipped."""
    unknown: list[str] = field(default_factory=list)
    """Tables that no reader knows."""


Reader = Callable[[Row], "Case | None"]


class UnusableRow(ValueError):
    """A row that cannot be scored; the text says why."""


def load(path: Path, readers: dict[str, Reader]) -> Loaded:
    """All cases of a data file. A row that cannot be read is skipped, with the reason."""
    loaded = Loaded()
    for table in json.loads(path.read_text(encoding="utf-8"))["tables"]:
        name = table["id"]
        reader = readers.get(name)
        if reader is None:
            if name not in LEFT_OUT:
                loaded.unknown.append(name)
            continue
        for row in _rows(table):
            try:
                case = reader(row)
            except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
                reason = f"missing {error}" if isinstance(error, KeyError) else str(error)
                loaded.skipped.setdefault(name, []).append(reason)
                continue
            if case is not None:
                loaded.cases.append(case)
    return loaded


def _rows(table: Row) -> Iterator[Row]:
    if "columns" in table:
        for values in table["data"]:
            yield dict(zip(table["columns"], values, strict=True))
        return
    yield from table["rows"]


def gpu_of(row: Row, default: str | None = None) -> Accelerator:
    """The GPU a row names.

    Raises:
        UnusableRow: it names none that the catalog knows.
    """
    named = row.get("gpu") or default
    found = accelerator(str(named)) if named else None
    if found is None:
        raise UnusableRow(f"unknown GPU {named!r}")
    return found


def gpt(row: Row, *, tied: bool = True) -> Architecture:
    """A GPT by its row: LayerNorm, biases, ungated feed-forward layers of four times the width."""
    hidden, heads, sequence = int(row["hidden"]), int(row["heads"]), int(row["seq"])
    return Architecture(
        layers=int(row["layers"]),
        hidden_size=hidden,
        intermediate_size=int(row.get("ffn") or 4 * hidden),
        heads=heads,
        kv_heads=heads,
        vocab_size=int(row.get("vocab") or GPT_VOCABULARY),
        gated=False,
        biases=True,
        positions=sequence,
        tie_embeddings=tied,
    )


def whole(value: Any, by: int, what: str) -> int:
    """`value / by`, at least 1.

    Raises:
        UnusableRow: it does not divide.
    """
    if int(value) % by and int(value) > by:
        raise UnusableRow(f"{what} {value} does not divide by {by}")
    return max(1, int(value) // by)


def _vtrain(row: Row, table: str, runtime: str, seconds: float, fabric: Fabric) -> Case:
    work = Workload(gpt(row), int(row["seq"]), int(row["gbs"]), causal=False)
    strategy = Strategy(
        tensor=int(row["tp"]),
        pipeline=int(row["pp"]),
        data=int(row["dp"]),
        micro_batch_size=int(row["mbs"]),
        micro_batches=whole(row["gbs"], int(row["dp"]) * int(row["mbs"]), "batch"),
        sequence_parallel=False,
        checkpointing=ActivationCheckpointing.FULL,
        precision=Precision.FP16,
    )
    model = f"h{row['hidden']} L{row['layers']}"
    rivals = f"{model} on {row['gpus']} x {row['gbs']}"
    return Case(table, model, runtime, gpu_of(row, "A100-SXM4-80GB"), fabric, work, strategy, seconds, rivals=rivals)


def vtrain_multi(row: Row) -> Case:
    """The multi-node runs of vTrain: 1F1B, full recomputation; the network's rate is that of a node."""
    gpu = gpu_of(row, "A100-SXM4-80GB")
    per_gpu = float(row.get("inter_node_gbps") or 800) / 8 * 1e9 / int(row.get("gpus_per_node") or 8)
    seconds = float(row["iter_s"])
    return _vtrain(row, "vtrain_multi_node", "megatron-deepspeed", seconds, Fabric.of(gpu, nic=per_gpu))


def vtrain_single(row: Row) -> Case:
    """The single-node runs of vTrain; their framework is not stated, so they are a pair of their own."""
    gpu = gpu_of(row, "A100-SXM4-80GB")
    return _vtrain(row, "vtrain_single_node", "vtrain-single", float(row["iter_ms"]) / 1e3, Fabric.of(gpu))


def _megatron(row: Row, table: str, seconds: float) -> Case:
    gpu, interleaved = gpu_of(row), int(row.get("vpp") or 1)
    work = Workload(gpt(row), int(row["seq"]), int(row["gbs"]), causal=False)
    strategy = Strategy(
        tensor=int(row["tp"]),
        pipeline=int(row["pp"]),
        data=int(row["dp"]),
        schedule=PipelineSchedule.INTERLEAVED if interleaved > 1 else PipelineSchedule.ONE_F_ONE_B,
        virtual_stages=interleaved,
        micro_batch_size=int(row["mbs"]),
        micro_batches=whole(row["gbs"], int(row["dp"]) * int(row["mbs"]), "batch"),
        sequence_parallel=bool(row.get("sp")),
        checkpointing=ActivationCheckpointing(row["recompute"].capitalize()),
        precision=Precision(row.get("precision") or "fp16"),
    )
    model = f"h{row['hidden']} L{row['layers']}"
    return Case(table, model, "megatron-lm", gpu, Fabric.of(gpu), work, strategy, seconds)


def sc21(row: Row) -> Case:
    """Megatron-LM's weak scaling: seconds follow from its FLOPs, which count recomputation."""
    if row.get("iter_s_derived"):
        seconds = float(row["iter_s_derived"])
    else:
        batch, sequence, layers, hidden = (float(row[k]) for k in ("gbs", "seq", "layers", "hidden"))
        flops = 96 * batch * sequence * layers * hidden**2
        flops *= 1 + sequence / (6 * hidden) + float(row["vocab"]) / (16 * layers * hidden)
        seconds = flops / (float(row["tflops_per_gpu"]) * 1e12 * int(row["gpus"]))
    return _megatron(row, "megatron_sc21_table1", seconds)


def korthikanti_time(row: Row) -> Case:
    """Full against selective recomputation with sequence parallelism."""
    return _megatron(row, "korthikanti_table5_time", float(row["iter_s"]))


ZERO_BUBBLE = {
    "1f1b": PipelineSchedule.ONE_F_ONE_B,
    "1f1b-interleaved": PipelineSchedule.INTERLEAVED,
    "zb-1p": PipelineSchedule.ZB_H1,
    "zb-2p": PipelineSchedule.ZB_H2,
}


def zero_bubble(row: Row) -> Case:
    """Pipelines alone; the first and the last rank hold one layer less, and interleaved chunks are single layers."""
    gpu, ranks, layers = gpu_of(row), int(row["pp"]), int(row["layers"])
    each = whole(layers + 2, ranks, "layers and tables")
    split = (each - 1, *(each for _ in range(ranks - 2)), each - 1) if ranks > 1 else (layers,)
    schedule = ZERO_BUBBLE[row["schedule"]]
    batch = int(row["mbs"]) * int(row["microbatches"])
    strategy = Strategy(
        pipeline=ranks,
        schedule=schedule,
        virtual_stages=each if schedule is PipelineSchedule.INTERLEAVED else 1,
        layer_split=split,
        micro_batch_size=int(row["mbs"]),
        micro_batches=int(row["microbatches"]),
        sequence_parallel=False,
        precision=Precision.FP16,
    )
    seconds = batch / (float(row["samples_per_gpu_s"]) * int(row["gpus"]))
    memory = float(row["mem_gb"]) * GIB if row.get("mem_gb") else None
    model = f"h{row['hidden']} L{layers}"
    work = Workload(gpt(row, tied=False), int(row["seq"]), batch, causal=False)
    rivals = f"{model} x {batch}"
    table = "zero_bubble_table4"
    return Case(table, model, "zero-bubble", gpu, Fabric.of(gpu), work, strategy, seconds, memory, rivals=rivals)


def sailor(row: Row) -> Case | None:
    """Sailor's GH200 sweep; its consumer cards on slow Ethernet are another machine, and copied rows say so."""
    if row.get("cluster") != "clariden" or "copied" in str(row.get("caution", "")):
        return None
    gpu, layers = gpu_of(row), int(row["layers"])
    split = [int(held) for held in row.get("layers_per_stage_incl_embed_head") or ()]
    if split:
        split[0] -= 1
        split[-1] -= 1
    strategy = Strategy(
        tensor=int(row["tp"]),
        pipeline=int(row["pp"]),
        data=int(row["dp"]),
        layer_split=tuple(split) if sum(split) == layers and len(split) == int(row["pp"]) else None,
        micro_batch_size=int(row["mbs"]),
        micro_batches=whole(row["gbs"], int(row["dp"]) * int(row["mbs"]), "batch"),
        sequence_parallel=False,
        precision=Precision.FP16,
    )
    work = Workload(gpt(row), int(row["seq"]), int(row["gbs"]), causal=False)
    memory, seconds = float(row["max_mem_bytes"]), float(row["iter_s"])
    name, fabric = "sailor_validation", Fabric.of(gpu)
    return Case(name, row["model"], "megatron-deepspeed", gpu, fabric, work, strategy, seconds, memory, certain=True)
