"""Reads and writes which layers of a published configuration have a sliding window.

Readers return fields of an Architecture, none of them without a window.
"""

from __future__ import annotations

from typing import Any

from meshwright.models.architecture import Architecture
from meshwright.models.huggingface.config_fields import ConfigError, ConfigFields

SLIDING, FULL = "sliding_attention", "full_attention"
"""Kinds of layers in `layer_types`."""


def no_window(_: ConfigFields) -> dict[str, int]:
    """Llama."""
    return {}


def window_of_all_layers(fields: ConfigFields) -> dict[str, int]:
    """Mistral, Mixtral and Phi-3. transformers ignores their `layer_types`, so other layers than all are rejected."""
    found = window_of_listed_layers(fields)
    if found.get("full_attention_every"):
        raise ConfigError("`layer_types` that differ are not supported for this model type: use `ministral`")
    return found


def window_of_listed_layers(fields: ConfigFields) -> dict[str, int]:
    """Ministral: in the layers that `layer_types` lists, or in all."""
    return _read(fields, [SLIDING] * fields.number("num_hidden_layers"))


def window_if_switched_on(fields: ConfigFields) -> dict[str, int]:
    """Qwen3's mixtures: in all layers."""
    return window_of_all_layers(fields) if _is_on(fields) else {}


def window_of_later_layers(fields: ConfigFields) -> dict[str, int]:
    """Qwen2 and Qwen3: in layers from `max_window_layers` on, or in those that `layer_types` lists."""
    layers, first = fields.number("num_hidden_layers"), fields.number("max_window_layers", 28)
    kinds = [SLIDING if layer >= first else FULL for layer in range(layers)]
    return _read(fields, kinds) if _is_on(fields) else {}


def window_of_every_other_layer(fields: ConfigFields) -> dict[str, int]:
    """Qwen2's mixtures: in every other layer before `max_window_layers`, or in those that `layer_types` lists."""
    layers, last = fields.number("num_hidden_layers"), fields.number("max_window_layers", 28)
    kinds = [SLIDING if layer < last and layer % 2 == 0 else FULL for layer in range(layers)]
    return _read(fields, kinds) if _is_on(fields) else {}


def window_of_pattern(fields: ConfigFields) -> dict[str, int]:
    """Gemma 3: in all layers but every sixth, or another number, or in those that `layer_types` lists."""
    layers, every = fields.number("num_hidden_layers"), fields.number("sliding_window_pattern", 6)
    return _read(fields, [SLIDING if every and (layer + 1) % every else FULL for layer in range(layers)])


def _is_on(fields: ConfigFields) -> bool:
    return fields.flag("use_sliding_window", False)


def _read(fields: ConfigFields, default: list[str]) -> dict[str, int]:
    """Read the window, and which layers have it: those of `default` if `layer_types` does not list them.

    Raises:
        ConfigError: they are neither all nor all but the last of every so many.
    """
    window, kinds = fields.number("sliding_window", 0), fields.listed("layer_types") or default
    if not window or SLIDING not in kinds:
        return {}
    every = kinds.index(FULL) + 1 if FULL in kinds else 0
    regular = [FULL if every and (layer + 1) % every == 0 else SLIDING for layer in range(len(default))]
    if kinds != regular:
        raise ConfigError(
            f"a sliding window (`sliding_window: {window}`) in these layers (`max_window_layers`, `layer_types`) is "
            "not supported, only in all, or in all but the last of every so many: set `use_sliding_window` to false, "
            "or `sliding_window` to null, if no sequence is longer"
        )
    return {"sliding_window": window, "full_attention_every": every}


def switched_window(model: Architecture) -> dict[str, Any]:
    """The fields of Qwen2 and Qwen3 for a window. Empty without one: their defaults apply."""
    if not model.sliding_window:
        return {}
    return {"use_sliding_window": True, "sliding_window": model.sliding_window, "max_window_layers": 0}


def layer_types(model: Architecture) -> dict[str, Any]:
    """The field that lists the layers with a window. Empty if no layer differs."""
    if not model.sliding_window or not model.full_attention_every:
        return {}
    return {"layer_types": [SLIDING if model.window_of(layer) else FULL for layer in range(model.layers)]}
