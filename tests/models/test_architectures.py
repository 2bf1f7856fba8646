"""Presets against published parameter counts, and FLOPs against their own definition."""

from __future__ import annotations

import pytest

from meshwright.api.mixture import Balancing, MixtureSpec, Router
from meshwright.api.model import ModelSpec
from meshwright.api.parallelism import ParallelismSpec
from meshwright.models.architecture import Architecture
from meshwright.models.mixture import capacity, feed_forward_parameters, mixture_layers
from meshwright.models.presets import PRESETS, UnknownModelError, resolve
from meshwright.rules.facts import ResolvedFacts
from meshwright.rules.mixture import MIXTURE_RULES
from meshwright.rules.model import MODEL_RULES

# Sums of the published checkpoints' tensors.
COUNTS = {
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "mistral-7b": 7_241_732_096,
    "llama-1-7b": 6_738_415_616,
    "llama-1-13b": 13_015_864_320,
    "llama-1-33b": 32_528_943_616,
    "llama-1-65b": 65_285_660_672,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
}
# Billions, as table 2.1 of GPT-3's paper rounds them; the table of positions and tokens weighs most in the small ones.
ROUNDED = {
    "gpt3-125m": 0.125,
    "gpt3-350m": 0.350,
    "gpt3-760m": 0.760,
    "gpt3-1.3b": 1.3,
    "gpt3-2.7b": 2.7,
    "gpt3-6.7b": 6.7,
    "gpt3-13b": 13.0,
    "gpt3-175b": 175.0,
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


@pytest.mark.parametrize(("name", "parameters"), COUNTS.items())
def test_a_preset_has_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert resolve(ModelSpec(preset=name)).parameters == parameters


@pytest.mark.parametrize(("name", "billions"), ROUNDED.items())
def test_a_size_is_that_of_its_table(name: str, billions: float) -> None:
    assert PRESETS[name].parameters / 1e9 == pytest.approx(billions, rel=0.03)


def test_every_published_preset_is_checked() -> None:
    tiny = {name for name in PRESETS if name.startswith("tiny") and name not in COUNTS}
    assert set(PRESETS) == {*COUNTS, *ROUNDED, *tiny}


@pytest.mark.parametrize("architecture", PRESETS.values(), ids=lambda a: a.name)
def test_presets_are_buildable(architecture: Architecture) -> None:
    assert architecture.head_size % 2 == architecture.rope_size % 2 == 0
    assert architecture.heads % architecture.kv_heads == 0
    assert PRESETS[architecture.name] is architecture


@pytest.mark.parametrize(
    ("asked", "named"), [("llama3-8b", "`llama-3-8b`"), ("Llama-3-8B", "`llama-3-8b`"), ("llama-3.2-2b", "llama-3.2-")]
)
def test_an_unknown_preset_names_the_nearest(asked: str, named: str) -> None:
    with pytest.raises(UnknownModelError, match="`model.preset`") as caught:
        resolve(ModelSpec(preset=asked))
    assert named in str(caught.value)


def test_a_preset_like_nothing_known_lists_all() -> None:
    with pytest.raises(UnknownModelError, match=r"use one of .*llama-2-13b.*tiny"):
        resolve(ModelSpec(preset="zzz"))


def test_numbers_make_an_architecture_with_stated_defaults() -> None:
    found = resolve(ModelSpec(layers=2, hidden_size=64, intermediate_size=96, heads=4, vocab_size=300))
    assert (found.kv_heads, found.rope_theta, found.tie_embeddings, found.head_size) == (4, 10000.0, False, 16)


def test_missing_numbers_are_named() -> None:
    with pytest.raises(UnknownModelError, match="`intermediateSize`"):
        resolve(ModelSpec(layers=2))


def test_tied_embeddings_are_counted_once() -> None:
    tied = PRESETS["llama-3.2-1b"]
    untied = tied.model_copy(update={"tie_embeddings": False})
    assert untied.parameters - tied.parameters == tied.vocab_size * tied.hidden_size


@pytest.mark.parametrize(("name", "billions"), [("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39.1)])
def test_a_mixture_uses_the_published_part_of_its_parameters(name: str, billions: float) -> None:
    """arXiv 2401.04088, section 2; Mistral's announcement of 8x22B."""
    assert PRESETS[name].active_parameters / 1e9 == pytest.approx(billions, abs=0.06)


def test_deepseek_v3s_mixtures_are_those_of_its_paper() -> None:
    """arXiv 2412.19437, section 4.2: the routed experts of 58 layers, of which a token uses 8 and a shared one."""
    mixture = PRESETS["deepseek-v3"].mixture
    assert mixture is not None
    assert (mixture.router, mixture.balancing) == (Router.SIGMOID, Balancing.BIAS)
    assert len(mixture_layers(mixture, 61)) == 58
    assert feed_forward_parameters(mixture, 7168) == 257 * 3 * 2048 * 7168 + 256 * 7169
    assert feed_forward_parameters(mixture, 7168, active=True) == 9 * 3 * 2048 * 7168 + 256 * 7169


@pytest.mark.parametrize("architecture", [m for m in PRESETS.values() if m.mixture], ids=lambda a: a.name)
def test_a_presets_mixture_does_not_contradict_itself(architecture: Architecture) -> None:
    assert architecture.mixture is not None
    facts = ResolvedFacts(1, ParallelismSpec(), architecture, None, None)
    assert [rule.message for rule in (*MODEL_RULES, *MIXTURE_RULES) if not rule.holds(facts)] == []


def test_every_so_many_layers_are_mixtures_after_the_dense_ones() -> None:
    spec = MixtureSpec(experts=4, per_token=1, renormalize=False, intermediate_size=8, dense_layers=1, every=2)
    assert mixture_layers(spec, 8) == [2, 4, 6]
    assert mixture_layers(None, 8) == []


@pytest.mark.parametrize(("factor", "tokens"), [(None, None), (1.0, 4), (1.25, 5), (0.1, 1)], ids=str)
def test_capacity_is_a_share_of_a_sequence(factor: float | None, tokens: int | None) -> None:
    spec = MixtureSpec(experts=8, per_token=2, intermediate_size=8, capacity_factor=factor)
    assert capacity(spec, 16) == tokens
