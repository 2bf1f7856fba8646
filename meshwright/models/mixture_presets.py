"""Published mixtures of experts by name: Mixtral, Qwen3 and DeepSeek, and small ones of their shapes.

DeepSeek's presets are the models as pre-trained on 4,096 tokens. They do not have the rescaled rotary frequencies
(YaRN) of the later long-context stage, and not V3's extra layer for multi-token prediction.
"""

from __future__ import annotations

from meshwright.api.mixture import Balancing, MixtureSpec, Router
from meshwright.api.model_parts import LatentSpec
from meshwright.models.architecture import Architecture


def mixtures() -> list[Architecture]:
    """Return all mixture presets."""
    return [*_mixtrals(), *_qwens(), *_deepseeks(), *_tinies()]


def _mixtral(name: str, layers: int, hidden: int, width: int, heads: int, kv_heads: int, vocab: int) -> Architecture:
    # Each token uses 2 of 8 experts (arXiv 2401.04088). The auxiliary loss has the weight of the published
    # configuration.
    return Architecture(
        name=name,
        layers=layers,
        hidden_size=hidden,
        intermediate_size=width,
        heads=heads,
        kv_heads=kv_heads,
        vocab_size=vocab,
        rope_theta=1_000_000,
        mixture=MixtureSpec(experts=8, per_token=2, intermediate_size=width, auxiliary_weight=0.02),
    )


def _mixtrals() -> list[Architecture]:
    return [
        _mixtral("mixtral-8x7b", 32, 4096, 14336, 32, 8, 32_000),
        _mixtral("mixtral-8x22b", 56, 6144, 16384, 48, 8, 32_000),
    ]


def _qwen(name: str, layers: int, hidden: int, dense: int, heads: int, width: int) -> Architecture:
    # Each token uses 8 of 128 experts, none of them shared (arXiv 2505.09388, section 2).
    return Architecture(
        name=name,
        layers=layers,
        hidden_size=hidden,
        intermediate_size=dense,
        heads=heads,
        kv_heads=4,
        vocab_size=151_936,
        rope_theta=1_000_000,
        norm_epsilon=1e-6,
        head_size=128,
        query_key_norms=True,
        mixture=MixtureSpec(experts=128, per_token=8, intermediate_size=width, auxiliary_weight=0.001),
    )


def _qwens() -> list[Architecture]:
    return [
        _qwen("qwen3-30b-a3b", 48, 2048, 6144, 32, 768),
        _qwen("qwen3-235b-a22b", 94, 4096, 12288, 64, 1536),
    ]


def _second(experts: int, width: int, **more: float) -> MixtureSpec:
    """DeepSeek-V2's mixture (arXiv 2405.04434, section 2.2): two shared experts, weights do not sum to 1."""
    return MixtureSpec(
        experts=experts,
        per_token=6,
        intermediate_size=width,
        shared_intermediate_size=2 * width,
        dense_layers=1,
        renormalize=False,
        auxiliary_weight=0.001,
        **more,
    )


def _third(experts: int, per_token: int, width: int, dense: int, groups: int, groups_per_token: int) -> MixtureSpec:
    """DeepSeek-V3's mixture (arXiv 2412.19437, section 2.1.2): balanced by biases, each token on only a few nodes."""
    return MixtureSpec(
        experts=experts,
        per_token=per_token,
        intermediate_size=width,
        shared_intermediate_size=width,
        dense_layers=dense,
        router=Router.SIGMOID,
        groups=groups,
        groups_per_token=groups_per_token,
        scaling=2.5,
        balancing=Balancing.BIAS,
        auxiliary_weight=0.0001,
    )


def _deepseek(
    name: str, layers: int, hidden: int, dense: int, heads: int, query_rank: int, vocab: int, mixture: MixtureSpec
) -> Architecture:
    return Architecture(
        name=name,
        layers=layers,
        hidden_size=hidden,
        intermediate_size=dense,
        heads=heads,
        kv_heads=heads,
        vocab_size=vocab,
        norm_epsilon=1e-6,
        head_size=128,
        latent=LatentSpec(kv_rank=512, rope_size=64, query_rank=query_rank),
        mixture=mixture,
    )


def _deepseeks() -> list[Architecture]:
    limited = _second(160, 1536, groups=8, groups_per_token=3, scaling=16.0)
    third = _third(256, 8, 2048, 3, 8, 4)
    return [
        _deepseek("deepseek-v2-lite", 27, 2048, 10944, 16, 0, 102_400, _second(64, 1408)),
        _deepseek("deepseek-v2", 60, 5120, 12288, 128, 1536, 102_400, limited),
        _deepseek("deepseek-v3", 61, 7168, 18432, 128, 1536, 129_280, third),
    ]


def _tinies() -> list[Architecture]:
    deepseek = _deepseek("tiny-deepseek", 4, 128, 384, 4, 48, 320, _third(16, 4, 64, 1, 4, 2))
    narrow = {"head_size": 32, "value_size": 32, "latent": LatentSpec(kv_rank=64, rope_size=16, query_rank=48)}
    return [
        _mixtral("tiny-mixture", 4, 128, 256, 4, 2, 320),
        deepseek.model_copy(update=narrow),
    ]
