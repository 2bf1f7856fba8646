"""Exports only the adapters of a checkpoint, in the format of PEFT: `adapter_config.json` and one safetensors file.

The model that they belong to is only compared with the one that they were trained on. Where a module has several
matrices (queries, keys and values of GPT-2 and Phi-3), its adapter has the rows of A of all of them, and in B each
matrix's rows read only its own: the rank is the sum, the product is the same.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from meshwright.api.lora import LoraSpec
from meshwright.api.mixture import Balancing
from meshwright.models.architecture import Architecture
from meshwright.models.huggingface.model_type import ModelType
from meshwright.models.huggingface.registry import model_type_of
from meshwright_worker.checkpoint.files import CheckpointPath
from meshwright_worker.checkpoint.full_tensors import FullTensorReader
from meshwright_worker.checkpoint.manifest import Manifest
from meshwright_worker.checkpoint.safetensors_format import write_tensors
from meshwright_worker.checkpoint.state_dict import MODEL
from meshwright_worker.models.lora import DOWN, UP, is_adapter
from meshwright_worker.pretrained.adapted_modules import WEIGHT, AdaptedModule, adapted_modules
from meshwright_worker.pretrained.base_fingerprint import base_of_adapters, check_base
from meshwright_worker.pretrained.hf_export import make_output, published_name
from meshwright_worker.pretrained.load import type_of_weights
from meshwright_worker.pretrained.name_mapping import published_tensors
from meshwright_worker.pretrained.peft_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from meshwright_worker.pretrained.tensor_files import CONFIG


class AdapterError(ValueError):
    """The adapters of a checkpoint have no equivalent in PEFT. The message names the reason and what to do."""


def export_adapter(
    checkpoint: CheckpointPath, manifest: Manifest, output: Path, *, dtype: torch.dtype, base: Path | None = None
) -> list[str]:
    """Write the adapters of a checkpoint into the new or empty directory `output`; the names of its safetensors files.

    Args:
        checkpoint: a complete checkpoint.
        manifest: its manifest.
        output: where to write.
        dtype: the format of the adapters there.
        base: the name or directory of the model that they belong to; None for where the manifest says. A directory that
            does not exist here is not compared with it.

    Raises:
        AdapterError: the checkpoint has no adapters, or none that PEFT could apply.
        PretrainedError: they belong to other weights than those in the directory of the model.
        FileExistsError: `output` holds something.
    """
    model, lora, stored = manifest.architecture, manifest.lora, FullTensorReader(checkpoint)
    if lora is None:
        raise AdapterError("--adapter: the checkpoint contains the full model and no adapters: leave it out")
    where = base_of_adapters(manifest, base)
    model_type = _type_of_base(model, where)
    modules = exported_modules(model, model_type, [name.removeprefix(f"{MODEL}.") for name in stored.names])
    if problem := _problem(manifest, modules):
        raise AdapterError(f"--adapter: {problem}: leave it out, which merges the adapters into the model")
    if where is not None and where.is_dir():
        check_base(manifest, where)
    make_output(output)
    tensors: dict[str, torch.Tensor] = {}
    for module in modules:
        down, up = module_adapter(module, stored, lora)
        tensors |= {module.down: down.to(dtype), module.up: up.to(dtype)}
    write_tensors(output / ADAPTER_WEIGHTS, tensors, {"format": "pt"})
    config = adapter_config(model, model_type, lora, modules, str(where))
    (output / ADAPTER_CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
    return [ADAPTER_WEIGHTS]


def _problem(manifest: Manifest, modules: Iterable[AdaptedModule]) -> str:
    """Why PEFT could not reproduce the trained model from a published one and adapters. Empty if it can."""
    mixture = manifest.architecture.mixture
    dense = [path for module in modules for path in module.matrices if ".feed_forward." in path]
    if manifest.initial_weights is None:
        return "the adapters belong to random weights (`training.initialWeights` was not set), not to a published model"
    if mixture is not None and mixture.balancing is Balancing.BIAS and mixture.bias_rate:
        return (
            f"training has moved the routers' biases (`model.mixture.biasRate: {mixture.bias_rate}`), and an adapter "
            "does not contain them"
        )
    if mixture is not None and dense:
        # With transformers 5, PEFT converts every target `gate_proj`, `up_proj` or `down_proj` of such a model.
        return f"`{dense[0]}` has an adapter, and PEFT takes those of dense layers between mixtures for the experts'"
    return ""


def _type_of_base(model: Architecture, where: Path | None) -> ModelType:
    """What the adapters' model is published as; the usual type of its shape if its directory is not here."""
    return type_of_weights(where) if where is not None and (where / CONFIG).is_file() else model_type_of(model)


