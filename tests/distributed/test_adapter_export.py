"""Adapters exported on their own: PEFT's names and values, from any layout, for every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright_worker import export as export_program
from meshwright_worker.checkpoint.full_tensors import find_checkpoint
from meshwright_worker.pretrained.adapter_export import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterError, export_adapter
from meshwright_worker.pretrained.hf_export import export
from meshwright_worker.pretrained.tensor_files import TensorFiles
from meshwright_worker.rank.task import Outcome
from tests.distributed.cases import train_fully
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_pretrained import published_run
from tests.pretrained.published import (
    DEEPSEEK,
    DEEPSEEK_LITE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GEMMA3,
    GPT2,
    LLAMA,
    MIXTRAL,
    PHI3,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    is_written_as,
    random_weights,
    write_model,
)
from tests.tiers import mostly_long

EVERY = ["Query", "Key", "Value", "Output", "Gate", "Up", "Down"]
Q, V, Q_B = "self_attn.q_proj", "self_attn.v_proj", "self_attn.q_b_proj"
GPT2_ALL = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
PHI3_ALL = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
# Family and targets -> the ends of the adapted modules' paths in the first layer, and what PEFT matches them by.
FAMILIES: dict[str, tuple[dict[str, Any], list[str], list[str], list[str]]] = {
    "llama": (LLAMA, ["Query", "Value", "Down"], [Q, V, "mlp.down_proj"], ["down_proj", "q_proj", "v_proj"]),
    "qwen2": (QWEN2, EVERY[:4], [f"self_attn.{n}_proj" for n in "kqvo"], ["k_proj", "o_proj", "q_proj", "v_proj"]),
    "qwen3": (QWEN3, ["Key", "Gate"], ["self_attn.k_proj", "mlp.gate_proj"], ["gate_proj", "k_proj"]),
    "gpt2": (GPT2, ["Query", "Value"], ["attn.c_attn"], ["c_attn"]),
    "gpt2, all": (GPT2, EVERY, GPT2_ALL, ["c_attn", "c_fc", "c_proj"]),
    "gpt2, output": (GPT2, ["Output"], ["attn.c_proj"], ["attn.c_proj"]),
    "phi3": (PHI3, ["Query", "Value", "Up"], PHI3_ALL[::2], ["gate_up_proj", "qkv_proj"]),
    "phi3, all": (PHI3, EVERY, PHI3_ALL, ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]),
    "mixtral": (MIXTRAL, EVERY, [f"self_attn.{n}_proj" for n in "kqvo"], ["k_proj", "o_proj", "q_proj", "v_proj"]),
    "qwen3-moe": (QWEN3_MOE, ["Query", "Key"], [Q, "self_attn.k_proj"], ["k_proj", "q_proj"]),
    "gemma3": (GEMMA3, ["Query", "Value", "Down"], [Q, V, "mlp.down_proj"], ["down_proj", "q_proj", "v_proj"]),
    "deepseek": (DEEPSEEK, ["Query", "Output"], [Q_B, "self_attn.o_proj"], ["o_proj", "q_b_proj"]),
    "deepseek-lite": (DEEPSEEK_LITE, ["Query"], [Q], ["q_proj"]),
    "deepseek-v2": (DEEPSEEK_V2, ["Query", "Output"], [Q_B, "self_attn.o_proj"], ["o_proj", "q_b_proj"]),
    "deepseek-v2, plain queries": ({**DEEPSEEK_V2, "q_lora_rank": None}, ["Query"], [Q], ["q_proj"]),
    "deepseek-v3": (DEEPSEEK_V3, ["Query"], [Q_B], ["q_b_proj"]),
}  # fmt: skip


def trained(
    pool: RankPool, tmp_path: Path, text: Path, config: dict[str, Any], targets: list[str], layout: dict[str, Any]
) -> Path:
    """Checkpoints of a run whose B are far from 0."""
    model = write_model(tmp_path / "model", config, random_weights(config))
    lora = {"rank": 3, "alpha": 7.5, "targets": targets}
    run = published_run(config, model, layout, lora=lora, steps=3, optimizer={"learning_rate": 0.05})
    pool.run(train_fully, run, checkpoint_dir=tmp_path / "checkpoints", data_dir=text)
    return tmp_path / "checkpoints"


def exported(checkpoints: Path, output: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The configuration and the tensors of an adapter."""
    checkpoint, manifest = find_checkpoint(checkpoints)
    assert export_adapter(checkpoint, manifest, output, dtype=torch.float32) == [ADAPTER_WEIGHTS]
    return json.loads((output / ADAPTER_CONFIG).read_text()), tensors_of(output / ADAPTER_WEIGHTS)


