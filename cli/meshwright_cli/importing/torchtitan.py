"""Reads torchtitan's TOML configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.planner.frameworks.torchtitan import DECAYS, SCHEDULES
from meshwright_cli.importing.settings import (
    Imported,
    Settings,
    default_left_out,
    flat,
    micro_batches,
    replicas_of,
    without_none,
)

_PRESETS = {
    ("llama3", "8b"): "llama-3.1-8b",
    ("llama3", "70b"): "llama-3.1-70b",
    ("llama3", "405b"): "llama-3.1-405b",
    ("qwen3", "8b"): "qwen3-8b",
    ("qwen3", "32b"): "qwen3-32b",
    ("deepseek_v3", "671b"): "deepseek-v3",
}
_SCHEDULES = {name.lower(): str(schedule) for schedule, name in SCHEDULES.items()} | {"interleavedzerobubble": "ZBH1"}
_DECAYS = default_left_out(DECAYS)
_STAGE = {"always": 3, "default": 3, "never": 2}


def is_torchtitan(values: Mapping[str, Any]) -> bool:
    """Whether these are settings of torchtitan."""
    return "training" in values and bool({"parallelism", "model", "experimental"} & set(values))


def read(values: Mapping[str, Any], gpus: int | None) -> Imported:
    """Read a configuration.

    Args:
        values: the content of the file.
        gpus: number of GPUs of the run, if known.

    Raises:
        ImportFileError: a value has the wrong type, or the batch does not divide.
    """
    found, notes = Settings(dict(flat(values))), ["the data is named by torchtitan: set spec.data"]
    name, flavor = str(found.get("model.name", "")), str(found.get("model.flavor", ""))
    preset = _PRESETS.get((name, flavor.lower()))
    if preset is None:
        found.read -= {"model.name", "model.flavor"}
        notes.append("the model has no preset here: set spec.model")
    tensor = found.integer("parallelism.tensor_parallel_degree", 1) or 1
    pipeline = found.integer("parallelism.pipeline_parallel_degree", 1) or 1
    context = found.integer("parallelism.context_parallel_degree", 1) or 1
    copies = found.integer("parallelism.data_parallel_replicate_degree", 1) or 1
    shards = found.integer("parallelism.data_parallel_shard_degree", -1) or -1
    if shards < 0:
        degrees = {"tensor": tensor, "pipeline": pipeline, "context": context, "data_parallel_replicate_degree": copies}
        shards = replicas_of(gpus, **degrees) if gpus else 1
        if not gpus:
            notes.append("data_parallel_shard_degree is -1, the remaining GPUs: use --gpus")
    replicas = copies * shards
    parallelism = {
        "tensor": tensor,
        "pipeline": pipeline,
        "context": context if context > 1 else None,
        "expert": found.integer("parallelism.expert_parallel_degree"),
        **_pipeline(found, pipeline),
        "zeroStage": _stage(found, shards),
        "dataParallel": {"shardSize": shards} if copies > 1 and shards > 1 else None,
        "microBatches": _micro_batches(found, pipeline, replicas),
    }
    spec = {
        "replicas": replicas,
        "model": {"preset": preset} if preset else None,
        "parallelism": parallelism,
        "training": _training(found, replicas),
        "checkpoint": _checkpoint(found),
    }
    return Imported("torchtitan", without_none(spec), found.unread, notes)


def _pipeline(found: Settings, pipeline: int) -> dict[str, Any]:
    name = str(found.get("parallelism.pipeline_parallel_schedule", "1F1B"))
    schedule = _SCHEDULES.get(name.lower())
    if schedule is None:
        found.read.discard("parallelism.pipeline_parallel_schedule")
    return {"schedule": schedule if pipeline > 1 else None}


def _stage(found: Settings, shards: int) -> int:
    policy = str(found.get("parallelism.fsdp_reshard_after_forward", "default"))
    return _STAGE.get(policy, 3) if shards > 1 else 0


def _local_batch(found: Settings) -> int:
    return found.integer("training.local_batch_size") or found.integer("training.batch_size") or 8


def _global_batch(found: Settings, replicas: int) -> int:
    stated = found.integer("training.global_batch_size", -1) or -1
    return stated if stated > 0 else _local_batch(found) * replicas


def _micro_batches(found: Settings, pipeline: int, replicas: int) -> int | None:
    size = found.integer("parallelism.pipeline_parallel_microbatch_size", 1) if pipeline > 1 else _local_batch(found)
    return micro_batches(_global_batch(found, replicas), size, replicas)


def _training(found: Settings, replicas: int) -> dict[str, Any]:
    rate = found.number("optimizer.lr")
    factor = found.number("lr_scheduler.min_lr_factor", found.number("lr_scheduler.lr_min"))
    steps = found.integer("training.steps", 10000) or 10000
    if found.get("optimizer.name", "AdamW") not in ("Adam", "AdamW"):
        found.read.discard("optimizer.name")
    mode = str(found.get("activation_checkpoint.mode", "selective"))
    return {
        "steps": steps,
        "globalBatchSize": _global_batch(found, replicas),
        "sequenceLength": found.integer("training.seq_len", 2048),
        "seed": found.integer("training.seed"),
        "precision": "fp32" if found.get("training.mixed_precision_param", "bfloat16") == "float32" else "bf16",
        "activationCheckpointing": {"none": "None", "full": "Full", "selective": "Selective"}.get(mode),
        "compile": True if found.flag("compile.enable") or found.flag("training.compile") else None,
        "optimizer": {
            "learningRate": rate,
            "minLearningRate": factor * rate if factor and rate else None,
            **_schedule(found, steps),
            "weightDecay": found.number("optimizer.weight_decay"),
            "beta1": found.number("optimizer.beta1"),
            "beta2": found.number("optimizer.beta2"),
            "gradientClip": found.number("training.max_norm"),
        },
    }


def _schedule(found: Settings, steps: int) -> dict[str, Any]:
    """Warm-up and decay. A decay that begins before the warm-up has ended is shortened, as torchtitan does it."""
    warm_up = min(found.integer("lr_scheduler.warmup_steps", 200) or 0, steps)
    ratio, name = found.number("lr_scheduler.decay_ratio"), str(found.get("lr_scheduler.decay_type", "linear"))
    length = round(steps * ratio) if ratio is not None else None
    if name not in _DECAYS:
        found.read.discard("lr_scheduler.decay_type")
    return {
        "warmupSteps": warm_up,
        "decay": "Constant" if length == 0 else _DECAYS.get(name),
        "decaySteps": length if length and length < steps - warm_up else None,
    }


def _checkpoint(found: Settings) -> dict[str, Any] | None:
    enabled = found.flag("checkpoint.enable") or found.flag("checkpoint.enable_checkpoint")
    interval, keep = found.integer("checkpoint.interval", 500), found.integer("checkpoint.keep_latest_k")
    if not enabled:
        return None
    return {"claimName": "checkpoints", "everySteps": interval, "keep": keep or None}