def exported_modules(model: Architecture, model_type: ModelType, stored: Collection[str]) -> list[AdaptedModule]:
    """Return the modules of the adapters among the `stored` parameters.

    Raises:
        AdapterError: an adapter belongs to no module of the published model.
    """
    modules = adapted_modules(model, model_type, stored)
    known = {path for module in modules for path in module.matrices}
    unknown = sorted({name.rpartition(".")[0] for name in stored if is_adapter(name)} - known)
    if unknown:
        raise AdapterError(
            f"--adapter: the adapter of `{unknown[0]}` belongs to no module of the published model: leave it out, "
            "which merges the adapters into the model"
        )
    return modules


def module_adapter(
    module: AdaptedModule, stored: FullTensorReader, lora: LoraSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A, [rank, inputs], and B, [outputs, rank], of a module; `rank` is that of all its matrices together."""
    downs = [stored.read(f"{MODEL}.{path}.{DOWN}") for path in module.matrices]
    ups = [stored.read(f"{MODEL}.{path}.{UP}") for path in module.matrices]
    rows = next(iter(module.matrices.values())).published_rows(len(ups[0]))
    whole = ups[0].new_zeros(rows, lora.rank * len(ups))
    for number, (up, source) in enumerate(zip(ups, module.matrices.values(), strict=True)):
        columns = whole[:, number * lora.rank : (number + 1) * lora.rank]
        # B has a row per output also where the module stores its weight transposed.
        replace(source, transposed=False).write_into(up, columns)
    return torch.cat(downs), whole


def adapter_config(
    model: Architecture, model_type: ModelType, lora: LoraSpec, modules: list[AdaptedModule], base: str
) -> dict[str, Any]:
    """Return the `adapter_config.json` of a LoRA adapter for the causal language model at `base`."""
    tensors = published_tensors(model, model_type)
    every = {published_name(model_type, tensor).removesuffix(WEIGHT) for tensor in tensors}
    names = _names({module.name for module in modules}, every)
    # Every module has the scale alpha / rank, so both are multiplied by its number of matrices.
    multiples = {names[module.name]: len(module.matrices) for module in modules}
    usual = max(multiples.values()) if len(set(multiples.values())) == 1 else 1
    other = {name: multiple for name, multiple in multiples.items() if multiple != usual}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank * usual,
        "lora_alpha": _number(lora.alpha * usual),
        "target_modules": sorted(multiples),
        "rank_pattern": {name: lora.rank * multiple for name, multiple in other.items()},
        "alpha_pattern": {name: _number(lora.alpha * multiple) for name, multiple in other.items()},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(module.transposed for module in modules),
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _names(adapted: Collection[str], every: Collection[str]) -> dict[str, str]:
    """Return for each adapted module the shortest end of its path that no other module of the model has."""
    others = [name.split(".") for name in set(every) - set(adapted)]
    found = {}
    for name in adapted:
        parts = name.split(".")
        ends = (length for length in range(1, len(parts)) if all(o[-length:] != parts[-length:] for o in others))
        found[name] = ".".join(parts[-next(ends, len(parts)) :])
    return found


def _number(value: float) -> float | int:
    """PEFT documents `lora_alpha` as an integer, and servers store it as one."""
    return int(value) if value.is_integer() else value
