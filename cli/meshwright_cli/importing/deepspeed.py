"""Reads DeepSpeed's JSON configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright_cli.importing.settings import Imported, Settings, flat, replicas_of, without_none

_OFFLOAD = {"cpu": "CPU", "nvme": "File"}
_DECAYS = {"WarmupDecayLR": "Linear", "WarmupLR": "Constant"}


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
    notes = ["the model, the data and the length of sequences are in the script, not in this file"]
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
            "training": _training(found, batch, automatic, notes),
        }
    )
    if automatic:
        notes.append(f"the script's arguments set what is `auto`: {', '.join(sorted(automatic))}")
    if found.get("zero_optimization.offload_param.device") not in (None, "none"):
        spec["training"]["parameterOffload"] = True
    if replicas is None:
        notes.append("the number of replicas is unknown: use --gpus")
    return Imported("DeepSpeed", spec, found.unread, notes)


def _training(found: Settings, batch: int | None, automatic: set[str], notes: list[str]) -> dict[str, Any]:
    betas = found.get("optimizer.params.betas")
    kind = str(found.get("optimizer.type", "AdamW"))
    offload = _OFFLOAD.get(str(found.get("zero_optimization.offload_optimizer.device")))
    if kind.lower() not in ("adam", "adamw"):
        found.read.discard("optimizer.type")
    otherwise = None if automatic & {"bf16.enabled", "fp16.enabled"} else "fp32"
    precision = "bf16" if found.flag("bf16.enabled") else "fp16" if found.flag("fp16.enabled") else otherwise
    return {
        "steps": found.integer("scheduler.params.total_num_steps"),
        "globalBatchSize": batch,
        "precision": precision,
        "lossScale": _loss_scale(found) if precision == "fp16" else None,
        "optimizer": {
            **_schedule(found, notes),
            "weightDecay": found.number("optimizer.params.weight_decay"),
            "beta1": betas[0] if isinstance(betas, list) and len(betas) == 2 else None,
            "beta2": betas[1] if isinstance(betas, list) and len(betas) == 2 else None,
            "gradientClip": None if "gradient_clipping" in automatic else found.number("gradient_clipping", 0.0),
            "offload": offload,
            "offloadPath": found.get("zero_optimization.offload_optimizer.nvme_path") if offload == "File" else None,
        },
    }


def _loss_scale(found: Settings) -> dict[str, Any]:
    """The dynamic scale. A fixed one has no equivalent."""
    if found.number("fp16.loss_scale", 0.0) != 0:
        found.read.discard("fp16.loss_scale")
    power = found.integer("fp16.initial_scale_power")
    return {"initial": None if power is None else 2**power, "growthInterval": found.integer("fp16.loss_scale_window")}


def _schedule(found: Settings, notes: list[str]) -> dict[str, Any]:
    """Rates, warm-up and decay, of the schedulers that a job has too."""
    kind, prefix = found.get("scheduler.type"), "scheduler.params."
    rate, warm_up = found.number("optimizer.params.lr"), found.integer(f"{prefix}warmup_num_steps")
    schedule: dict[str, Any] = {"learningRate": rate, "warmupSteps": warm_up}
    if kind is None:
        return schedule
    if kind == "WarmupCosineLR":
        ratio = found.number(f"{prefix}cos_min_ratio")
        schedule["minLearningRate"] = ratio * rate if ratio and rate else None
        if found.values.get(f"{prefix}warmup_min_ratio") == 1:  # which is no warm-up
            found.read |= {f"{prefix}warmup_min_ratio", f"{prefix}warmup_type"}
            return {**schedule, "warmupSteps": 0}
    elif kind in _DECAYS:
        schedule["decay"] = _DECAYS[kind]
        schedule["learningRate"] = found.number(f"{prefix}warmup_max_lr", rate)
        least = found.number(f"{prefix}warmup_min_lr")
        if kind == "WarmupDecayLR":
            schedule["minLearningRate"] = least or None
        elif least:
            found.read.discard(f"{prefix}warmup_min_lr")
    else:
        found.read.discard("scheduler.type")
        return schedule
    if found.get(f"{prefix}warmup_type", "log") != "linear":
        found.read.discard(f"{prefix}warmup_type")
        notes.append(f"the warm-up of {kind} is logarithmic, and that of a job linear")
    return schedule
