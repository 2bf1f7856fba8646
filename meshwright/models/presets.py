"""Published architectures by name.

The sizes are those of the models' published configurations. Tests compare each with its published parameter count.
Llama 3.1 and 3.2 have the rescaled rotary frequencies of their long-context stage. GPT-3's sizes are those of its table
2.1 (arXiv 2005.14165), except that the 1.3B model has 16 heads and the 13B model a width of 5120, because the table's
numbers contradict each other there.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from types import MappingProxyType

from meshwright.api.model import ModelSpec
from meshwright.api.model_parts import Activation, LatentSpec, Norm, RopeScaling, RopeScalingSpec
from meshwright.models.architecture import Architecture
from meshwright.models.huggingface.config_fields import ConfigError
from meshwright.models.huggingface.reader import architecture_from_json
from meshwright.models.mixture_presets import mixtures


class UnknownModelError(ValueError):
    """A preset does not exist, or a model's description is incomplete or wrong. The message names the field."""


def _decoder(
    name: str, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, theta: float
) -> Architecture:
    return Architecture(
        name=name,
        layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        vocab_size=vocab,
        rope_theta=theta,
    )


def _gpt(name: str, layers: int, hidden: int, heads: int, positions: int = 1024, vocab: int = 50_257) -> Architecture:
    return Architecture(
        name=name,
        layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        heads=heads,
        kv_heads=heads,
        vocab_size=vocab,
        tie_embeddings=True,
        gated=False,
        activation=Activation.GELU_TANH,
        norm=Norm.LAYER_NORM,
        biases=True,
        positions=positions,
    )


def _tied(model: Architecture) -> Architecture:
    return model.model_copy(update={"tie_embeddings": True})


def _long(model: Architecture, factor: float) -> Architecture:
    return model.model_copy(update={"rope_scaling": RopeScalingSpec(factor=factor)})


def _gpts() -> list[Architecture]:
    return [
        _gpt("gpt2", 12, 768, 12),
        _gpt("gpt2-medium", 24, 1024, 16),
        _gpt("gpt2-large", 36, 1280, 20),
        _gpt("gpt2-xl", 48, 1600, 25),
        _gpt("gpt3-125m", 12, 768, 12, positions=2048),
        _gpt("gpt3-350m", 24, 1024, 16, positions=2048),
        _gpt("gpt3-760m", 24, 1536, 16, positions=2048),
        _gpt("gpt3-1.3b", 24, 2048, 16, positions=2048),
        _gpt("gpt3-2.7b", 32, 2560, 32, positions=2048),
        _gpt("gpt3-6.7b", 32, 4096, 32, positions=2048),
        _gpt("gpt3-13b", 40, 5120, 40, positions=2048),
        _gpt("gpt3-175b", 96, 12288, 96, positions=2048),
    ]


def _megatrons() -> list[Architecture]:
    """The models of table 1 in arXiv 2104.04473."""
    sizes = {
        "1.7b": (24, 2304, 24),
        "3.6b": (30, 3072, 32),
        "7.5b": (36, 4096, 32),
        "18.4b": (40, 6144, 48),
        "39.1b": (48, 8192, 64),
        "76.1b": (60, 10240, 80),
        "145.6b": (80, 12288, 96),
        "310.1b": (96, 16384, 128),
        "529.6b": (105, 20480, 128),
        "1008b": (128, 25600, 160),
    }
    return [_gpt(f"megatron-{name}", *shape, positions=2048, vocab=51_200) for name, shape in sizes.items()]


def _llamas() -> list[Architecture]:
    third = (128_256, 500_000)
    return [
        _decoder("tinyllama-1.1b", 22, 2048, 5632, 32, 4, 32_000, 10_000),
        _decoder("llama-1-7b", 32, 4096, 11008, 32, 32, 32_000, 10_000).model_copy(update={"norm_epsilon": 1e-6}),
        _decoder("llama-1-13b", 40, 5120, 13824, 40, 40, 32_000, 10_000).model_copy(update={"norm_epsilon": 1e-6}),
        _decoder("llama-1-33b", 60, 6656, 17920, 52, 52, 32_000, 10_000).model_copy(update={"norm_epsilon": 1e-6}),
        _decoder("llama-1-65b", 80, 8192, 22016, 64, 64, 32_000, 10_000),
        _decoder("llama-2-7b", 32, 4096, 11008, 32, 32, 32_000, 10_000),
        _decoder("llama-2-13b", 40, 5120, 13824, 40, 40, 32_000, 10_000),
        _decoder("llama-2-70b", 80, 8192, 28672, 64, 8, 32_000, 10_000),
        _decoder("llama-3-8b", 32, 4096, 14336, 32, 8, *third),
        _decoder("llama-3-70b", 80, 8192, 28672, 64, 8, *third),
        _long(_decoder("llama-3.1-8b", 32, 4096, 14336, 32, 8, *third), 8),
        _long(_decoder("llama-3.1-70b", 80, 8192, 28672, 64, 8, *third), 8),
        _long(_decoder("llama-3.1-405b", 126, 16384, 53248, 128, 8, *third), 8),
        _tied(_long(_decoder("llama-3.2-1b", 16, 2048, 8192, 32, 8, *third), 32)),
        _tied(_long(_decoder("llama-3.2-3b", 28, 3072, 8192, 24, 8, *third), 32)),
    ]


