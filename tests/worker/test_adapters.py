"""Low-rank adapters in a stage that has no memory yet."""

from __future__ import annotations

import torch

from meshwright.api.lora import LoraSpec, LoraTarget
from meshwright.models.presets import PRESETS
from meshwright_worker.models.llama import DecoderStage
from meshwright_worker.models.lora import adapt, is_adapter

EVERY = LoraSpec(rank=4, targets=list(LoraTarget))


def test_adapting_takes_no_memory_and_keeps_the_format() -> None:
    with torch.device("meta"):
        stage = DecoderStage(PRESETS["tiny-gpt"], torch.bfloat16).to(torch.bfloat16)
    before = dict(stage.named_parameters())
    adapt(stage, EVERY)
    after = dict(stage.named_parameters())
    assert {(p.device.type, p.dtype) for p in after.values()} == {("meta", torch.bfloat16)}
    assert all(after[name] is parameter for name, parameter in before.items())
    assert {name for name in after if name not in before} == {name for name in after if is_adapter(name)} != set()
