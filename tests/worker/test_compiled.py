"""Compiled layers compute what the others do."""

from __future__ import annotations

import pytest
import torch

from meshwright.models.architecture import Architecture
from meshwright_worker.memory.compiled import compile_layers
from meshwright_worker.models.initialize import initialize
from meshwright_worker.models.llama import DecoderStage

MODEL = Architecture(layers=2, hidden_size=16, intermediate_size=24, heads=4, kv_heads=2, vocab_size=64)


def run(*, compiled: bool) -> list[torch.Tensor]:
    with torch.device("meta"):
        stage = DecoderStage(MODEL, torch.float64).double()
    initialize(stage, MODEL, 0, torch.device("cpu"))
    if compiled:
        compile_layers(stage)
    tokens = torch.arange(32).view(2, 16)
    loss = stage(tokens, targets=tokens + 1)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in stage.parameters() if parameter.grad is not None)]


@pytest.mark.slow
def test_compiled_layers_give_the_same_gradients() -> None:
    for got, want in zip(run(compiled=True), run(compiled=False), strict=True):
        # Compiled cosines of the fp32 rotary table differ in the last digit.
        assert float((got - want).abs().max() / want.abs().max()) < 1e-6
