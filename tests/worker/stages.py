"""Small models with initial weights, without other ranks."""

from __future__ import annotations

import torch

from meshwright.models.architecture import Architecture
from meshwright.models.presets import PRESETS
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.init_weights import init_weights

MODEL = Architecture(layers=3, hidden_size=16, intermediate_size=24, heads=4, kv_heads=2, vocab_size=257)
FAMILIES_BUILT = [PRESETS[name] for name in ("tiny-gpt", "tiny-qwen", "tiny-latent")]
CPU = torch.device("cpu")


def built(model: Architecture = MODEL, stage: int = 0, stages: int = 1, seed: int = 0) -> DecoderStage:
    with torch.device("meta"):
        decoder = DecoderStage(model, torch.float32, stage, stages)
    init_weights(decoder, model, seed, CPU)
    return decoder
