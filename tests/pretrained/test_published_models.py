"""Published weights in the runtime's modules give the logits of the published model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.mixture import Balancing
from meshwright.api.model_parts import RopeScalingSpec
from meshwright.models.huggingface.config_fields import ConfigError
from meshwright.models.huggingface.llama import LLAMA as LLAMA_TYPE
from meshwright.models.huggingface.model_type import ModelType
from meshwright.models.huggingface.reader import architecture_from_config
from meshwright.models.huggingface.registry import config_from_architecture
from meshwright.models.presets import PRESETS
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.init_weights import materialize
from meshwright_worker.parallel.shards import ParameterShard
from meshwright_worker.pretrained.load import check_pretrained, load_pretrained
from meshwright_worker.pretrained.tensor_files import INDEX, SINGLE, TensorFiles
from meshwright_worker.rank.failures import PretrainedError
from tests.pretrained import reference
from tests.pretrained.published import (
    DEEPSEEK,
    DEEPSEEK_LITE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_YARN,
    GEMMA3,
    GEMMA3_LINEAR,
    GPT2,
    LLAMA,
    MINISTRAL,
    MISTRAL,
    MIXTRAL,
    MIXTRAL_WINDOW,
    PHI3,
    QWEN2,
    QWEN2_WINDOW,
    QWEN3,
    QWEN3_MOE,
    QWEN3_MOE_WINDOW,
    QWEN3_PATTERN,
    QWEN3_WINDOW,
    QWEN3_YARN,
    random_weights,
    write_model,
)

Forward = Callable[[dict[str, torch.Tensor], dict[str, Any], torch.Tensor], torch.Tensor]
MODELS: dict[str, tuple[dict[str, Any], Forward]] = {
    "llama": (LLAMA, reference.llama),
    "mixtral": (MIXTRAL, reference.llama),
    "qwen2": (QWEN2, reference.llama),
    "qwen3": (QWEN3, reference.llama),
    "gpt2": (GPT2, reference.gpt2),
    "deepseek": (DEEPSEEK, reference.deepseek),
    "deepseek-lite": (DEEPSEEK_LITE, reference.deepseek),
    "deepseek-v2": (DEEPSEEK_V2, reference.deepseek),
    "deepseek-v3": (DEEPSEEK_V3, reference.deepseek),
    "qwen3-moe": (QWEN3_MOE, reference.llama),
    "mistral": (MISTRAL, reference.llama),
    "ministral": (MINISTRAL, reference.llama),
    "qwen3 with windows in some layers": (QWEN3_PATTERN, reference.llama),
    "phi3": (PHI3, reference.llama),
    "mixtral with a window": (MIXTRAL_WINDOW, reference.llama),
    "qwen2 with a window": (QWEN2_WINDOW, reference.llama),
    "qwen3 with a window": (QWEN3_WINDOW, reference.llama),
    "qwen3-moe with a window": (QWEN3_MOE_WINDOW, reference.llama),
    "qwen3 with YaRN": (QWEN3_YARN, reference.llama),
    "deepseek-v3 with YaRN": (DEEPSEEK_YARN, reference.deepseek),
    "gemma3": (GEMMA3, reference.gemma),
    "gemma3 with linear scaling": (GEMMA3_LINEAR, reference.gemma),
}

MIXED_PRESETS = [name for name, model in PRESETS.items() if model.mixture is not None]


def loaded(directory: Path, config: dict[str, Any]) -> DecoderStage:
    model = architecture_from_config(config)
    with torch.device("meta"):
        stage = DecoderStage(model, torch.float64).double()
    materialize(stage, torch.device("cpu"))
    shards = [ParameterShard(n, p, p.detach(), None, True, False, False) for n, p in stage.named_parameters()]
    load_pretrained(shards, model, directory, dict(stage.named_buffers()))
    return stage


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("files", [1, 3])
def test_logits_are_those_of_the_published_model(tmp_path: Path, name: str, files: int) -> None:
    config, forward = MODELS[name]
    weights = random_weights(config)
    stage = loaded(write_model(tmp_path / "model", config, weights, files), config)
    tokens = torch.randint(0, 260, (2, 20), generator=torch.Generator().manual_seed(1))
    want = forward({name: tensor.double() for name, tensor in weights.items()}, config, tokens)
    with torch.no_grad():
        torch.testing.assert_close(stage(tokens), want, rtol=1e-5, atol=1e-5)


def test_reading_a_bf16_file_keeps_every_bit(tmp_path: Path) -> None:
    weights = random_weights(LLAMA, dtype=torch.bfloat16)
    stage = loaded(write_model(tmp_path / "model", LLAMA, weights), LLAMA)
    assert torch.equal(stage.output.weight.bfloat16(), weights["lm_head.weight"])


def test_transformers_computes_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    weights = random_weights(LLAMA)
    directory = write_model(tmp_path / "model", LLAMA, weights)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).double()
    tokens = torch.randint(0, 260, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(loaded(directory, LLAMA)(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [config for config, _ in MODELS.values()], ids=MODELS)
def test_a_configuration_survives_both_directions(config: dict[str, Any]) -> None:
    model = architecture_from_config(config)
    assert architecture_from_config(config_from_architecture(model)) == model


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "mistral-7b",
        "llama-3.1-8b",
        "llama-3.2-1b",
        "qwen2.5-0.5b",
        "qwen3-8b",
        "gemma-3-1b",
        "gemma-3-12b",
        "tiny-latent",
        *MIXED_PRESETS,
    ],
)
def test_a_preset_survives_both_directions(name: str) -> None:
    model = PRESETS[name].model_copy(update={"name": ""})
    assert architecture_from_config(config_from_architecture(model)) == model


def test_gemma_with_one_rotary_base_survives_both_directions() -> None:
    model = PRESETS["gemma-3-1b"].model_copy(update={"name": "", "window_rope_theta": 0.0})
    assert architecture_from_config(config_from_architecture(model)) == model


@pytest.mark.parametrize(
    ("change", "written_as", "named"),
    [
        ({}, LLAMA_TYPE, "`model_type` 'llama' has no `outputNorms`"),
        ({"output_norms": False}, None, "`model_type` 'qwen3' has no `outputNorms`, `embeddingFactor`"),
        ({"embedding_factor": 1.0}, None, "Gemma 3 has `queryKeyNorms`"),
        ({"query_key_norms": False}, None, "Gemma 3 has `queryKeyNorms`"),
        ({"rope_scaling": RopeScalingSpec(factor=2)}, None, "another `ropeScaling.kind` than `Linear`"),
    ],
)
def test_what_only_gemma_has_is_not_written_as_another_type(
    change: dict[str, Any], written_as: ModelType | None, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        config_from_architecture(PRESETS["gemma-3-1b"].model_copy(update=change), model_type=written_as)


@pytest.mark.parametrize("name", ["gpt2", "tiny-latent"])
def test_a_window_that_no_type_has_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"`model_type` '.*', which has this shape otherwise, has no `slidingWindow`"):
        config_from_architecture(PRESETS[name].model_copy(update={"sliding_window": 8}))


@pytest.mark.parametrize(
    ("name", "length", "told"),
    [
        ("llama-3.1-8b", 2048, 8 * 8192),
        ("llama-3.1-8b", 131072, 131072),
        ("llama-2-7b", 2048, 2048),
        ("llama-2-7b", 0, None),
        ("gpt2", 512, None),
    ],
)
def test_a_configuration_has_the_longest_sequence(name: str, length: int, told: int | None) -> None:
    assert config_from_architecture(PRESETS[name], length).get("max_position_embeddings") == told


@pytest.mark.parametrize("length", [0, 128, 100_000])
def test_with_yarn_the_length_tells_transformers_its_factor(length: int) -> None:
    told = config_from_architecture(architecture_from_config(QWEN3_YARN), length)
    assert told["max_position_embeddings"] / told["rope_scaling"]["original_max_position_embeddings"] == 4.0


SCALED = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("rotary", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": SCALED}, 5e5),
        ({"rope_parameters": {**SCALED, "rope_theta": 5e5}}, 5e5),
        ({"rope_theta": 5e5, "rope_parameters": SCALED}, 5e5),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({}, 1e4),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, 1e6),
    ],
)
def test_the_rotary_base_is_read_from_any_field(rotary: dict[str, Any], theta: float) -> None:
    plain = {name: value for name, value in LLAMA.items() if not name.startswith("rope_")}
    assert architecture_from_config({**plain, **rotary}).rope_theta == theta


def test_what_a_configuration_leaves_out_is_what_its_type_says() -> None:
    shape = {name: LLAMA[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
    shape |= {"hidden_size": 256, "num_attention_heads": 16}
    mistral = {**shape, "model_type": "mistral", "sliding_window": None}
    assert architecture_from_config(mistral).kv_heads == 8
    assert architecture_from_config({**mistral, "num_key_value_heads": None}).kv_heads == 16
    assert architecture_from_config({**shape, "model_type": "mistral"}).sliding_window == 4096
    mixtral = architecture_from_config({**shape, "model_type": "mixtral"})
    assert (mixtral.kv_heads, mixtral.norm_epsilon) == (8, 1e-5)
    assert architecture_from_config({**shape, "model_type": "qwen3", "num_key_value_heads": 4}).head_size == 128
    newer = {**shape, "model_type": "qwen3_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    found = architecture_from_config({**newer, "num_local_experts": 6})
    assert (found.kv_heads, found.mixture and found.mixture.experts) == (4, 6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "`model_type` 'mamba'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "`rope_scaling` of type 'dynamic'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0}}, "`rope_scaling.mscale`"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": False}}, "`rope_scaling.truncate: false`"),
        ({"attention_bias": True}, "`attention_bias`"),
        ({"hidden_act": "relu6"}, "activation 'relu6'"),
        ({"rms_norm_eps": "tiny"}, "`rms_norm_eps` must be a number"),
    ],
)
def test_what_the_runtime_does_not_support_is_rejected(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        architecture_from_config({**LLAMA, **change})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0}}, "`rope_scaling` with another `mscale`"),
        ({"quantization_config": {"quant_method": "fp8"}}, "`quantization_config`"),
        ({"topk_method": "greedy"}, "`topk_method` 'greedy'"),
        ({"scoring_func": "softmax"}, "`scoring_func` 'softmax'"),
        ({"moe_layer_freq": 2}, "`moe_layer_freq` must be 1"),
        ({"rope_interleave": False}, "`rope_interleave: false`"),
    ],
)
def test_a_deepseek_that_the_runtime_does_not_support_is_rejected(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        architecture_from_config({**DEEPSEEK_V3, **change})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("deepseek-v3", {"balancing": Balancing.AUXILIARY}),
        ("deepseek-v3", {"shared_intermediate_size": 100}),
        ("deepseek-v2", {"renormalize": True}),
        ("deepseek-v2", {"capacity_factor": 1.0}),
        ("mixtral-8x7b", {"balancing": Balancing.BIAS}),
        ("qwen3-30b-a3b", {"shared_intermediate_size": 768}),
    ],
)
def test_a_mixture_that_no_published_type_has_is_not_written(name: str, change: dict[str, Any]) -> None:
    mixture = PRESETS[name].mixture
    assert mixture is not None
    with pytest.raises(ConfigError, match="no Hugging Face model type"):
        config_from_architecture(PRESETS[name].model_copy(update={"mixture": mixture.model_copy(update=change)}))


def test_weights_chosen_by_biases_need_a_model_with_biases(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", DEEPSEEK_V3, random_weights(DEEPSEEK_V3))
    model = architecture_from_config(DEEPSEEK_V3)
    assert model.mixture is not None
    without = model.mixture.model_copy(update={"balancing": Balancing.AUXILIARY})
    with pytest.raises(PretrainedError, match=r"`mixture.balancing` Bias there"):
        load_pretrained([], model.model_copy(update={"mixture": without}), directory)


def test_weights_of_another_model_are_rejected(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", LLAMA, random_weights(LLAMA))
    with pytest.raises(PretrainedError, match=r"`layers` 3 there, 5 in `model`"):
        loaded(directory, {**LLAMA, "num_hidden_layers": 5})


@pytest.mark.parametrize("indexed", [True, False])
def test_weights_with_deeply_nested_json_are_rejected(tmp_path: Path, indexed: bool) -> None:
    deep = b'{"a":' * 100_000
    if indexed:
        (tmp_path / INDEX).write_bytes(deep)
    else:
        (tmp_path / SINGLE).write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(PretrainedError, match="is not an? (index|safetensors)"):
        TensorFiles(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    weights = random_weights(LLAMA)
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(PretrainedError, match=r"no tensor `layers.1.mlp.up_proj.weight`"):
        loaded(write_model(tmp_path / "model", LLAMA, weights), LLAMA)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    weights = random_weights(LLAMA)
    weights["lm_head.weight"] = weights["lm_head.weight"][:100].clone()
    with pytest.raises(PretrainedError, match=r"`lm_head.weight` is \[100, 32\]"):
        loaded(write_model(tmp_path / "model", LLAMA, weights), LLAMA)


@pytest.mark.parametrize(
    ("config", "tensor"),
    [
        (LLAMA, "model.embed_tokens.weight"),
        (LLAMA, "model.layers.1.self_attn.k_proj.weight"),
        (LLAMA, "model.layers.0.input_layernorm.weight"),
        (DEEPSEEK, "model.layers.0.self_attn.q_b_proj.weight"),
        (GPT2, "transformer.h.0.attn.c_attn.bias"),
    ],
)
def test_a_tensor_with_more_rows_than_the_model_is_not_cut(tmp_path: Path, config: dict[str, Any], tensor: str) -> None:
    weights = random_weights(config)
    weights[tensor] = torch.cat((weights[tensor], weights[tensor]))
    directory = write_model(tmp_path / "model", config, weights)
    with pytest.raises(PretrainedError, match=tensor.partition(".")[2]):
        loaded(directory, config)
    with pytest.raises(PretrainedError, match=tensor.partition(".")[2]):
        check_pretrained(architecture_from_config(config), directory)


@pytest.mark.parametrize("damage", ["short", "garbage", "empty"])
def test_a_damaged_file_is_rejected(tmp_path: Path, damage: str) -> None:
    directory = write_model(tmp_path / "model", LLAMA, random_weights(LLAMA))
    file = directory / "model.safetensors"
    content = {"short": file.read_bytes()[:-100], "garbage": b"\x10" + bytes(7) + b"x" * 64, "empty": b""}[damage]
    file.write_bytes(content)
    with pytest.raises(PretrainedError, match=r"model.safetensors"):
        TensorFiles(directory)


def test_an_index_may_not_lead_out_of_its_directory(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", LLAMA, random_weights(LLAMA), files=2)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../model-00001-of-00002.safetensors"}}))
    with pytest.raises(PretrainedError, match="not a file in its directory"):
        TensorFiles(directory)