def _qwens() -> list[Architecture]:
    second = {"attention_biases": True, "norm_epsilon": 1e-6}
    third = {"query_key_norms": True, "norm_epsilon": 1e-6, "head_size": 128, "value_size": 128}
    return [
        _tied(_decoder("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 151_936, 1_000_000)).model_copy(update=second),
        _decoder("qwen2.5-7b", 28, 3584, 18944, 28, 4, 152_064, 1_000_000).model_copy(update=second),
        _decoder("qwen2.5-72b", 80, 8192, 29568, 64, 8, 152_064, 1_000_000).model_copy(
            update={**second, "norm_epsilon": 1e-5}
        ),
        _decoder("qwen3-8b", 36, 4096, 12288, 32, 8, 151_936, 1_000_000).model_copy(update=third),
        _decoder("qwen3-32b", 64, 5120, 25600, 64, 8, 151_936, 1_000_000).model_copy(update=third),
    ]


def _tinies() -> list[Architecture]:
    tiny = _decoder("tiny", 4, 128, 384, 4, 2, 320, 10_000)
    latent = {"latent": LatentSpec(kv_rank=64, rope_size=16, query_rank=48), "kv_heads": 4}
    gpt = _gpt("tiny-gpt", 4, 128, 4, positions=1024)
    return [
        tiny,
        gpt.model_copy(update={"vocab_size": 320}),
        tiny.model_copy(update={"name": "tiny-qwen", "query_key_norms": True, "attention_biases": True}),
        tiny.model_copy(update={"name": "tiny-latent", **latent}),
    ]


def _mistral() -> Architecture:
    return _decoder("mistral-7b", 32, 4096, 14336, 32, 8, 32_000, 10_000).model_copy(update={"sliding_window": 4096})


def _gemmas() -> list[Architecture]:
    """The decoders of text of arXiv 2503.19786. The larger ones rescale positions of layers that attend to all keys."""
    sizes = {
        "270m": (18, 640, 2048, 4, 1, 512),
        "1b": (26, 1152, 6912, 4, 1, 512),
        "4b": (34, 2560, 10_240, 8, 4, 1024),
        "12b": (48, 3840, 15_360, 16, 8, 1024),
    }
    return [_gemma(f"gemma-3-{name}", *numbers) for name, numbers in sizes.items()]


def _gemma(
    name: str, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, window: int
) -> Architecture:
    larger = window > 512
    model = _decoder(name, layers, hidden, intermediate, heads, kv_heads, 262_208 if larger else 262_144, 1_000_000)
    return _tied(model).model_copy(
        update={
            "head_size": 256,
            "value_size": 256,
            "norm_epsilon": 1e-6,
            "activation": Activation.GELU_TANH,
            "query_key_norms": True,
            "output_norms": True,
            "embedding_factor": math.sqrt(hidden),
            "sliding_window": window,
            "full_attention_every": 6,
            "window_rope_theta": 10_000.0,
            "rope_scaling": RopeScalingSpec(kind=RopeScaling.LINEAR, factor=8) if larger else None,
        }
    )


def _published() -> dict[str, Architecture]:
    listed = [*_tinies(), *_gpts(), *_megatrons(), *_llamas(), _mistral(), *_qwens(), *_gemmas(), *mixtures()]
    return {architecture.name: architecture for architecture in listed}


PRESETS: Mapping[str, Architecture] = MappingProxyType(_published())
"""The published models by name: the values of `model.preset`."""


def published(name: str) -> Architecture:
    """Return the model `name`.

    Raises:
        UnknownModelError: there is no such model. The message names the most similar ones.
    """
    if name not in PRESETS:
        raise UnknownModelError(f"unknown model `{name}`: {_nearest(name, PRESETS)}")
    return PRESETS[name]


def resolve(model: ModelSpec) -> Architecture:
    """Return the architecture that `spec.model` names or describes.

    Raises:
        UnknownModelError: the preset does not exist (the message names the most similar ones), the configuration cannot
            be read or built, or numbers are missing.
    """
    if model.preset is not None:
        return _preset(model.preset)
    if model.hugging_face is not None:
        try:
            return architecture_from_json(model.hugging_face)
        except ConfigError as error:
            raise UnknownModelError(f"`model.huggingFace`: {error}") from None
    layers, hidden, intermediate = model.layers, model.hidden_size, model.intermediate_size
    heads, vocab = model.heads, model.vocab_size
    if layers is None or hidden is None or intermediate is None or heads is None or vocab is None:
        raise UnknownModelError(
            "`model` must have a `preset`, a `huggingFace` configuration, or all of `layers`, `hiddenSize`, "
            "`intermediateSize`, `heads` and `vocabSize`"
        )
    numbers = model.model_dump(exclude_none=True, exclude={"preset", "hugging_face"})
    return Architecture(**{"kv_heads": heads, **numbers})


def _preset(name: str) -> Architecture:
    if name in PRESETS:
        return PRESETS[name]
    raise UnknownModelError(f"unknown `model.preset` `{name}`: {_nearest(name, PRESETS)}")


def _nearest(name: str, known: Mapping[str, Architecture]) -> str:
    """Suggest names for one that is unknown."""
    close_matches = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    if close_matches:
        return f"did you mean {' or '.join(f'`{match}`' for match in close_matches)}?"
    return f"use one of {', '.join(sorted(known))}"
