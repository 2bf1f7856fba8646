"""Adapters in the format of PEFT that are not those of `training.lora`, or that the runtime cannot reproduce."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.lora import LoraSpec
from meshwright.models.huggingface.reader import architecture_from_config, model_type_from_config
from meshwright_worker.checkpoint.provenance import EXPORT_RECORD, export_record
from meshwright_worker.pretrained.adapter_import import check_adapter_base, open_adapter
from meshwright_worker.rank.failures import PretrainedError
from tests.pretrained.peft_files import ALPHA, RANK, random_adapter, write_adapter
from tests.pretrained.published import GPT2, LLAMA, QWEN3_MOE

Tensors = dict[str, torch.Tensor]
AT = "base_model.model.model.layers.1"
QUERY = f"{AT}.self_attn.q_proj"


def problem(directory: Path, config: dict[str, Any] = LLAMA, **lora: Any) -> str:
    """Why `training.lora` cannot begin with the adapter in a directory. Empty if it can."""
    spec = LoraSpec.model_validate({"rank": RANK, "alpha": ALPHA, **lora})
    try:
        open_adapter(architecture_from_config(config), model_type_from_config(config), spec, directory)
    except PretrainedError as error:
        return str(error)
    return ""


def usual() -> Tensors:
    return random_adapter(LLAMA, ["q_proj", "v_proj"])


def test_the_adapter_of_the_default_targets_is_accepted(tmp_path: Path) -> None:
    told = {"lora_dropout": 0.1, "target_modules": "all-linear", "init_lora_weights": "gaussian", "revision": "x"}
    later = {"qalora_group_size": 16, "modules_to_save": None, "use_dora": False, "layer_replication": None}
    assert problem(write_adapter(tmp_path / "a", usual(), **told, **later)) == ""
    bare = tmp_path / "b"
    write_adapter(bare, random_adapter(LLAMA, ["q_proj", "v_proj"], 8))
    (bare / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert problem(bare, rank=8, alpha=8) == "", "PEFT's defaults"


@pytest.mark.parametrize(
    ("fields", "lora", "text"),
    [
        ({}, {"rank": 4}, "`training.lora.rank` must be 3, the rank of the adapter in {d}, got 4"),
        ({}, {"alpha": 8}, "`training.lora.alpha` must be 7.5, with which the adapter in {d} was trained, got 8"),
        ({"lora_alpha": 16}, {}, "`training.lora.alpha` must be 16, with"),
        ({"use_rslora": True}, {}, "`training.lora.alpha` must be 12.9903811, with"),
        ({"alpha_pattern": {"v_proj": 9}}, {}, "is scaled by 2.5 for `model.layers.0.self_attn.q_proj` and by 3 for"),
        ({"alpha_pattern": {r"layers\.\d+\.self_attn.[qv]_proj": 9}}, {}, "`training.lora.alpha` must be 9, with"),
        ({"alpha_pattern": {"(": 9}}, {}, "`alpha_pattern` has `(`, not a regular expression: "),
        ({"alpha_pattern": [1]}, {}, "`alpha_pattern` must be an object, got [1]"),
        ({"alpha_pattern": {"q_proj": "x"}}, {}, '`alpha_pattern.q_proj` must be a positive number, got "x"'),
        ({"r": 0}, {}, "`r` must be a positive number, got 0"),
        ({"r": True}, {}, "`r` must be a positive number, got true"),
        ({"r": 4}, {}, "q_proj.lora_A.weight` in {d}/adapter_model.safetensors is [3, 32], and [4, 32] in this model"),
        ({}, {"targets": ["Query"]}, "`training.lora.targets` must be [Query, Value], the matrices that the adapter"),
        ({}, {"targets": ["Query", "Value", "Up"]}, "must be [Query, Value], the matrices that the adapter in {d} has"),
        ({"peft_type": "LOHA"}, {}, "{d}/adapter_config.json: `peft_type` must be LORA, got LOHA: merge the adapter"),
        ({"use_dora": True}, {}, "`use_dora: true` is not supported, because the adapter's output would differ: merge"),
        ({"bias": "lora_only"}, {}, '`bias: "lora_only"` is not supported'),
        ({"modules_to_save": ["lm_head"]}, {}, '`modules_to_save: ["lm_head"]` is not supported'),
        ({"init_lora_weights": "pissa"}, {}, "or convert it with `path_initial_model_for_weight_conversion` of PEFT"),
        ({"a_variant_of_the_future": {"x": 1}}, {}, '`a_variant_of_the_future: {"x": 1}` is not supported'),
    ],
)  # fmt: skip
def test_the_field_and_its_value_are_named(
    tmp_path: Path, fields: dict[str, Any], lora: dict[str, Any], text: str
) -> None:
    directory = write_adapter(tmp_path / "adapter", usual(), **fields)
    assert text.replace("{d}", str(directory)) in problem(directory, **lora)


def test_rank_stabilized_adapters_have_another_alpha_and_the_same_output(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "adapter", usual(), use_rslora=True)
    assert problem(directory, alpha=12.9903811) == ""
    assert problem(directory, alpha=12.99) != ""


def without(tensors: Tensors, *ends: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda found: without(found, "1.self_attn.q_proj.lora_B.weight"), f"has no tensor `{QUERY}.lora_B.weight`"),
        (
            lambda found: {name: tensor for name, tensor in found.items() if QUERY not in name},
            "an adapter of `model.layers.0.self_attn.q_proj` and none of `model.layers.1.self_attn.q_proj`",
        ),
        (lambda found: {}, "has no adapter of a matrix"),
        (
            lambda found: found | {f"{QUERY}.lora_magnitude_vector": torch.ones(32), "x": torch.ones(1)},
            f"has the tensor `{QUERY}.lora_magnitude_vector` and 1 more, which `training.lora` cannot train: merge",
        ),
        (
            lambda found: found | {"base_model.model.lm_head.weight": torch.ones(260, 32)},
            "has the tensor `base_model.model.lm_head.weight`, which",
        ),
        (
            lambda found: found | {f"{QUERY}.lora_B.weight": torch.ones(31, RANK)},
            f"`{QUERY}.lora_B.weight` in {{f}} is [31, 3], and [32, 3] in this model",
        ),
        (
            lambda found: found | {f"{QUERY}.lora_B.weight": torch.ones(32, RANK, dtype=torch.int32)},
            "has the format I32: use weights in F64, F32, F16, BF16",
        ),
    ],
)  # fmt: skip
def test_tensors_that_are_missing_or_too_many_are_named(
    tmp_path: Path, change: Callable[[Tensors], Tensors], text: str
) -> None:
    directory = write_adapter(tmp_path / "adapter", change(usual()))
    assert text.replace("{f}", str(directory / "adapter_model.safetensors")) in problem(directory)


def test_several_ranks_are_not_one(tmp_path: Path) -> None:
    tensors = usual() | random_adapter(LLAMA, ["v_proj"], 5)
    directory = write_adapter(tmp_path / "adapter", tensors, rank_pattern={"v_proj": 5}, alpha_pattern={"v_proj": 12.5})
    assert (
        "has the rank 3 for `model.layers.0.self_attn.q_proj` and 5 for `model.layers.0.self_attn.v_proj`, and "
        "`training.lora.rank` is that of all"
    ) in problem(directory)


def test_adapters_of_experts_are_not_trained(tmp_path: Path) -> None:
    tensors = random_adapter(QWEN3_MOE, ["q_proj", "v_proj", "up_proj"])
    assert "mlp.experts.0.up_proj.lora_A.weight` and " in problem(write_adapter(tmp_path / "a", tensors), QWEN3_MOE)


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    field = "`training.lora.initialAdapter"
    nowhere = tmp_path / "nowhere"
    assert problem(nowhere).startswith(
        f"{field}: {nowhere}` has no `adapter_config.json`, because it is not a directory"
    )
    directory = write_adapter(tmp_path / "adapter", usual())
    file, config = directory / "adapter_model.safetensors", directory / "adapter_config.json"
    content = file.read_bytes()
    file.write_bytes(content[:-9])
    assert "is shorter than its header says" in problem(directory)
    file.write_bytes(b"\xff" * 40)
    assert "is not a safetensors file" in problem(directory)
    file.unlink()
    assert problem(directory) == (
        f"{field}: {directory}` has no `adapter_model.safetensors`: copy the file there, or name another directory"
    )
    (directory / "adapter_model.bin").write_bytes(b"\x80\x04.")
    assert "`adapter_model.bin` is a pickle, which may run code: convert it" in problem(directory)
    for text, said in (("{", "not valid JSON"), ("[" * 99999, "not valid JSON"), ("[]", "expected a JSON object")):
        config.write_text(text)
        assert said in problem(directory)
    config.unlink()
    (directory / "model.safetensors").write_bytes(content)
    assert "it contains a model, which `training.initialWeights` names" in problem(directory)


ALL = ["attn.c_attn", "attn.c_proj"]


def test_one_module_of_three_matrices_is_read_in_two_forms(tmp_path: Path) -> None:
    """PEFT trains one adapter of GPT-2's queries, keys and values. An export has the rows of A of each."""
    every = {"targets": ["Query", "Key", "Value", "Output"]}
    shared = write_adapter(tmp_path / "shared", random_adapter(GPT2, ALL))
    assert problem(shared, GPT2, **every) == ""
    assert "`training.lora.rank` must be 3, the rank of" in problem(shared, GPT2, **every, rank=9)
    assert "`training.lora.targets` must contain `Query`, `Key` and `Value`" in problem(
        shared, GPT2, targets=["Query", "Output"]
    )
    one = write_adapter(tmp_path / "one", random_adapter(GPT2, ALL[:1], 6), r=6, lora_alpha=15)
    assert "and `training.lora.rank` must be 6" in problem(one, GPT2, targets=["Query", "Value"])


