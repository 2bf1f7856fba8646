"""Published architectures by name.

The numbers are those of the models' published configurations; the tests hold each to its published parameter count.
Llama 3.1 and 3.2 are trained here with plain rotary positions: the frequency rescaling of their long-context stage
(arXiv 2407.21783, section 3.4.2) is no part of the architecture that is built.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from meshwright.api.mixture import MixtureSpec
from meshwright.api.spec import ModelSpec
from meshwright.models.architecture import Architecture


class UnknownModelError(ValueError):
    """A preset that does not exist, or a model that is not fully described. The message names field and fix."""


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


def _mixtral(name: str, layers: int, hidden: int, width: int, heads: int, kv_heads: int, vocab: int) -> Architecture:
    # Of 8 experts each token uses 2 (arXiv 2401.04088); the auxiliary loss's weight is the published configuration's.
    mixture = MixtureSpec(experts=8, per_token=2, intermediate_size=width, auxiliary_weight=0.02)
    decoder = _decoder(name, layers, hidden, width, heads, kv_heads, vocab, 1_000_000)
    return decoder.model_copy(update={"mixture": mixture})


def _presets() -> dict[str, Architecture]:
    listed = [
        _decoder("tiny", 4, 128, 384, 4, 2, 320, 10_000),
        _mixtral("tiny-mixture", 4, 128, 256, 4, 2, 320),
        _decoder("tinyllama-1.1b", 22, 2048, 5632, 32, 4, 32_000, 10_000),
        _decoder("llama-2-7b", 32, 4096, 11008, 32, 32, 32_000, 10_000),
        _decoder("llama-2-13b", 40, 5120, 13824, 40, 40, 32_000, 10_000),
        _decoder("llama-2-70b", 80, 8192, 28672, 64, 8, 32_000, 10_000),
        _decoder("llama-3-8b", 32, 4096, 14336, 32, 8, 128_256, 500_000),
        _decoder("llama-3-70b", 80, 8192, 28672, 64, 8, 128_256, 500_000),
        _decoder("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128_256, 500_000),
        _decoder("llama-3.1-70b", 80, 8192, 28672, 64, 8, 128_256, 500_000),
        _decoder("llama-3.1-405b", 126, 16384, 53248, 128, 8, 128_256, 500_000),
        _decoder("llama-3.2-1b", 16, 2048, 8192, 32, 8, 128_256, 500_000).model_copy(update={"tie_embeddings": True}),
        _decoder("llama-3.2-3b", 28, 3072, 8192, 24, 8, 128_256, 500_000).model_copy(update={"tie_embeddings": True}),
        _mixtral("mixtral-8x7b", 32, 4096, 14336, 32, 8, 32_000),
        _mixtral("mixtral-8x22b", 56, 6144, 16384, 48, 8, 32_000),
    ]
    return {architecture.name: architecture for architecture in listed}


PRESETS: Mapping[str, Architecture] = MappingProxyType(_presets())


def resolve(model: ModelSpec) -> Architecture:
    """The architecture that `spec.model` names or describes.

    Raises:
        UnknownModelError: no such preset (the message names the nearest ones), or numbers are missing.
    """
    if model.preset is not None:
        return _preset(model.preset)
    layers, hidden, intermediate = model.layers, model.hidden_size, model.intermediate_size
    heads, vocab = model.heads, model.vocab_size
    if layers is None or hidden is None or intermediate is None or heads is None or vocab is None:
        raise UnknownModelError(
            "`model` must name a `preset`, or give `layers`, `hiddenSize`, `intermediateSize`, `heads` and `vocabSize`"
        )
    return Architecture(
        layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        heads=heads,
        kv_heads=model.kv_heads or heads,
        vocab_size=vocab,
        rope_theta=model.rope_theta or 10_000,
        tie_embeddings=bool(model.tie_embeddings),
        mixture=model.mixture,
    )


def _preset(name: str) -> Architecture:
    found = PRESETS.get(name)
    if found is not None:
        return found
    near = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(f'`{n}`' for n in near)}?" if near else f"known are {', '.join(sorted(PRESETS))}"
    raise UnknownModelError(f"`model.preset` `{name}` is not known: {hint}")
