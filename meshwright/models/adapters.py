"""How large low-rank adapters are (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

from meshwright.api.lora import LoraSpec, LoraTarget
from meshwright.models.architecture import Architecture


def adapter_parameters(lora: LoraSpec, model: Architecture) -> int:
    """Parameters of one layer's adapters: A and B of each named matrix."""
    hidden, width = model.hidden_size, model.intermediate_size
    widths = {
        LoraTarget.QUERY: hidden + model.heads * model.key_size,
        LoraTarget.KEY: hidden + model.kv_heads * model.head_size,
        LoraTarget.VALUE: hidden + model.kv_heads * model.value_size,
        LoraTarget.OUTPUT: model.heads * model.value_size + hidden,
        LoraTarget.GATE: hidden + width,
        LoraTarget.UP: hidden + width,
        LoraTarget.DOWN: width + hidden,
    }
    return lora.rank * sum(widths[target] for target in lora.targets)
