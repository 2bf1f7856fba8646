"""Files of published weights that do not fit the model, and what an exported model has beside its weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.data import Tokenizer
from meshwright.models.huggingface.reader import architecture_from_config
from meshwright_worker.checkpoint.manifest import TokenizerRecord
from meshwright_worker.checkpoint.safetensors_format import write_tensors
from meshwright_worker.pretrained.base_tokenizer import copy_companions, other_tokenizer
from meshwright_worker.pretrained.hf_export import special_tokens
from meshwright_worker.pretrained.load import check_pretrained, load_pretrained
from meshwright_worker.pretrained.tensor_files import TensorFiles
from meshwright_worker.rank.failures import PretrainedError
from tests.pretrained.published import LLAMA, random_weights, write_model


def test_tensors_that_the_model_lacks_are_rejected_when_a_run_begins(tmp_path: Path) -> None:
    """Biases of a Qwen in a directory whose configuration is that of a Llama: the outputs would differ."""
    weights = random_weights(LLAMA) | {"model.rotary_emb.inv_freq": torch.ones(4), "value_head.weight": torch.ones(2)}
    weights["model.layers.9.mlp.up_proj.weight"] = torch.ones(2)
    model, plain = architecture_from_config(LLAMA), write_model(tmp_path / "plain", LLAMA, weights)
    load_pretrained([], model, plain)
    more = weights | {f"model.layers.1.self_attn.{name}_proj.bias": torch.ones(2) for name in "qk"}
    directory = write_model(tmp_path / "more", LLAMA, more)
    with pytest.raises(PretrainedError, match=r"`model.layers.1.self_attn.._proj.bias` and 1 more, which a model with"):
        load_pretrained([], model, directory)
    load_pretrained([], model, directory, begins=False)


def test_an_output_projection_of_its_own_is_not_taken_for_the_embedding(tmp_path: Path) -> None:
    """The configuration says that they are one: the projection was left out without a message."""
    config = LLAMA | {"tie_word_embeddings": True}
    weights, model = random_weights(LLAMA), architecture_from_config(config)
    embedding = weights["model.embed_tokens.weight"]
    for name, head in {"twice": embedding.clone(), "rounded": embedding.bfloat16()}.items():
        load_pretrained([], model, write_model(tmp_path / name, config, weights | {"lm_head.weight": head}))
    directory = write_model(tmp_path / "apart", config, weights)
    with pytest.raises(
        PretrainedError, match=r"has a `lm_head.weight` that differs .*set that to false, and `model.tie"
    ):
        load_pretrained([], model, directory)
    load_pretrained([], model, directory, begins=False)
    load_pretrained([], architecture_from_config(LLAMA), write_model(tmp_path / "untied", LLAMA, weights))


def test_weights_that_are_not_numbers_of_a_model_are_rejected(tmp_path: Path) -> None:
    """Integers were converted to floats without an error."""
    name = "model.layers.1.mlp.up_proj.weight"
    weights = random_weights(LLAMA) | {"unused": torch.ones(2, dtype=torch.int64)}
    model = architecture_from_config(LLAMA)
    check_pretrained(model, write_model(tmp_path / "floats", LLAMA, weights))
    directory = write_model(tmp_path / "integers", LLAMA, weights | {name: weights[name].to(torch.int32)})
    with pytest.raises(PretrainedError, match=r"up_proj.weight` in .* has the format I32: use weights in F64"):
        check_pretrained(model, directory)


def test_a_tensor_is_taken_from_the_file_that_the_index_names(tmp_path: Path) -> None:
    weights = random_weights(LLAMA)
    directory = write_model(tmp_path / "model", LLAMA, weights, files=2)
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    for number in (1, 2):
        file = f"model-{number:05d}-of-00002.safetensors"
        own = {name: weights[name] for name, where in index.items() if where == file}
        stale = {name: tensor + 1 for name, tensor in weights.items() if name not in own}
        (directory / file).unlink()
        write_tensors(directory / file, own | stale)
    files = TensorFiles(directory)
    assert all(torch.equal(files.find(name).map(), tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("adapter_model.safetensors", "is an adapter; name it in `training.lora.initialAdapter`, and its model here"),
        ("model-00001-of-00002.safetensors", "download the index too"),
        ("pytorch_model.bin", "convert it to safetensors"),
    ],
)
def test_weights_in_another_form_say_what_to_do(tmp_path: Path, file: str, says: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(PretrainedError, match=f"contains neither .*`{file}`.*{says}"):
        TensorFiles(tmp_path)


def test_other_rotary_frequencies_say_how_to_train_a_longer_context(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", LLAMA, random_weights(LLAMA))
    longer = architecture_from_config({**LLAMA, "rope_theta": 500000.0})
    with pytest.raises(PretrainedError, match=r"train a longer context with a copy of the directory"):
        check_pretrained(longer, directory)


@pytest.mark.parametrize(
    ("base", "separator", "expected"),
    [
        ({}, 256, {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}),
        ({}, None, {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}),
        ({"bos_token_id": 128000, "eos_token_id": 128001}, 128001, {"bos_token_id": 128000, "eos_token_id": 128001}),
        ({"eos_token_id": 128009}, 128001, {"eos_token_id": [128009, 128001]}),
        ({"eos_token_id": [5, 6], "pad_token_id": 0}, 7, {"eos_token_id": [5, 6, 7], "pad_token_id": 0}),
        ({"model_type": "llama"}, None, {}),
    ],
)
def test_an_exported_model_ends_a_text_where_the_run_did(
    base: dict[str, Any], separator: int | None, expected: dict[str, Any]
) -> None:
    """Without the fields, transformers takes its defaults: token 2 of a Llama, an ordinary token of Llama 3."""
    assert special_tokens(base, separator) == expected


def test_a_tokenizer_that_is_not_the_models_is_noticed(tmp_path: Path) -> None:
    content = b'{"model": {}}'
    own = TokenizerRecord(kind=Tokenizer.BPE, identity=f"bpe/{hashlib.sha256(content).hexdigest()[:32]}")
    assert other_tokenizer(tmp_path, own) == ""
    (tmp_path / "tokenizer.json").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert other_tokenizer(tmp_path, own) == ""
    for wrong in (TokenizerRecord(kind=Tokenizer.BYTE, identity="byte"), own.model_copy(update={"identity": "bpe/0"})):
        assert "copy of its tokenizer.json" in other_tokenizer(tmp_path, wrong)
        assert copy_companions(tmp_path, wrong, tmp_path / "none") == []
    assert other_tokenizer(tmp_path, TokenizerRecord(kind=Tokenizer.SENTENCE_PIECE, identity="sentencepiece/0")) == ""
    (tmp_path / "out").mkdir()
    assert copy_companions(tmp_path, own, tmp_path / "out") == ["tokenizer_config.json"]
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}"