def tensors_of(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, read as its format says and without the runtime's reader."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    found = {}
    for name, entry in json.loads(content[8:end]).items():
        if name != "__metadata__":
            assert entry["dtype"] == "F32"
            first, last = entry["data_offsets"]
            data = bytearray(content[end + first : end + last])
            found[name] = torch.frombuffer(data, dtype=torch.float32).reshape(entry["shape"])
    return found


def merged(checkpoints: Path, output: Path) -> dict[str, torch.Tensor]:
    checkpoint, manifest = find_checkpoint(checkpoints)
    export(checkpoint, manifest, output, dtype=torch.float32, file_bytes=1 << 30)
    return tensors_of(output / "model.safetensors")


@pytest.mark.parametrize("name", mostly_long(FAMILIES, lambda name: name in ("llama", "gpt2, all", "phi3, all")))
def test_the_adapter_merged_by_hand_is_the_merged_export(pool: RankPool, tmp_path: Path, text: Path, name: str) -> None:
    config, targets, ends, matched = FAMILIES[name]
    checkpoints = trained(pool, tmp_path, text, config, targets, {"tensor": 2})
    told, adapter = exported(checkpoints, tmp_path / "adapter")
    want, prefix = merged(checkpoints, tmp_path / "out"), "transformer.h" if config is GPT2 else "model.layers"
    of_first_layer = {f"base_model.model.{prefix}.0.{end}.lora_{part}.weight" for end in ends for part in "AB"}
    assert {key for key in adapter if f"{prefix}.0." in key} == of_first_layer
    assert told["target_modules"] == matched
    assert (told["base_model_name_or_path"], told["task_type"]) == (str(tmp_path / "model"), "CAUSAL_LM")
    model, changed = random_weights(config), 0
    for key, weight in model.items():
        module = key.removesuffix(".weight")
        at = f"base_model.model.{module}"
        if not any(module == end or module.endswith(f".{end}") for end in told["target_modules"]):
            assert f"{at}.lora_A.weight" not in adapter
            assert is_written_as(want[key], weight, key, config)
            continue
        down, up = adapter.pop(f"{at}.lora_A.weight"), adapter.pop(f"{at}.lora_B.weight")
        end = next((end for end in told["rank_pattern"] if module.endswith(f".{end}")), "")
        rank = told["rank_pattern"].get(end, told["r"])
        assert down.shape[0] == up.shape[1] == rank
        product = told["alpha_pattern"].get(end, told["lora_alpha"]) / rank * (up.double() @ down.double())
        assert product.abs().max() > 1e-3
        theirs = weight.double() + (product.T if told["fan_in_fan_out"] else product)
        torch.testing.assert_close(want[key], theirs.float(), rtol=0, atol=1e-7)
        changed += 1
    assert changed
    assert not adapter, "no tensor is left"


@pytest.mark.parametrize(
    "layout", mostly_long([{"tensor": 2, "pipeline": 2}, {"data": 2, "zero": 3}], lambda it: "tensor" in it), ids=str
)
def test_every_layout_exports_the_same_bytes(
    pool: RankPool, tmp_path: Path, text: Path, layout: dict[str, Any]
) -> None:
    checkpoints = trained(pool, tmp_path, text, LLAMA, EVERY, {})
    exported(checkpoints, tmp_path / "one-process")
    lora = {"rank": 3, "alpha": 7.5, "targets": EVERY}
    # A rate of next to nothing: the next checkpoint has the same values, in the boxes of this layout.
    optimizer = {"learning_rate": 1e-30, "weight_decay": 0.0}
    run = published_run(LLAMA, tmp_path / "model", layout, lora=lora, steps=4, optimizer=optimizer)
    for outcome, recorder in pool.run(train_fully, run, checkpoint_dir=checkpoints, data_dir=text):
        assert (outcome, recorder.began_at) == (Outcome.COMPLETE, 3)
    checkpoint, manifest = find_checkpoint(checkpoints)
    assert (manifest.state.step, len(list(Path(checkpoint).glob("rank-*")))) == (4, run.layout.world_size)
    exported(checkpoints, tmp_path / "sharded")
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        assert (tmp_path / "sharded" / file).read_bytes() == (tmp_path / "one-process" / file).read_bytes()


def test_the_program_exports_an_adapter_or_says_why_not(
    pool: RankPool, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(checkpoints: Path, *words: str) -> str:
        monkeypatch.setattr("sys.argv", ["export", "--checkpoint", str(checkpoints), "--adapter", *words])
        export_program.main()
        return capsys.readouterr().out

    checkpoints = trained(pool, tmp_path, text, LLAMA, ["Query"], {})
    with pytest.raises(SystemExit):
        run(checkpoints, "--output", str(tmp_path / "x"), "--file-gib", "1")
    assert "--file-gib is not supported with --adapter" in capsys.readouterr().err
    output = tmp_path / "adapter"
    words = ["--output", str(output), "--dtype", "bf16", "--base", "organization/model"]
    assert (
        run(checkpoints, *words) == f"step 3: 1 file(s) in {output}; the tokens are bytes, without a tokenizer file\n"
    )
    assert json.loads((output / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] == "organization/model"
    assert sorted(path.name for path in output.iterdir()) == [
        ADAPTER_CONFIG, ADAPTER_WEIGHTS, "meshwright-lineage.json",
    ]  # fmt: skip
    files = TensorFiles(tmp_path / "model")
    assert {name for name in files.names if "lora" in name} == set()
    with pytest.raises(SystemExit):
        run(checkpoints, *words)
    assert "is not empty: choose a new directory" in capsys.readouterr().err


def test_what_an_adapter_does_not_contain_is_named(pool: RankPool, tmp_path: Path, text: Path) -> None:
    checkpoints = trained(pool, tmp_path, text, DEEPSEEK_V3, ["Query", "Up"], {})
    checkpoint, manifest = find_checkpoint(checkpoints)
    mixture = manifest.architecture.mixture
    assert mixture is not None
    moved = manifest.architecture.model_copy(update={"mixture": mixture.model_copy(update={"bias_rate": 0.001})})
    for change, named in (
        ({"lora": None}, "contains the full model and no adapters"),
        ({"initial_weights": None}, "random weights (`training.initialWeights` was not set)"),
        ({"architecture": moved}, "has moved the routers' biases (`model.mixture.biasRate: 0.001`)"),
        ({}, "`layers.0.feed_forward.up` has an adapter, and PEFT takes those of dense layers"),
    ):
        with pytest.raises(AdapterError) as raised:
            export_adapter(checkpoint, manifest.model_copy(update=change), tmp_path / "out", dtype=torch.float32)
        assert named in str(raised.value)
        assert not (tmp_path / "out").exists()


# transformers builds no model of DeepSeek's without experts.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    mostly_long([name for name in FAMILIES if name not in ("deepseek", "deepseek-lite")], lambda name: name == "qwen2"),
)
def test_peft_computes_the_same(pool: RankPool, tmp_path: Path, text: Path, name: str) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config, targets, _, _ = FAMILIES[name]
    checkpoints = trained(pool, tmp_path, text, config, targets, {"tensor": 2})
    exported(checkpoints, tmp_path / "adapter")
    merged(checkpoints, tmp_path / "out")
    tokens = torch.randint(0, 260, (2, 20), generator=torch.Generator().manual_seed(1))
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        plain = load(tmp_path / "model", dtype=torch.float32).eval()
        before = plain(tokens).logits
        adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
        logits = adapted(tokens).logits
        want = load(tmp_path / "out", dtype=torch.float32).eval()(tokens).logits
    assert (logits - before).abs().max() > 1e-2
    torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-5)
