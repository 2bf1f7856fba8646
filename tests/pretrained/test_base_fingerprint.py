"""The fingerprint of the model that adapters belong to: the same for the same weights, another for other weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.models.huggingface.reader import architecture_from_config
from meshwright_worker.checkpoint.manifest import has_other_base
from meshwright_worker.pretrained.base_fingerprint import base_fingerprint
from meshwright_worker.pretrained.tensor_files import TensorFiles
from meshwright_worker.rank.failures import PretrainedError
from tests.pretrained.published import DEEPSEEK_V3, GPT2, LLAMA, QWEN2, random_weights, write_model

FAMILIES = {"llama": LLAMA, "qwen2": QWEN2, "gpt2": GPT2, "deepseek-v3": DEEPSEEK_V3}


def of(directory: Path, config: dict[str, Any]) -> str:
    return base_fingerprint(architecture_from_config(config), directory)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_the_same_weights_in_other_files_have_the_same_fingerprint(tmp_path: Path, config: dict[str, Any]) -> None:
    weights = random_weights(config, dtype=torch.bfloat16)
    plain = of(write_model(tmp_path / "plain", config, weights), config)
    assert len(plain) == len("1-") + 32
    assert of(write_model(tmp_path / "files", config, weights, files=3), config) == plain
    exact = {name: tensor.float() for name, tensor in weights.items()}
    assert of(write_model(tmp_path / "fp32", config, exact), config) == plain
    bare = {name.removeprefix("model.").removeprefix("transformer."): tensor for name, tensor in weights.items()}
    more = {**bare, "value_head.weight": torch.ones(3), "layers.0.rotary_emb.inv_freq": torch.ones(4)}
    assert of(write_model(tmp_path / "bare", config, more), config) == plain


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_a_change_of_any_tensor_changes_the_fingerprint(tmp_path: Path, config: dict[str, Any]) -> None:
    """As small as that of merged adapters or of a few steps of training: of the last bits, and of most numbers."""
    weights = random_weights(config)
    found = {of(write_model(tmp_path / "plain", config, weights), config)}
    for index, (name, tensor) in enumerate(weights.items()):
        changed = {**weights, name: tensor * (1 + 1e-6)}
        found.add(of(write_model(tmp_path / str(index), config, changed), config))
    assert len(found) == len(weights) + 1


def test_of_many_experts_some_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**DEEPSEEK_V3, "n_routed_experts": 160}
    weights = random_weights(config)
    directory = write_model(tmp_path / "model", config, weights)
    read: list[str] = []
    find = TensorFiles.find
    monkeypatch.setattr(TensorFiles, "find", lambda files, name: read.append(name) or find(files, name))
    of(directory, config)
    kinds = [name for name in read if ".mlp.experts." in name]
    # Two layers of 160 experts, of each of the three matrices 128 evenly spaced ones; and all other tensors.
    assert len(kinds) == 3 * 128
    assert {name.split(".")[1] for name in kinds} == {"1", "2"}
    assert len(read) - len(kinds) == sum(".mlp.experts." not in name for name in weights)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", LLAMA, random_weights(LLAMA))
    tensor = TensorFiles(directory).find("norm.weight")
    assert torch.equal(tensor.numbers(3, 5), tensor.map()[3:8])
    (directory / "model.safetensors").unlink()
    with pytest.raises(PretrainedError, match=r"model.safetensors cannot be read: .*No such file"):
        tensor.numbers(0, 1)


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [("1-a", "1-a", False), ("1-a", "1-b", True), (None, "1-b", False), ("1-a", None, False), ("1-a", "2-b", False)],
)
def test_only_fingerprints_of_one_scheme_are_compared(one: str | None, other: str | None, differ: bool) -> None:
    assert has_other_base(one, other) is differ
