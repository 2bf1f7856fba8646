"""Reads DeepSpeed's JSON configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright_cli.importing.settings import Imported, Settings, flat, replicas_of, without_none

_OFFLOAD = {"cpu": "CPU", "nvme": "File"}


def is_deepspeed(values: Mapping[str, Any]) -> bool:
    """Whether these are settings of DeepSpeed."""
    names = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "gradient_accumulation_steps"}
    return bool(names & set(values))


def read(values: Mapping[str, Any], gpus: int | None) -> Imported:
    """Read a configuration.

    Args:
        values: the content of the file.
        gpus: number of GPUs of the run, if known.

    Raises:
        ImportFileError: a value has the wrong type, or the GPUs do not divide.
    """
    given = dict(flat(values))
    automatic = {name for name, value in given.items() if value == "auto"}
    found = Settings({name: value for name, value in given.items() if name not in automatic})
    batch, micro = found.integer("train_batch_size"), found.integer("train_micro_batch_size_per_gpu")
    accumulation = found.integer("gradient_accumulation_steps", 1)
    tensor = found.integer("tensor_parallel.autotp_size", 1) or 1
    pipeline, context = found.integer("pipeline.stages", 1) or 1, found.integer("sequence_parallel_size", 1) or 1
    replicas = batch // (micro * accumulation) if batch and micro and accumulation else None
    if replicas is None and gpus:
        replicas = replicas_of(gpus, tensor=tensor, pipeline=pipeline, context=context)
    if batch is None and micro and accumulation and replicas:
        batch = micro * accumulation * replicas
    spec = without_none(
        {
            "replicas": replicas,
            "parallelism": {
                "tensor": tensor,
                "pipeline": pipeline,
                "context": context if context > 1 else None,
                "contextMethod": "Ulysses" if context > 1 else None,
                "schedule": "1F1B" if pipeline > 1 else None,
                "microBatches": accumulation,
                "zeroStage": found.integer("zero_optimization.stage", 0),
            },
            "training": _training(found, batch, automatic),
        }
    )
    notes = ["the model, the data and the length of sequences are in the script, not in this file"]
    if automatic:
        notes.append(f"the script's arguments set what is `auto`: {', '.join(sorted(automatic))}")
    if found.get("zero_optimization.offload_param.device") not in (None, "none"):
        spec["training"]["parameterOffload"] = True
    if replicas is None:
        notes.append("the number of replicas is unknown: use --gpus")
    return Imported("DeepSpeed", spec, found.unread, notes)


def _training(found: Settings, batch: int | None, automatic: set[str]) -> dict[str, Any]:
    betas = found.get("optimizer.params.betas")
    kind = str(found.get("optimizer.type", "AdamW"))
    offload = _OFFLOAD.get(str(found.get("zero_optimization.offload_optimizer.device")))
    if kind.lower() not in ("adam", "adamw"):
        found.read.discard("optimizer.type")
    otherwise = None if automatic & {"bf16.enabled", "fp16.enabled"} else "fp32"
    precision = "bf16" if found.flag("bf16.enabled") else "fp16" if found.flag("fp16.enabled") else otherwise
    ratio, rate = found.number("scheduler.params.cos_min_ratio"), found.number("optimizer.params.lr")
    if found.get("scheduler.type") not in (None, "WarmupCosineLR"):
        found.read.discard("scheduler.type")
    return {
        "steps": found.integer("scheduler.params.total_num_steps"),
        "globalBatchSize": batch,
        "precision": precision,
        "optimizer": {
            "learningRate": rate,
            "minLearningRate": ratio * rate if ratio and rate else None,
            "warmupSteps": found.integer("scheduler.params.warmup_num_steps"),
            "weightDecay": found.number("optimizer.params.weight_decay"),
            "beta1": betas[0] if isinstance(betas, list) and len(betas) == 2 else None,
            "beta2": betas[1] if isinstance(betas, list) and len(betas) == 2 else None,
            "gradientClip": None if "gradient_clipping" in automatic else found.number("gradient_clipping", 0.0),
            "offload": offload,
            "offloadPath": found.get("zero_optimization.offload_optimizer.nvme_path") if offload == "File" else None,
        },
    }
