"""What runs before the first step on GPUs, on a CPU."""

from __future__ import annotations

import pytest
import torch

from meshwright.models.presets import PRESETS
from meshwright_worker.trainer.warm_up import narrow, warm_up_kernels
from tests.distributed.configs import small_run


@pytest.mark.parametrize("preset", ["llama-3-8b", "deepseek-v3", "gpt2", "qwen3-8b", "mixtral-8x7b", "tiny-gpt"])
def test_a_narrow_layer_has_the_attention_of_the_model(preset: str) -> None:
    model = PRESETS[preset]
    small = narrow(model)
    assert small.parameters < 20e6
    assert small.heads / small.kv_heads == model.heads / model.kv_heads
    assert (small.key_size, small.value_size, small.latent) == (model.key_size, model.value_size, model.latent)
    run = small_run().model_copy(update={"architecture": model})
    before = torch.get_rng_state()
    warm_up_kernels(run, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
