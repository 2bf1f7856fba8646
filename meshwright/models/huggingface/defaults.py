"""What a configuration means that leaves a field out: the default of its `model_type` in transformers.

A field that is there and null is another matter: transformers then goes by other fields, and so do the readers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096},
}
"""Where they differ from what most families have in common, which the readers know."""
_RENAMED: Mapping[str, Mapping[str, str]] = {"qwen3_moe": {"num_local_experts": "num_experts"}}
"""What transformers 5 writes under another name than its predecessors."""


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the defaults of its model type, under the names that the readers know."""
    kind = str(config.get("model_type"))
    renamed = {old: config[new] for new, old in _RENAMED.get(kind, {}).items() if new in config}
    return {**_DEFAULTS.get(kind, {}), **renamed, **config}
