"""The well-known families by name, for planning: GPT, Llama, Mistral, Qwen, DeepSeek, Megatron's GPT sizes.

Every preset that the runtime builds (`presets`), and what it does not build (`presets.NOT_BUILT` says why). Numbers are
those of the published configurations; the tests hold each to its published parameter count.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from meshwright.models.presets import PRESETS, UnknownModelError
from meshwright.models.transformer import Transformer


def _windowed() -> list[Transformer]:
    return [
        Transformer(
            name="mistral-7b",
            layers=32,
            hidden=4096,
            intermediate=14336,
            heads=32,
            kv_heads=8,
            vocab=32_000,
            window=4096,
        )
    ]


def _families() -> dict[str, Transformer]:
    listed = [*_windowed(), *(Transformer.of(architecture) for architecture in PRESETS.values())]
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
