"""Reads a Hugging Face `config.json`. Nothing is downloaded and no code of the model runs.

`published_architecture` describes the model as published. `architecture_from_config` accepts only models that the
runtime builds exactly. An inexact model would have other logits than the published one, without any error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from meshwright.api.model import ModelSpec
from meshwright.api.parsing import field_path
from meshwright.models.architecture import Architecture, not_buildable
from meshwright.models.huggingface.config_fields import ConfigError
from meshwright.models.huggingface.model_type import ModelType
from meshwright.models.huggingface.registry import MODEL_TYPES

_REQUIRED = ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "vocab_size")


def published_architecture(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a configuration, even if the runtime does not build it.

    Raises:
        ConfigError: a field is missing, has the wrong type or is out of range, or the model cannot be described
            exactly.
    """
    model_type = model_type_from_config(config)
    try:
        model = model_type.read(model_type.fields(config))
        to_model_spec(model)
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        field = field_path(tuple(to_camel(str(part)) for part in first_error["loc"]))
        reason = first_error["msg"][:1].lower() + first_error["msg"][1:]
        raise ConfigError(f"its numbers make `{field}: {first_error['input']!r}`: {reason}") from None
    return model


def model_type_from_config(config: Mapping[str, Any]) -> ModelType:
    """Return the model type of a configuration.

    Raises:
        ConfigError: it is not supported.
    """
    name = config.get("model_type")
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"`model_type` must be a string, got {str(name)[:80]}")
    model_type = MODEL_TYPES.get(str(name))
    if model_type is None:
        built = ", ".join(each.name for each in MODEL_TYPES.values() if each.built)
        raise ConfigError(f"`model_type` {name!r} is not supported: use one of {built}")
    return model_type


def architecture_from_config(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that the runtime builds from a configuration.

    Modules for multi-token prediction are left out, as in transformers: generation does not use them.

    Raises:
        ConfigError: as `published_architecture`, or the runtime does not build or read such a model.
    """
    if config.get("quantization_config"):
        raise ConfigError("`quantization_config` is not supported: use weights in fp32, bf16 or fp16")
    model = published_architecture(config).model_copy(update={"prediction_layers": 0})
    if reasons := not_buildable(model):
        raise ConfigError("; ".join(reasons))
    return model


def parse_config(text: str) -> dict[str, Any]:
    """Return the fields of a `config.json` from its content.

    Raises:
        ConfigError: it is not a JSON object.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"must be a JSON object, got {type(config).__name__}")
    return config


def architecture_from_json(text: str) -> Architecture:
    """Return `architecture_from_config` of the content of a `config.json`.

    Raises:
        ConfigError: as `architecture_from_config`, or it is not a JSON object.
    """
    return architecture_from_config(parse_config(text))


def read_architecture(path: Path) -> Architecture:
    """Return `architecture_from_config` of a file.

    Raises:
        ConfigError: as `architecture_from_config`, or it is not a JSON object.
        OSError: the file cannot be read.
    """
    return architecture_from_config(read_config(path))


def read_config(path: Path) -> dict[str, Any]:
    """Return `parse_config` of a file.

    Raises:
        ConfigError: it is not a JSON object.
        OSError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"not valid JSON: {error}") from None
    return parse_config(text)


def to_model_spec(model: Architecture) -> ModelSpec:
    """Return the model in the fields of `spec.model`, without fields that have their default.

    Raises:
        ValidationError: a number is out of the field's range.
    """
    fields = {name: getattr(model, name) for name in _REQUIRED}
    # Defaults depend on earlier fields: a value's width on a head's, and that on the hidden width.
    for name in Architecture.model_fields:
        if name in ModelSpec.model_fields and getattr(Architecture(**fields), name) != getattr(model, name):
            fields[name] = getattr(model, name)
    if model.kv_heads == model.heads:
        del fields["kv_heads"]
    return ModelSpec(**fields)
