"""The well-known families by name, for planning: GPT, Llama, Mistral, Qwen, DeepSeek, Megatron's GPT sizes.

Every preset that the runtime builds (`presets`), and what it does not build (`presets.NOT_BUILT` says why). Numbers are
those of the published configurations; the tests hold each to its published parameter count.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from meshwright.models.architecture import Architecture
from meshwright.models.presets import PRESETS, UnknownModelError


def _windowed() -> list[Architecture]:
    return [
        Architecture(
            name="mistral-7b",
            layers=32,
            hidden_size=4096,
            intermediate_size=14336,
            heads=32,
            kv_heads=8,
            vocab_size=32_000,
            sliding_window=4096,
        )
    ]


def _families() -> dict[str, Architecture]:
    listed = [*_windowed(), *PRESETS.values()]
    return {model.name: model for model in listed}


FAMILIES: Mapping[str, Architecture] = MappingProxyType(_families())


def family(name: str) -> Architecture:
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
