"""A Hugging Face configuration as `spec.model` holds it, and a model as the explicit fields of `spec.model`. Pure."""

from __future__ import annotations

import json

from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from meshwright.api.model import ModelSpec
from meshwright.api.parsing import field_path
from meshwright.models.architecture import Architecture
from meshwright.models.huggingface.planner_config import ConfigError
from meshwright.models.huggingface.runtime_config import architecture_from_config

_REQUIRED = ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "vocab_size")


def architecture_from_json(text: str) -> Architecture:
    """The architecture that the text of a `config.json` describes.

    Raises:
        ConfigError: it is no JSON object, the runtime does not build such a model, or a number is out of range.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"must be a JSON object, not {type(config).__name__}")
    try:
        model = architecture_from_config(config)
        to_model_spec(model)
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        name = field_path(tuple(to_camel(str(part)) for part in first_error["loc"]))
        reason = first_error["msg"][:1].lower() + first_error["msg"][1:]
        raise ConfigError(f"its numbers make `{name}: {first_error['input']!r}`: {reason}") from None
    return model


def to_model_spec(model: Architecture) -> ModelSpec:
    """The model in the fields of `spec.model`; those that say what would be taken anyway are left out.

    Raises:
        ValidationError: a number is out of the range of its field.
    """
    fields = {name: getattr(model, name) for name in _REQUIRED}
    # Defaults depend on fields before them: a value's width on a head's, that on the hidden width.
    for name in Architecture.model_fields:
        if name in ModelSpec.model_fields and getattr(Architecture(**fields), name) != getattr(model, name):
            fields[name] = getattr(model, name)
    if model.kv_heads == model.heads:
        del fields["kv_heads"]
    return ModelSpec(**fields)
