"""A model from its Hugging Face `config.json`: the file's numbers, nothing downloaded and nothing executed.

Known are decoders of the families GPT-2, Llama, Mistral, Mixtral, Qwen2, Qwen3 (dense and mixtures) and DeepSeek-V2
and V3; another `model_type` is refused rather than counted wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.api.mixture import Balancing, MixtureSpec
from meshwright.api.model_parts import LatentSpec
from meshwright.models.architecture import Architecture
from meshwright.models.huggingface.defaults import with_defaults

LLAMA_LIKE = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
DEEPSEEK = frozenset({"deepseek_v2", "deepseek_v3"})


class ConfigError(ValueError):
    """A configuration that cannot be read as a decoder. The message names the field and what is wrong."""


def read_config(path: Path) -> Architecture:
    """The model that a `config.json` describes.

    Raises:
        ConfigError: it is no JSON object, or a field is missing, of a wrong type, or of an unknown family.
        OSError: the file cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path.name} must hold a JSON object, not {type(found).__name__}")
    return from_config(found)


def model_type_of(config: Mapping[str, Any]) -> str | None:
    """The model type; None when it is left out.

    Raises:
        ConfigError: it is no text.
    """
    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise ConfigError(f"`model_type` must be a text, not {str(kind)[:80]}")
    return kind


def from_config(config: Mapping[str, Any]) -> Architecture:
    """The model that a configuration describes.

    Raises:
        ConfigError: a field is missing, of a wrong type, or of an unknown family.
    """
    kind = model_type_of(config)
    fields = ConfigFields(with_defaults(config))
    try:
        if kind == "gpt2":
            return _gpt2(fields)
        if kind in LLAMA_LIKE:
            return _llama(fields, str(kind))
        if kind in DEEPSEEK:
            return _deepseek(fields)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"the configuration contradicts itself: {error}") from None
    known = ", ".join(sorted({"gpt2", *LLAMA_LIKE, *DEEPSEEK}))
    raise ConfigError(f"`model_type` {kind!r} is not known: known are {known}")


class ConfigFields:
    """Typed access that names what is wrong."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number; None in the file counts as left out."""
        value = self._config.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"`{name}` is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"`{name}` must be a whole number, not {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"`{name}` must be true or false, not {value!r}")
        return value

    def real(self, name: str, default: float) -> float:
        """A number."""
        value = self._config.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"`{name}` must be a number, not {value!r}")
        return float(value)

    def text(self, name: str) -> str:
        """A text; empty when left out."""
        return str(self._config.get(name) or "")

    def listed(self, name: str) -> list[Any]:
        """A list; empty when left out."""
        value = self._config.get(name)
        if value is not None and not isinstance(value, list):
            raise ConfigError(f"`{name}` must be a list, not {value!r}")
        return value or []


def _gpt2(fields: ConfigFields) -> Architecture:
    hidden = fields.number("n_embd")
    return Architecture(
        layers=fields.number("n_layer"),
        hidden_size=hidden,
        heads=fields.number("n_head"),
        kv_heads=fields.number("n_head"),
        intermediate_size=fields.number("n_inner", 4 * hidden),
        vocab_size=fields.number("vocab_size"),
        gated=False,
        biases=True,
        positions=fields.number("n_positions", 1024),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )


def _llama(fields: ConfigFields, kind: str) -> Architecture:
    heads = fields.number("num_attention_heads")
    slides = kind == "mistral" or fields.flag("use_sliding_window", False)
    return Architecture(
        layers=fields.number("num_hidden_layers"),
        hidden_size=fields.number("hidden_size"),
        heads=heads,
        kv_heads=fields.number("num_key_value_heads", heads),
        head_size=fields.number("head_dim", 0) or fields.number("hidden_size") // max(1, heads),
        intermediate_size=fields.number("intermediate_size"),
        vocab_size=fields.number("vocab_size"),
        attention_biases=kind in ("qwen2", "qwen2_moe"),
        query_key_norms=kind in ("qwen3", "qwen3_moe"),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        sliding_window=fields.number("sliding_window", 0) if slides else 0,
        mixture=_mixture(fields, kind),
        shared_gate=kind == "qwen2_moe",
    )


def _mixture(fields: ConfigFields, kind: str) -> MixtureSpec | None:
    if kind == "mixtral":
        count, per_token = fields.number("num_local_experts", 8), fields.number("num_experts_per_tok", 2)
        return MixtureSpec(experts=count, per_token=per_token, intermediate_size=fields.number("intermediate_size"))
    if kind not in ("qwen2_moe", "qwen3_moe"):
        return None
    if fields.listed("mlp_only_layers"):
        raise ConfigError("`mlp_only_layers` must be empty: single dense layers between mixtures are not counted")
    return MixtureSpec(
        experts=fields.number("num_experts"),
        per_token=fields.number("num_experts_per_tok"),
        intermediate_size=fields.number("moe_intermediate_size"),
        shared_intermediate_size=fields.number("shared_expert_intermediate_size", 0),
        every=fields.number("decoder_sparse_step", 1),
    )


def _deepseek(fields: ConfigFields) -> Architecture:
    width = fields.number("moe_intermediate_size", 0)
    routed = fields.number("n_routed_experts", 0)
    mixture = None
    if routed:
        mixture = MixtureSpec(
            experts=routed,
            per_token=fields.number("num_experts_per_tok"),
            intermediate_size=width,
            shared_intermediate_size=width * fields.number("n_shared_experts", 0),
            dense_layers=fields.number("first_k_dense_replace", 0),
            balancing=Balancing.BIAS if fields.text("topk_method") == "noaux_tc" else Balancing.AUXILIARY,
            every=fields.number("moe_layer_freq", 1),
        )
    return Architecture(
        layers=fields.number("num_hidden_layers"),
        hidden_size=fields.number("hidden_size"),
        heads=fields.number("num_attention_heads"),
        kv_heads=fields.number("num_attention_heads"),
        head_size=fields.number("qk_nope_head_dim"),
        value_size=fields.number("v_head_dim"),
        intermediate_size=fields.number("intermediate_size"),
        vocab_size=fields.number("vocab_size"),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        mixture=mixture,
        latent=LatentSpec(
            kv_rank=fields.number("kv_lora_rank"),
            rope_size=fields.number("qk_rope_head_dim"),
            query_rank=fields.number("q_lora_rank", 0),
        ),
        prediction_layers=fields.number("num_nextn_predict_layers", 0),
    )
