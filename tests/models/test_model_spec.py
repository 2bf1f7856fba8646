"""A model as the text of a configuration, as explicit fields, and as a preset: the same model for all who count."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from meshwright.api.mixture import MixtureSpec
from meshwright.api.model import ModelSpec
from meshwright.api.model_parts import RopeScalingSpec
from meshwright.models.huggingface.config_fields import ConfigError
from meshwright.models.huggingface.reader import architecture_from_json, published_architecture, to_model_spec
from meshwright.models.huggingface.registry import config_from_architecture
from meshwright.models.presets import PRESETS, UnknownModelError, resolve
from tests.models.test_families import GPT2, MIXTRAL, QWEN

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_explicit_fields_are_the_preset(name: str) -> None:
    preset = PRESETS[name]
    fields = to_model_spec(preset)
    assert resolve(fields) == preset.model_copy(update={"name": ""})
    written = fields.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    assert resolve(ModelSpec.model_validate(written)) == resolve(fields)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-7b", "qwen3-30b-a3b", "gpt2", "mixtral-8x7b", "deepseek-v3"])
def test_a_configuration_is_the_preset_that_it_is_written_from(name: str) -> None:
    config = config_from_architecture(PRESETS[name])
    found = resolve(ModelSpec(hugging_face=json.dumps(config)))
    assert (found.parameters, found.active_parameters) == (PRESETS[name].parameters, PRESETS[name].active_parameters)
    assert resolve(to_model_spec(found)) == found


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL, QWEN, GPT2], ids=lambda config: config["model_type"])
def test_worker_and_planner_count_a_configuration_in_the_same_way(config: dict[str, Any]) -> None:
    built = resolve(ModelSpec(hugging_face=json.dumps(config)))
    assert built.parameters == published_architecture(config).parameters


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"model_type": "llama"', "not valid JSON: "),
        ("[" * 30_000, "not valid JSON: "),
        ('["model_type"]', "must be a JSON object, got list"),
        (
            json.dumps({**LLAMA, "model_type": "mamba"}),
            "`model_type` 'mamba' is not supported: use one of gpt2",
        ),
        (json.dumps({**LLAMA, "hidden_size": None}), "`hidden_size` is missing"),
        (
            json.dumps({**LLAMA, "num_hidden_layers": 4096}),
            r"its numbers make `layers: 4096`: input should be less than",
        ),
        (json.dumps({**LLAMA, "num_key_value_heads": 0}), r"its numbers make `kvHeads: 0`: input should be greater"),
        (json.dumps({**LLAMA, "rope_theta": 1.5}), r"its numbers make `ropeTheta: 1.5`: "),
        (json.dumps({**MIXTRAL, "num_experts_per_tok": 0}), r"its numbers make `perToken: 0`: "),
        (json.dumps({**LLAMA, "mlp_bias": True}), "`attention_bias` and `mlp_bias` are not supported"),
    ],
)
def test_what_cannot_be_built_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        architecture_from_json(text)
    with pytest.raises(UnknownModelError, match=f"`model.huggingFace`: {named}"):
        resolve(ModelSpec(hugging_face=text))


@pytest.mark.parametrize(
    ("mixture", "traits", "named"),
    [
        ({"dense_layers": 1, "capacity_factor": 1.25}, {}, "Mixtral: .*`mixture.denseLayers` 0 there, 1 here"),
        ({"balancing": "Bias"}, {"query_key_norms": True}, "Qwen3: `mixture.balancing` Auxiliary there, Bias here"),
        ({"intermediate_size": 32}, {}, "`mixture.intermediateSize` 64 as in `intermediateSize` there, 32 here"),
        ({}, {"attention_biases": True}, "Mixtral: `attentionBiases` false there, true here"),
    ],
)
def test_what_no_published_type_has_is_named(mixture: dict[str, Any], traits: dict[str, bool], named: str) -> None:
    model = to_model_spec(PRESETS["tiny"]).model_copy(update={"intermediate_size": 64, **traits})
    spec = MixtureSpec(**{"experts": 4, "per_token": 2, "intermediate_size": 64, **mixture})
    with pytest.raises(ConfigError, match=named):
        config_from_architecture(resolve(model.model_copy(update={"mixture": spec})))


def test_explicit_fields_have_ranges() -> None:
    wide = PRESETS["tiny"].model_copy(update={"rope_scaling": RopeScalingSpec(factor=2)})
    assert to_model_spec(wide).rope_scaling == RopeScalingSpec(factor=2)
    with pytest.raises(ValidationError, match="vocab_size"):
        to_model_spec(PRESETS["tiny"].model_copy(update={"vocab_size": 1 << 30}))
