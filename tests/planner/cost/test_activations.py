"""What the first half of a backward pass leaves to the second: the closed form against the worker's own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.api.model_parts import LatentSpec
from meshwright.api.precision import Precision
from meshwright.models.architecture import Architecture
from meshwright.planner.cost.activations import weight_half_bytes_of_layer, weight_half_bytes_of_output
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.split_backward import WeightGradStore, deferring_weight_grads
from tests.distributed.configs import NUMBERS
from tests.distributed.moe_models import MIXTURES
from tests.distributed.tensor_memory import Allocated
from tests.planner.test_memory import one_thread

__all__ = ["one_thread"]

TOKENS = 2 * 16
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "GPT": {"gated": False, "biases": True, "norm": "LayerNorm", "activation": "GELU", "positions": 16},
    "latent attention": {
        "kv_heads": 4,
        "head_size": 8,
        "value_size": 8,
        "latent": LatentSpec(kv_rank=16, rope_size=4, query_rank=12),
    },
    "Mixtral": {"mixture": MIXTURES["Mixtral"]},
    "shared experts": {"mixture": MIXTURES["DeepSeek-V2"].model_copy(update={"dense_layers": 0})},
}


def left(model: Architecture, form: torch.dtype) -> int:
    """Bytes that a store holds of one micro-batch when its graph is gone."""
    stage = DecoderStage(model, form)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.zeros_like(parameter)
    tokens, store = torch.zeros(2, 16, dtype=torch.int64), WeightGradStore()
    stage(tokens)  # makes the table of positions
    with Allocated() as made:
        with deferring_weight_grads(store):
            stage(tokens, targets=tokens).backward()
        held = made.bytes()
        store.run()
        return held - made.bytes()


@pytest.mark.parametrize("form", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_a_store_holds_inputs_of_products_and_gradients_of_their_outputs(name: str, form: torch.dtype) -> None:
    few, many = (Architecture(**{**NUMBERS, **MODELS[name], "layers": layers}) for layers in (1, 3))
    precision = Precision.FP32 if form is torch.float32 else Precision.BF16
    layer = TOKENS * weight_half_bytes_of_layer(few, few.mixture is not None, 1, precision)
    least, most = left(few, form), left(many, form)
    assert most - least == pytest.approx(2 * layer, rel=0.05)
    assert least == pytest.approx(layer + TOKENS * weight_half_bytes_of_output(few, 1, precision, None), rel=0.05)
