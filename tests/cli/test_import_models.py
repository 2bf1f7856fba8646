"""What `meshwright import` reads of a model in Megatron-LM's flags."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.api.mixture import Balancing, MixtureSpec
from meshwright.api.model import ModelSpec
from meshwright.api.model_parts import RopeScaling, RopeScalingSpec
from meshwright.api.parsing import parse_spec
from meshwright.models.architecture import Architecture
from meshwright.models.presets import PRESETS, resolve
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.frameworks.megatron_lm import MEGATRON_LM
from meshwright.planner.frameworks.target import FrameworkRun
from meshwright_cli.importing import megatron
from meshwright_cli.importing.settings import Imported
from tests.planner.frameworks.plans import job

YARN = RopeScalingSpec(
    kind=RopeScaling.YARN,
    factor=40,
    low_frequency_factor=1,
    high_frequency_factor=32,
    original_length=4096,
    score_factor=1.8734,
)
LLAMA3 = RopeScalingSpec(factor=32)
ARGUMENTS = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 128 --seq-length 32 --lr 1e-3"


def replace(model: Architecture, **fields: Any) -> Architecture:
    return model.model_copy(update=fields)


def mixture(**fields: Any) -> MixtureSpec:
    return MixtureSpec(experts=16, per_token=4, intermediate_size=64, **fields)


MODELS: dict[str, Architecture] = {
    # Gemma's activation and its other norms have no flags.
    **{name: model for name, model in PRESETS.items() if not model.output_norms},
    "YaRN": replace(PRESETS["deepseek-v3"], rope_scaling=YARN),
    "Llama 3.2": replace(PRESETS["llama-3-8b"], rope_scaling=LLAMA3),
    "weights of experts as they are": replace(
        PRESETS["mixtral-8x7b"], mixture=mixture(renormalize=False, auxiliary_weight=0.01)
    ),
    "windows": replace(PRESETS["mistral-7b"], full_attention_every=4),
    "no balancing": replace(PRESETS["mixtral-8x7b"], mixture=mixture(balancing=Balancing.NONE)),
    "losses": replace(
        PRESETS["mixtral-8x7b"],
        mixture=mixture(auxiliary_weight=0.002, z_loss_weight=0.001, capacity_factor=1.5, dense_layers=2),
    ),
}


def written(model: Architecture) -> str:
    """The flags that `meshwright plan --for megatron-lm` prints for a model."""
    training = {"steps": 10, "globalBatchSize": 8, "sequenceLength": 128}
    spec = parse_spec(job("llama-3-8b", {}, training=training))
    assert spec.training is not None
    return " ".join(MEGATRON_LM.launch(FrameworkRun(spec, spec.training, model, Strategy())).command)


def read(text: str) -> Imported:
    return megatron.read(text, 8)


@pytest.mark.parametrize("name", MODELS)
def test_the_flags_of_a_model_are_read_as_this_model(name: str) -> None:
    model = MODELS[name]
    assert MEGATRON_LM.model_problem(model) == ""
    found = read(written(model))
    again = resolve(ModelSpec.model_validate(found.spec["model"]))
    assert model.latent is None or "--qk-layernorm" in written(model)
    expected = replace(model, name=again.name)
    if expected.rope_scaling is not None and again.rope_scaling is not None:
        assert again.rope_scaling.score_factor == pytest.approx(expected.rope_scaling.score_factor, rel=1e-6)
        expected = replace(expected, rope_scaling=again.rope_scaling)
    assert again == expected
    assert not [flag for flag in found.without_equivalent if flag.startswith("--moe") or "lora" in flag]


@pytest.mark.parametrize(
    "model",
    [
        replace(PRESETS["llama-3-8b"], rope_scaling=YARN),
        replace(PRESETS["llama-3-8b"], rope_scaling=RopeScalingSpec(factor=8, original_length=4096)),
        replace(PRESETS["deepseek-v3"], rope_scaling=YARN.model_copy(update={"original_length": 8192})),
        replace(PRESETS["deepseek-v3"], rope_scaling=YARN.model_copy(update={"factor": 1.0})),
    ],
)
def test_positions_that_megatron_rescales_in_another_way_are_rejected(model: Architecture) -> None:
    assert "`model.ropeScaling`" in MEGATRON_LM.model_problem(model)


def test_a_window_is_read_if_all_layers_have_it() -> None:
    def told(flags: str) -> tuple[Any, Any, list[str]]:
        found = read(f"{ARGUMENTS} --global-batch-size 16 --micro-batch-size 1 --train-iters 10 {flags}")
        model = found.spec["model"]
        return model.get("slidingWindow"), model.get("fullAttentionEvery"), found.without_equivalent

    assert told("--window-size 127,0") == (128, None, [])
    assert told("--window-size (127,0)") == (128, None, [])
    assert told("--window-size -1,0") == (None, None, [])
    assert told("--window-size 127,0 --window-attn-skip-freq 2") == (128, 2, [])
    *windows, without = told("--window-size 127,0 --window-attn-skip-freq [1,1,0]*2")
    assert windows == [None, None]
    assert {"--window-size", "--window-attn-skip-freq"} <= set(without)


def test_a_factor_of_1_needs_no_flags() -> None:
    identity = YARN.model_copy(update={"factor": 1.0, "score_factor": 1.0})
    assert "--mscale" not in written(replace(PRESETS["deepseek-v3"], rope_scaling=identity))


def test_weights_of_experts_that_megatron_always_divides_are_rejected() -> None:
    v3 = PRESETS["deepseek-v3"]
    assert v3.mixture is not None
    model = replace(v3, mixture=v3.mixture.model_copy(update={"renormalize": False}))
    assert "`model.mixture.renormalize: false`" in MEGATRON_LM.model_problem(model)


def test_the_length_of_a_run_may_be_in_samples() -> None:
    found = read(
        f"{ARGUMENTS} --global-batch-size 16 --micro-batch-size 1 --train-samples 1000 --lr-warmup-samples 100 "
        "--lr-decay-samples 1000"
    )
    training = found.spec["training"]
    assert (training["steps"], training["optimizer"]["warmupSteps"]) == (62, 7)
    assert not [flag for flag in found.without_equivalent if "samples" in flag]
    assert "--lr-decay-samples" in read(f"{ARGUMENTS} --train-iters 10 --lr-decay-samples 50").without_equivalent


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ("--moe-layer-freq 2", {"unread": ["--moe-layer-freq"], "balancing": "None"}),
        ("--moe-layer-freq '([0]*1+[1]*3)' --moe-aux-loss-coeff 0.01", {"denseLayers": 1, "auxiliaryWeight": 0.01}),
        ("--moe-router-load-balancing-type sinkhorn", {"unread": ["--moe-router-load-balancing-type"]}),
        (
            "--moe-router-enable-expert-bias --moe-router-score-function sigmoid",
            {"balancing": "Bias", "router": "Sigmoid"},
        ),
    ],
)
def test_what_mixtures_have_and_what_has_no_equivalent(flags: str, fields: dict[str, Any]) -> None:
    found = read(f"{ARGUMENTS} --num-experts 8 {flags}")
    unread = fields.pop("unread", [])
    assert [flag for flag in found.without_equivalent if flag.startswith("--moe")] == unread
    mixture = found.spec["model"]["mixture"]
    assert {name: mixture.get(name) for name in fields} == fields


def test_the_planner_chooses_the_stage_of_spread_experts() -> None:
    found = read(f"{ARGUMENTS} --num-experts 8 --expert-model-parallel-size 4 --use-distributed-optimizer")
    assert "zeroStage" not in found.spec["parallelism"]
    assert any("ZeRO stage" in note for note in found.notes)


def test_values_of_variables() -> None:
    script = """
NAME='gpt_mbs_'$MBS'_gbs'
DATE=`date +'%y'`
OUT=/out/$NAME-$DATE
ARGS=(
    --num-layers 4
    --tensor-model-parallel-size ${TP}
    --save $OUT
)
TRAIN=(--bf16 ${EXTRA[@]})
"""
    found = read(script)
    assert found.spec["model"]["layers"] == 4
    assert found.spec["parallelism"]["tensor"] == 1
    assert "the value of --tensor-model-parallel-size is a variable that the file does not set" in found.notes
    assert found.spec["training"]["precision"] == "bf16"
