"""Families against published parameter counts, counts against their definitions, and Hugging Face configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.api.lora import LoraSpec
from meshwright.api.mixture import MixtureSpec
from meshwright.models.architecture import Architecture, not_buildable
from meshwright.models.counts import (
    attended_keys,
    attention_flops,
    embedding_parameters,
    forward_flops,
    layer_counts,
    output_parameters,
    training_flops,
)
from meshwright.models.huggingface.config_fields import ConfigError
from meshwright.models.huggingface.reader import architecture_from_config, published_architecture, read_architecture
from meshwright.models.lora import adapter_parameters
from meshwright.models.presets import PRESETS, UnknownModelError, published

# Sums of the published checkpoints' tensors.
COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-1-7b": 6_738_415_616,
    "llama-1-13b": 13_015_864_320,
    "llama-1-33b": 32_528_943_616,
    "llama-1-65b": 65_285_660_672,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
}
# Billions, as their papers round them.
ROUNDED = {
    "gpt3-175b": 174.6,
    "megatron-1.7b": 1.7,
    "megatron-3.6b": 3.6,
    "megatron-7.5b": 7.5,
    "megatron-18.4b": 18.4,
    "megatron-39.1b": 39.1,
    "megatron-76.1b": 76.1,
    "megatron-145.6b": 145.6,
    "megatron-310.1b": 310.1,
    "megatron-529.6b": 529.6,
    "megatron-1008b": 1008.0,
}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_a_family_has_the_published_number_of_parameters(name: str, count: int) -> None:
    assert published(name).parameters == count


@pytest.mark.parametrize(("name", "billions"), ROUNDED.items())
def test_a_family_has_the_rounded_number_of_its_paper(name: str, billions: float) -> None:
    assert published(name).parameters / 1e9 == pytest.approx(billions, abs=0.051)


@pytest.mark.parametrize("architecture", PRESETS.values(), ids=lambda a: a.name)
def test_presets_have_equal_counts_by_part_and_in_total(architecture: Architecture) -> None:
    mixtures = architecture.count_mixtures(0, architecture.layers)
    dense, mixed = layer_counts(architecture, False), layer_counts(architecture, True)
    layers = (architecture.layers - mixtures) * dense.total + mixtures * mixed.total
    tables = embedding_parameters(architecture)
    tables += 0 if architecture.tie_embeddings else output_parameters(architecture)
    assert tables + layers + architecture.norm_parameters == architecture.parameters


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3.2-1b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3"])
def test_flops_are_six_per_parameter_and_the_attention_term(name: str) -> None:
    """6·N + 12·L·d·s (arXiv 2204.02311, appendix B): N without look-ups, and without norms and biases."""
    model = published(name)
    lookups = model.positions * model.hidden_size + (0 if model.tie_embeddings else output_parameters(model))
    multiplied = model.active_parameters - lookups
    heads = model.heads * (model.key_size + model.value_size) / 2
    expected = 6 * multiplied + 12 * model.layers * heads * 2048
    assert training_flops(model, 2048) == pytest.approx(expected, rel=1e-4)
    attention = training_flops(model, 4097) - training_flops(model, 1)
    assert attention == pytest.approx(12 * model.layers * heads * 4096, rel=1e-9)


def test_a_tied_embedding_multiplies_once_as_the_output() -> None:
    tied = published("llama-3.2-1b")
    assert training_flops(tied, 8) == training_flops(tied.model_copy(update={"tie_embeddings": False}), 8)


def test_adapters_leave_out_the_gradients_of_frozen_matrices() -> None:
    model, lora = published("llama-2-7b"), LoraSpec(rank=8)
    adapters, whole = adapter_parameters(lora, model), training_flops(model, 2048)
    frozen = sum(layer_counts(model, False).matrices for _ in range(32)) + output_parameters(model)
    assert training_flops(model, 2048, lora=lora) == whole - 2 * frozen + 6 * adapters


def test_every_family_is_checked() -> None:
    assert set(PRESETS) >= {*COUNTS, *ROUNDED}


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral-8x7b", 12.9), ("deepseek-v3", 37.6), ("deepseek-v2", 21.4), ("qwen3-30b-a3b", 3.35)],
)
def test_mixtures_use_a_part_of_their_parameters(name: str, billions: float) -> None:
    assert published(name).active_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_an_unknown_family_names_the_nearest() -> None:
    with pytest.raises(UnknownModelError, match="mixtral-8x7b"):
        published("mixtral-8x7")


def test_megatrons_formula_of_flops() -> None:
    # 96·B·s·l·h²·(1 + s/6h + V/16lh) with recomputation (arXiv 2104.04473, section 3): four forward passes of the
    # layers but three of the logits. No gates, no grouped queries.
    layers, hidden, sequence, vocab = 40, 6144, 2048, 51200
    model = Architecture(
        layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        heads=48,
        kv_heads=48,
        vocab_size=vocab,
        gated=False,
    )
    expected = 96 * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocab / (16 * layers * hidden))
    logits = 2.0 * vocab * hidden
    ours = training_flops(model, sequence, recomputed=1.0) - logits
    assert ours * sequence == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("window", "causal"), [(0, True), (0, False), (16, True), (16, False), (64, True)])
def test_attended_keys_are_the_mean_over_the_mask(window: int, causal: bool) -> None:
    length = 64
    model = published("gpt2").model_copy(update={"sliding_window": window})
    width = window if window and window < length else length
    if causal:
        expected = sum(min(q + 1, width) for q in range(length)) / length
    else:
        expected = float(width)
    assert attended_keys(model, length, causal=causal) == pytest.approx(expected)


def test_causal_attention_is_about_half() -> None:
    model = published("llama-2-7b")
    whole, half = (attention_flops(model, 4096, causal=causal) for causal in (False, True))
    assert half / whole == pytest.approx(0.5, rel=1e-3)
    assert forward_flops(model, 4096, causal=True) < forward_flops(model, 4096)


def test_mixtures_are_counted_where_they_stand() -> None:
    mixture = MixtureSpec(experts=8, per_token=2, intermediate_size=64, dense_layers=3, every=2)
    model = published("gpt2").model_copy(update={"layers": 12, "mixture": mixture})
    listed = [model.is_mixture(layer) for layer in range(12)]
    assert listed == [False, False, False, False, True, False, True, False, True, False, True, False]
    for first in range(13):
        for last in range(first, 13):
            assert model.count_mixtures(first, last) == sum(listed[first:last])


def test_active_parameters_are_the_routed_share() -> None:
    counts = layer_counts(published("mixtral-8x7b"), True)
    assert counts.active_experts * 4 == counts.experts
    assert counts.total - counts.active == counts.experts - counts.active_experts


MIXTRAL = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
    "num_nextn_predict_layers": 1,
}
QWEN = {
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": 32768,
}
QWEN_MOE: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "vocab_size": 151936,
}
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_inner": None, "vocab_size": 50257}


@pytest.mark.parametrize(
    ("config", "name"), [(MIXTRAL, "mixtral-8x7b"), (V3, "deepseek-v3"), (QWEN, "qwen2.5-0.5b"), (GPT2, "gpt2")]
)
def test_a_configuration_is_the_family_it_describes(config: dict[str, Any], name: str) -> None:
    found = published_architecture(config)
    assert found.parameters == published(name).parameters
    assert found.sliding_window == 0


@pytest.mark.parametrize(
    ("config", "window"),
    [
        # Mistral 7B v0.3 and v0.1, Mixtral with and without a window, Qwen2.5, and Qwens whose layers all agree.
        ({**MIXTRAL, "model_type": "mistral"}, 0),
        ({**MIXTRAL, "model_type": "mistral", "sliding_window": 4096}, 4096),
        ({**MIXTRAL, "sliding_window": 4096}, 4096),
        (MIXTRAL, 0),
        ({**QWEN, "max_window_layers": 21}, 0),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 24}, 0),
        ({**QWEN, "use_sliding_window": True, "layer_types": ["full_attention"] * 24}, 0),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 0}, 32768),
    ],
)
def test_a_window_is_that_of_all_layers(config: dict[str, Any], window: int) -> None:
    assert architecture_from_config(config).sliding_window == window


SOME = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "every"),
    [
        ({**QWEN, "use_sliding_window": True, "layer_types": SOME * 12}, 2),
        ({**QWEN, "use_sliding_window": True, "layer_types": (SOME[:1] * 5 + SOME[1:]) * 4}, 6),
        ({**QWEN, "use_sliding_window": True, "layer_types": SOME[:1] * 24}, 0),
        ({**MIXTRAL, "model_type": "ministral", "sliding_window": 8, "layer_types": SOME * 16}, 2),
    ],
)
def test_the_last_of_every_so_many_layers_has_no_window(config: dict[str, Any], every: int) -> None:
    model = architecture_from_config(config)
    assert (model.sliding_window, model.full_attention_every) == (config["sliding_window"], every)
    full = [layer for layer in range(model.layers) if not model.window_of(layer)]
    assert model.full_attention_layers == len(full)
    kinds = config["layer_types"]
    assert full == [layer for layer in range(model.layers) if kinds[layer] == "full_attention"]
    length = 100_000
    by_layer = [attended_keys(model, length, causal=True, layer=layer) for layer in range(model.layers)]
    assert attended_keys(model, length, causal=True) == pytest.approx(sum(by_layer) / model.layers)


@pytest.mark.parametrize(
    "config",
    [
        {**QWEN, "use_sliding_window": True, "max_window_layers": 21},
        {**QWEN, "use_sliding_window": True, "layer_types": SOME[::-1] * 12},
        {**QWEN_MOE, "use_sliding_window": True, "max_window_layers": 3},
        {**MIXTRAL, "sliding_window": 8, "layer_types": SOME * 16},
    ],
)
def test_a_window_of_other_layers_is_rejected(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="`layer_types`"):
        published_architecture(config)


def test_multi_token_prediction_costs_operations_but_is_not_the_model() -> None:
    without, found = published("deepseek-v3"), published_architecture(V3)
    assert found.prediction_layers == 1
    assert 1.01 < training_flops(found, 4096) / training_flops(without, 4096) < 1.1


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    assert read_architecture(path) == published_architecture(MIXTRAL)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "bert"}, "`model_type` 'bert'"),
        ({"hidden_size": None}, "`hidden_size` is missing"),
        ({"hidden_size": "4096"}, "`hidden_size` must be an integer"),
        ({"hidden_size": True}, "`hidden_size`"),
        ({"tie_word_embeddings": "yes"}, "`tie_word_embeddings`"),
    ],
)
def test_a_broken_configuration_names_the_field(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        published_architecture({**MIXTRAL, **change})


@pytest.mark.parametrize("text", ["[1]", "{", "\xff"])
def test_a_file_without_an_object_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="not valid JSON|JSON object"):
        read_architecture(path)


def test_dense_layers_between_mixtures_are_rejected() -> None:
    with pytest.raises(ConfigError, match="mlp_only_layers"):
        published_architecture({**QWEN_MOE, "mlp_only_layers": [3]})
    with pytest.raises(ConfigError, match="moe_layer_freq"):
        published_architecture({**V3, "moe_layer_freq": 2})


@pytest.mark.parametrize(
    ("config", "count", "reason"),
    [
        # Qwen1.5-MoE-A2.7B as it is published.
        (QWEN_MOE, 14_315_784_192, "a gate on the shared experts"),
        ({**MIXTRAL, "quantization_config": {"quant_method": "awq"}}, 46_702_792_704, "`quantization_config`"),
    ],
    ids=["shared gate", "quantized"],
)
def test_what_is_published_and_not_supported_is_counted_and_rejected(
    config: dict[str, Any], count: int, reason: str
) -> None:
    assert published_architecture(config).parameters == count
    with pytest.raises(ConfigError, match=reason):
        architecture_from_config(config)


def test_the_runtime_leaves_multi_token_prediction_out() -> None:
    published, built = published_architecture(V3), architecture_from_config(V3)
    assert built == published.model_copy(update={"prediction_layers": 0}) != published
    assert [bool(not_buildable(model)) for model in (published, built)] == [True, False]


def test_what_a_deepseek_leaves_out_is_what_its_type_says() -> None:
    names = ("n_shared_experts", "q_lora_rank", "first_k_dense_replace", "topk_method")
    assert published_architecture({name: value for name, value in V3.items() if name not in names}) == (
        published_architecture(V3)
    )
