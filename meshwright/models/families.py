"""The well-known families by name, for planning: GPT, Llama, Mistral, Qwen, DeepSeek, Megatron's GPT sizes.

Numbers are those of the published configurations; the tests hold each to its published parameter count. What the
runtime builds stands in `presets`; every preset is listed here too.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from meshwright.models.presets import PRESETS, UnknownModelError
from meshwright.models.transformer import Experts, LatentAttention, Transformer


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int = 50257, positions: int = 1024) -> Transformer:
    return Transformer(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        intermediate=4 * hidden,
        vocab=vocab,
        gated=False,
        biases=True,
        positions=positions,
        tie_embeddings=True,
    )


def _llama(
    name: str, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int
) -> Transformer:
    return Transformer(
        name=name,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
    )


def _qwen3(*shape: int, name: str, experts: Experts | None = None, tied: bool = False) -> Transformer:
    layers, hidden, intermediate, heads, kv_heads = shape
    return Transformer(
        name=name,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_size=128,
        vocab=151_936,
        query_key_norms=True,
        tie_embeddings=tied,
        experts=experts,
    )


def _deepseek(
    name: str, layers: int, hidden: int, intermediate: int, heads: int, query_rank: int, vocab: int, experts: Experts
) -> Transformer:
    return Transformer(
        name=name,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        head_size=128,
        value_size=128,
        vocab=vocab,
        experts=experts,
        latent=LatentAttention(kv_rank=512, rope_size=64, query_rank=query_rank),
    )


def _dense() -> list[Transformer]:
    megatron = {"vocab": 51_200, "positions": 2048}
    return [
        _gpt("megatron-1.7b", 24, 2304, 24, **megatron),
        _gpt("megatron-3.6b", 30, 3072, 32, **megatron),
        _gpt("megatron-7.5b", 36, 4096, 32, **megatron),
        _gpt("megatron-18.4b", 40, 6144, 48, **megatron),
        _gpt("megatron-39.1b", 48, 8192, 64, **megatron),
        _gpt("megatron-76.1b", 60, 10240, 80, **megatron),
        _gpt("megatron-145.6b", 80, 12288, 96, **megatron),
        _gpt("megatron-310.1b", 96, 16384, 128, **megatron),
        _gpt("megatron-529.6b", 105, 20480, 128, **megatron),
        _gpt("megatron-1008b", 128, 25600, 160, **megatron),
        replace(_llama("mistral-7b", 32, 4096, 14336, 32, 8, 32_000), window=4096),
    ]


def _mixtures() -> list[Transformer]:
    return [
        _qwen3(48, 2048, 6144, 32, 4, name="qwen3-30b-a3b", experts=Experts(128, 8, 768)),
        _qwen3(94, 4096, 12288, 64, 4, name="qwen3-235b-a22b", experts=Experts(128, 8, 1536)),
        _deepseek("deepseek-v2-lite", 27, 2048, 10944, 16, 0, 102_400, Experts(64, 6, 1408, 2816, 1)),
        _deepseek("deepseek-v2", 60, 5120, 12288, 128, 1536, 102_400, Experts(160, 6, 1536, 3072, 1)),
        _deepseek("deepseek-v3", 61, 7168, 18432, 128, 1536, 129_280, Experts(256, 8, 2048, 2048, 3, router_bias=True)),
    ]


def _families() -> dict[str, Transformer]:
    listed = [*_dense(), *_mixtures(), *(Transformer.of(architecture) for architecture in PRESETS.values())]
    return {model.name: model for model in listed}


FAMILIES: Mapping[str, Transformer] = MappingProxyType(_families())


def family(name: str) -> Transformer:
    """The model called `name`.

    Raises:
        UnknownModelError: there is none; the message names the nearest.
    """
    found = FAMILIES.get(name)
    if found is not None:
        return found
    near = difflib.get_close_matches(name.lower(), FAMILIES, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(sorted(FAMILIES))}"
    raise UnknownModelError(f"no model is called `{name}`: {hint}")
