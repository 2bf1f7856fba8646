"""Adapters in the format of PEFT, written as its documentation says and without the runtime, and merged by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright_worker.checkpoint.safetensors_format import write_tensors
from tests.pretrained.published import random_weights

RANK, ALPHA = 3, 7.5
LLAMA_ENDS = {
    "Query": "q_proj", "Key": "k_proj", "Value": "v_proj", "Output": "o_proj",
    "Gate": "gate_proj", "Up": "up_proj", "Down": "down_proj",
}  # fmt: skip
"""The end of the path of each target's module."""


def random_adapter(config: dict[str, Any], ends: Sequence[str], rank: int = RANK) -> dict[str, torch.Tensor]:
    """A and B of each module whose path ends so, with a product of a size that matters to the logits."""
    generator, found = torch.Generator().manual_seed(9), {}
    for name, weight in random_weights(config).items():
        module = name.removesuffix(".weight")
        if not any(module.endswith(f".{end}") for end in ends) or weight.ndim != 2 or module == name:
            continue
        inputs, outputs = weight.shape if config["model_type"] == "gpt2" else weight.shape[::-1]
        at = f"base_model.model.{module}"
        found[f"{at}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / 4
        found[f"{at}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) / 4
    return found


def write_adapter(directory: Path, tensors: dict[str, torch.Tensor], **fields: Any) -> Path:
    """An adapter's directory, whose configuration has these fields too."""
    directory.mkdir()
    write_tensors(directory / "adapter_model.safetensors", tensors, {"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none", **fields}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merged_by_hand(
    config: dict[str, Any], adapter: dict[str, torch.Tensor], scale: float = ALPHA / RANK
) -> dict[str, torch.Tensor]:
    """The random weights of a configuration, plus the adapter's products."""
    found = {}
    for name, weight in random_weights(config).items():
        at = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{at}.lora_A.weight" not in adapter:
            found[name] = weight
            continue
        product = scale * (adapter[f"{at}.lora_B.weight"].double() @ adapter[f"{at}.lora_A.weight"].double())
        found[name] = (weight.double() + (product.T if config["model_type"] == "gpt2" else product)).float()
    return found
