"""Reads the `adapter_config.json` of a LoRA adapter in the format of PEFT, and rejects what cannot be reproduced.

The runtime adds (alpha / rank) B A x to the output of a matrix. Variants of LoRA that add something else are rejected.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from meshwright_worker.pretrained.tensor_files import INDEX, SINGLE
from meshwright_worker.rank.failures import PretrainedError

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MERGE = "merge the adapter into its model, and name the result in `training.initialWeights`"
_DEFAULT_RANK, _DEFAULT_ALPHA = 8, 8
"""PEFT's `r` and `lora_alpha` of a configuration without them."""
_LARGEST = 1e9
_SAME_OUTPUT = frozenset(
    {
        *("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "auto_mapping"),
        *("r", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora", "lora_dropout", "inference_mode"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
        *("megatron_core", "qalora_group_size", "ensure_weight_tying", "runtime_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    }
)
"""Fields with which the adapter's tensors have the same output, or that are read here."""
_PLAIN = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal", "eva")}
"""Values of other fields with which they have, too. Other initializations change the model's weights."""

Value = TypeVar("Value", int, float)


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What determines the output of an adapter besides its tensors. Modules are named by their paths in the model."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    """Regular expression of the end of a path -> rank of such modules."""
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool
    """Whether the output is scaled by alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)."""

    def rank_of(self, module: str) -> int:
        """The rank of a module's adapter."""
        return _matching(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of a module's B A x."""
        rank = self.rank_of(module)
        alpha = _matching(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def read_peft_config(directory: Path) -> PeftConfig:
    """Read the configuration of the adapter in a directory.

    Raises:
        PretrainedError: there is no adapter, its configuration is not valid, or the runtime cannot reproduce it.
    """
    path = directory / ADAPTER_CONFIG
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PretrainedError(
            f"`training.lora.initialAdapter: {directory}` has no `{ADAPTER_CONFIG}`{_what_it_is(directory)}"
        ) from error
    except OSError as error:
        raise PretrainedError(f"`training.lora.initialAdapter`: {path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise PretrainedError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise PretrainedError(f"{path}: expected a JSON object, found {type(fields).__name__}")
    _check_supported(fields, path)
    return PeftConfig(
        rank=_positive(fields.get("r", _DEFAULT_RANK), int, "r", path),
        alpha=_positive(fields.get("lora_alpha", _DEFAULT_ALPHA), float, "lora_alpha", path),
        rank_pattern=_pattern(fields, "rank_pattern", int, path),
        alpha_pattern=_pattern(fields, "alpha_pattern", float, path),
        rank_stabilized=bool(fields.get("use_rslora")),
    )


def check_weights_file(directory: Path) -> None:
    """Reject an adapter without a safetensors file.

    Raises:
        PretrainedError: see above.
    """
    if (directory / ADAPTER_WEIGHTS).is_file():
        return
    pickled = directory / "adapter_model.bin"
    fix = (
        f"`{pickled.name}` is a pickle, which may run code: convert it, with `save_pretrained` of PEFT"
        if pickled.is_file()
        else "copy the file there, or name another directory"
    )
    raise PretrainedError(f"`training.lora.initialAdapter: {directory}` has no `{ADAPTER_WEIGHTS}`: {fix}")


def _what_it_is(directory: Path) -> str:
    if not directory.is_dir():
        return ", because it is not a directory: mount the adapter there, or set another path"
    if any((directory / name).is_file() for name in (INDEX, SINGLE)):
        return ": it contains a model, which `training.initialWeights` names"
    return ": name the directory that PEFT or `meshwright export --adapter` has written"


def _check_supported(fields: Mapping[str, Any], path: Path) -> None:
    if fields.get("peft_type") != "LORA":
        raise PretrainedError(f"{path}: `peft_type` must be LORA, got {fields.get('peft_type')}: {MERGE}")
    for name, value in fields.items():
        if name in _SAME_OUTPUT or not value or value in _PLAIN.get(name, ()):
            continue
        converted = (
            ", or convert it with `path_initial_model_for_weight_conversion` of PEFT"
            if name == "init_lora_weights"
            else ""
        )
        raise PretrainedError(
            f"{path}: `{name}: {json.dumps(value)[:100]}` is not supported, because the adapter's output would differ: "
            f"{MERGE}{converted}"
        )


def _positive(value: Any, kind: type[Value], name: str, path: Path) -> Value:
    numbers = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, numbers) or not 0 < value <= _LARGEST:
        raise PretrainedError(f"{path}: `{name}` must be a positive number, got {json.dumps(value)[:100]}")
    return kind(value)


def _pattern(fields: Mapping[str, Any], name: str, kind: type[Value], path: Path) -> dict[str, Value]:
    entries = fields.get(name) or {}
    if not isinstance(entries, dict):
        raise PretrainedError(f"{path}: `{name}` must be an object, got {json.dumps(entries)[:100]}")
    for expression in entries:
        try:
            re.compile(_end_of_path(expression))
        except (re.error, RecursionError, OverflowError) as error:
            raise PretrainedError(f"{path}: `{name}` has `{expression}`, not a regular expression: {error}") from None
    return {expression: _positive(value, kind, f"{name}.{expression}", path) for expression, value in entries.items()}


def _matching(pattern: Mapping[str, Value], module: str, otherwise: Value) -> Value:
    """The value of the first expression that matches the end of a module's path, as PEFT takes it."""
    return next((value for end, value in pattern.items() if re.match(_end_of_path(end), module)), otherwise)


def _end_of_path(expression: str) -> str:
    return rf"(.*\.)?({expression})$"
