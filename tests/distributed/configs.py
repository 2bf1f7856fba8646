"""Runs small enough for hundreds of them, with everything in them that can go wrong: grouped heads, uneven stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.api.checkpoint import CheckpointSpec
from meshwright.api.data import DataSource, DataSpec, Packing
from meshwright.api.data_parallel import DataParallelSpec
from meshwright.api.parallelism import ContextMethod, ParallelismSpec
from meshwright.api.precision import Precision
from meshwright.api.training import OptimizerSpec, OuterSpec, TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.protocol.run_config import NativeRun
from tests.distributed.moe_models import MIXTURES
from tests.runs import native_run

NUMBERS = {
    "layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "heads": 4,
    "kv_heads": 2,
    "vocab_size": 260,
}


def small_run(
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    *,
    context: int = 1,
    expert: int = 1,
    zero: int = 0,
    sequence: bool = True,
    micro_batches: int = 2,
    steps: int = 8,
    every: int = 3,
    keep: int = 2,
    precision: Precision = Precision.FP32,
    clip: float = 1.0,
    seed: int = 0,
    replicas: Mapping[str, Any] | None = None,
    outer: Mapping[str, Any] | None = None,
    batch: int = 8,
    training: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    mixture: str | None = None,
    parallelism: dict[str, Any] | None = None,
    method: ContextMethod = ContextMethod.RING_ZIG_ZAG,
    ulysses: int | None = None,
    length: int = 16,
    packing: Packing = Packing.TEXT,
    balance: bool = False,
    **model: Any,
) -> NativeRun:
    return native_run(
        Architecture(**{**NUMBERS, "mixture": MIXTURES[mixture] if mixture else None, **model}),
        TrainingSpec(
            **{
                "steps": steps,
                "global_batch_size": batch,
                "sequence_length": length,
                "seed": seed,
                "precision": precision,
                "outer": OuterSpec(**outer) if outer else None,
                "optimizer": _optimizer(clip, optimizer or {}),
                **(training or {}),
            }
        ),
        (tensor, pipeline, data),
        context=context,
        expert=expert,
        micro_batches=micro_batches,
        parallelism=ParallelismSpec(
            sequence=sequence,
            zero_stage=zero,
            context=context,
            context_method=method,
            ulysses=ulysses,
            **{"data_parallel": DataParallelSpec(**(replicas or {})), **(parallelism or {})},
        ),
        data=DataSpec(source=DataSource.FILES, claim_name="text", pattern="**/*.py", packing=packing, balance=balance),
        checkpoint=CheckpointSpec(claim_name="checkpoints", every_steps=every, keep=keep),
    )


def _optimizer(clip: float, options: Mapping[str, Any]) -> OptimizerSpec:
    return OptimizerSpec(**{"learning_rate": 1e-3, "warmup_steps": 2, "gradient_clip": clip, **options})
