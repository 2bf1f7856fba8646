"""Which token is taken: by temperature, and one that is no temperature."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.models.presets import PRESETS
from meshwright_worker.inference.model import CachedModel
from meshwright_worker.inference.sampling import sample
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.init_weights import init_weights

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def model() -> CachedModel:
    architecture = PRESETS["tiny"]
    with torch.device("meta"):
        stage = DecoderStage(architecture, torch.float32)
    init_weights(stage, architecture, 0, torch.device("cpu"))
    return CachedModel(stage, architecture, 16)


@pytest.mark.parametrize("temperature", [1e-6, 1e-45, 1e-60, math.ulp(0.0)])
def test_a_small_temperature_takes_the_likeliest_token(model: CachedModel, temperature: float) -> None:
    model.clear()
    likeliest = sample(model, PROMPT, 6, 0, 1)
    model.clear()
    assert sample(model, PROMPT, 6, temperature, 1) == likeliest


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf])
def test_what_is_not_a_temperature_is_rejected(model: CachedModel, temperature: float) -> None:
    with pytest.raises(ValueError, match=f"`--temperature {temperature}` must be 0"):
        sample(model, PROMPT, 6, temperature, 1)