def test_an_export_of_some_of_three_matrices_names_their_rank(tmp_path: Path) -> None:
    tensors = {}
    for name, tensor in random_adapter(GPT2, ALL[:1], 2 * RANK).items():
        tensors[name] = tensor
        if "lora_B" in name:
            queries, keys, values = tensor.chunk(3)
            queries[:, RANK:], keys[:], values[:, :RANK] = 0, 0, 0
    directory = write_adapter(tmp_path / "adapter", tensors, r=2 * RANK, lora_alpha=2 * ALPHA)
    assert problem(directory, GPT2, targets=["Query", "Value"]) == ""
    assert "must contain `Query`, `Key` and `Value`" in problem(directory, GPT2, targets=["Query", "Key"])
    assert "`training.lora.rank` must be 3, the rank" in problem(directory, GPT2, targets=["Query", "Value"], rank=4)


def test_the_record_of_an_export_protects_against_another_model(tmp_path: Path) -> None:
    check_adapter_base(tmp_path, "/models/a", "1-aa")
    for recorded, there, fits in (
        (None, "1-aa", True),
        ("1-aa", "1-aa", True),
        ("0-aa", "1-bb", True),
        ("1-aa", "1-bb", False),
    ):
        (tmp_path / EXPORT_RECORD).write_text(export_record("/c/step-00000003", 3, 1, None, recorded))
        if fits:
            check_adapter_base(tmp_path, "/models/a", there)
            continue
        with pytest.raises(PretrainedError) as raised:
            check_adapter_base(tmp_path, "/models/a", there)
        assert str(raised.value) == (
            "`training.initialWeights: /models/a` has other weights (fingerprint 1-bb) than the model that the adapter "
            f"in {tmp_path} was trained on (1-aa): name the directory of that model"
        )
    assert json.loads((tmp_path / EXPORT_RECORD).read_text())["baseFingerprint"] == "1-aa"
