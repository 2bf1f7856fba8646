"""Low-rank adapters: where they are put, what is counted, and what is refused before ranks start."""

from __future__ import annotations

import pytest
import torch

from meshwright.api.lora import LoraSpec, LoraTarget
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.models.huggingface.reader import to_model_spec
from meshwright.models.lora import adapted_matrices, adapter_parameters, skipped_targets
from meshwright.models.mixture import is_mixture
from meshwright.models.presets import PRESETS
from meshwright.rules.validation import check_spec
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.lora import AdaptedLinear, apply_lora, is_adapter

EVERY = LoraSpec(rank=4, targets=list(LoraTarget))
MIXED = LoraSpec(rank=4, targets=[LoraTarget.QUERY, LoraTarget.GATE, LoraTarget.UP, LoraTarget.DOWN])
FAMILIES = ["tiny", "tiny-gpt", "tiny-qwen", "tiny-latent", "tiny-mixture", "tiny-deepseek", "deepseek-v2-lite"]


def adapted_stage(name: str, lora: LoraSpec) -> DecoderStage:
    with torch.device("meta"):
        stage = DecoderStage(PRESETS[name], torch.bfloat16).to(torch.bfloat16)
    apply_lora(stage, lora)
    return stage


def test_adapting_takes_no_memory_and_keeps_the_format() -> None:
    with torch.device("meta"):
        stage = DecoderStage(PRESETS["tiny-gpt"], torch.bfloat16).to(torch.bfloat16)
    before = dict(stage.named_parameters())
    apply_lora(stage, EVERY)
    after = dict(stage.named_parameters())
    assert {(p.device.type, p.dtype) for p in after.values()} == {("meta", torch.bfloat16)}
    assert all(after[name] is parameter for name, parameter in before.items())
    assert {name for name in after if name not in before} == {name for name in after if is_adapter(name)} != set()


@pytest.mark.parametrize("lora", [LoraSpec(), EVERY, MIXED])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_counted_is_what_is_built(name: str, lora: LoraSpec) -> None:
    model, stage = PRESETS[name], adapted_stage(name, lora)
    built = {
        (int(path.split(".")[1]), path.split(".")[-1], module.in_features, module.out_features)
        for path, module in stage.named_modules()
        if isinstance(module, AdaptedLinear)
    }
    told = {
        (layer, matrix.target.value.lower(), matrix.inputs, matrix.outputs)
        for layer in range(model.layers)
        for matrix in adapted_matrices(lora, model, mixture=is_mixture(model.mixture, layer))
    }
    assert built == told
    counted = sum(p.numel() for path, p in stage.named_parameters() if is_adapter(path))
    assert adapter_parameters(lora, model) == counted


@pytest.mark.parametrize("target", LoraTarget)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_without_adapters_is_rejected_before_ranks_start(name: str, target: LoraTarget) -> None:
    lora, model = LoraSpec(targets=[target]), PRESETS[name]
    try:
        adapted_stage(name, lora)
        builds = True
    except ValueError:
        builds = False
    spec = ParallelTrainingJobSpec.model_validate(
        {
            "model": to_model_spec(model),
            "training": {"steps": 1, "globalBatchSize": 1, "sequenceLength": 8, "lora": lora},
            "workers": {"image": "worker"},
        }
    )
    assert ("training.lora.targets" not in {problem.field for problem in check_spec(spec)}) is builds


def test_what_gets_no_adapter_is_reported() -> None:
    assert skipped_targets(EVERY, PRESETS["tiny"]) is None
    assert skipped_targets(EVERY, PRESETS["tiny-gpt"]) == "`training.lora.targets`: no adapter for Gate in any layer"
    deepseek = skipped_targets(EVERY, PRESETS["tiny-deepseek"])
    assert deepseek == (
        "`training.lora.targets`: no adapter for Key, Value in any layer and for Gate, Up, Down in the mixtures of "
        "experts"
    )
