"""Training that begins from an adapter in the format of PEFT: the same outputs in any layout, and the same files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.precision import Precision
from meshwright.protocol.messages import FailureKind
from meshwright.protocol.run_config import NativeRun
from meshwright_worker import export as export_program
from meshwright_worker.checkpoint.full_tensors import find_checkpoint
from meshwright_worker.inference.model import load_full_model
from meshwright_worker.pretrained.peft_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from meshwright_worker.rank.task import Outcome
from tests.distributed.cases import train_fully
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_adapter_export import EVERY, exported, trained
from tests.distributed.test_base_weights import refused
from tests.distributed.test_pretrained import published_run
from tests.pretrained.peft_files import ALPHA, LLAMA_ENDS, RANK, merged_by_hand, random_adapter, write_adapter
from tests.pretrained.published import DEEPSEEK_V2, GEMMA3, GPT2, LLAMA, MIXTRAL, PHI3, random_weights, write_model
from tests.tiers import mostly_long

# A rate of next to nothing: after the steps, the parameters are those that were read.
STILL = {"learning_rate": 1e-30, "weight_decay": 0.0}
GPT2_ENDS = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
PHI3_ENDS = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
ALL, ATTENTION = list(LLAMA_ENDS.values()), list(LLAMA_ENDS.values())[:4]
# Family, targets, ends of the paths of their modules, and a layout.
CASES: dict[str, tuple[dict[str, Any], list[str], list[str], dict[str, Any]]] = {
    "llama": (LLAMA, EVERY, ALL, {"tensor": 2, "pipeline": 2}),
    "llama, ZeRO-3": (LLAMA, EVERY, ALL, {"data": 2, "zero": 3}),
    "gpt2": (GPT2, EVERY, GPT2_ENDS, {"tensor": 2}),
    "gpt2, ZeRO-3": (GPT2, EVERY, GPT2_ENDS, {"tensor": 2, "data": 2, "zero": 3}),
    "phi3": (PHI3, EVERY, PHI3_ENDS, {"tensor": 2}),
    "phi3, ZeRO-3": (PHI3, EVERY, PHI3_ENDS, {"tensor": 2, "data": 2, "zero": 3}),
    "gemma3": (GEMMA3, EVERY, ALL, {"tensor": 2, "data": 2, "zero": 3}),
    "mixtral": (MIXTRAL, EVERY[:4], ATTENTION, {"tensor": 2, "data": 2, "expert": 2}),
    "deepseek-v2": (DEEPSEEK_V2, ["Query", "Output"], ["q_b_proj", "o_proj"], {"data": 2, "zero": 3}),
}  # fmt: skip


def from_adapter(
    config: dict[str, Any], model: Path, adapter: Path, targets: list[str], layout: dict[str, Any], **training: Any
) -> NativeRun:
    lora = {"rank": RANK, "alpha": ALPHA, "targets": targets, "initial_adapter": str(adapter)}
    return published_run(config, model, layout, lora=lora, **{"steps": 2, "optimizer": STILL, **training})


def first_loss(pool: RankPool, run: NativeRun, text: Path, checkpoints: Path | None = None) -> float:
    outcome, recorder = pool.run(train_fully, run, checkpoint_dir=checkpoints, data_dir=text)[0]
    assert outcome is Outcome.COMPLETE
    loss: float = recorder.reports[0].loss
    return loss


@pytest.mark.parametrize("name", mostly_long(CASES, lambda name: name in ("llama", "gpt2", "phi3", "deepseek-v2")))
def test_a_run_continues_an_adapter_in_any_layout(pool: RankPool, tmp_path: Path, text: Path, name: str) -> None:
    """Its first loss is that of the model into which the adapter is merged by hand, and its export has the tensors."""
    config, targets, ends, layout = CASES[name]
    tensors = random_adapter(config, ends)
    model = write_model(tmp_path / "model", config, random_weights(config))
    merged = write_model(tmp_path / "merged", config, merged_by_hand(config, tensors))
    adapter = write_adapter(tmp_path / "adapter", tensors)
    run = from_adapter(config, model, adapter, targets, layout)
    loss = first_loss(pool, run, text, tmp_path / "checkpoints")
    assert loss == pytest.approx(first_loss(pool, published_run(config, merged, {}, steps=2), text), rel=1e-5)
    if name == "llama":
        assert loss != pytest.approx(first_loss(pool, published_run(config, model, {}, steps=2), text), rel=1e-3)
    _, written = exported(tmp_path / "checkpoints", tmp_path / "again")
    if config not in (GPT2, PHI3):
        assert written.keys() == tensors.keys()
        assert all(torch.equal(written[key], tensor) for key, tensor in tensors.items())
    # What Meshwright has written is read in one process, and written again byte by byte.
    first_loss(pool, from_adapter(config, model, tmp_path / "again", targets, {}), text, tmp_path / "alone")
    exported(tmp_path / "alone", tmp_path / "once-more")
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        assert (tmp_path / "once-more" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def test_a_resumed_run_needs_its_first_adapter_no_more(pool: RankPool, tmp_path: Path, text: Path) -> None:
    model = write_model(tmp_path / "model", LLAMA, random_weights(LLAMA))
    adapter = write_adapter(tmp_path / "adapter", random_adapter(LLAMA, ["q_proj"]))
    first = from_adapter(LLAMA, model, adapter, ["Query"], {"data": 2}, steps=2)
    pool.run(train_fully, first, checkpoint_dir=tmp_path / "checkpoints", data_dir=text)
    shutil.rmtree(adapter)
    checkpoint, manifest = find_checkpoint(tmp_path / "checkpoints")
    assert "initialAdapter" not in json.loads((Path(str(checkpoint)) / "meshwright.json").read_text())["lora"]
    assert manifest.lora is not None
    without = published_run(LLAMA, model, {}, lora=manifest.lora.model_dump(), steps=4, optimizer=STILL)
    for run in (from_adapter(LLAMA, model, adapter, ["Query"], {"tensor": 2}, steps=3), without):
        for outcome, recorder in pool.run(train_fully, run, checkpoint_dir=tmp_path / "checkpoints", data_dir=text):
            assert (outcome, recorder.began_at) == (Outcome.COMPLETE, run.training.steps - 1)


def test_an_adapter_does_not_begin_over_other_weights_than_its_own(
    pool: RankPool, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = trained(pool, tmp_path, text, LLAMA, ["Query"], {})
    words = ["export", "--checkpoint", str(checkpoints), "--adapter", "--output", str(tmp_path / "adapter")]
    monkeypatch.setattr("sys.argv", words)
    export_program.main()
    other = write_model(tmp_path / "other", LLAMA, random_weights(LLAMA, 1))
    fits = from_adapter(LLAMA, tmp_path / "model", tmp_path / "adapter", ["Query"], {})
    assert first_loss(pool, fits, text) > 0
    run = from_adapter(LLAMA, other, tmp_path / "adapter", ["Query"], {})
    (answer,) = pool.run(refused, run, data_dir=text)
    kind, message = answer.value
    assert kind is FailureKind.INVALID_INPUT
    assert f"`training.initialWeights: {other}` has other weights (fingerprint " in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "targets", "names", "options"),
    mostly_long(
        [
            (LLAMA, EVERY, ALL, {}),
            (LLAMA, ["Query", "Value"], ["q_proj", "v_proj"], {"use_rslora": True}),
            (GPT2, EVERY, ["c_attn", "c_proj", "c_fc"], {}),
            (PHI3, EVERY, PHI3_ENDS, {}),
            (MIXTRAL, EVERY[:4], ATTENTION, {}),
            (DEEPSEEK_V2, ["Query", "Output"], ["q_b_proj", "o_proj"], {}),
        ],
        lambda case: case[0] is LLAMA and not case[3],
    ),
    ids=["llama", "llama, rsLoRA", "gpt2", "phi3", "mixtral", "deepseek-v2"],
)
def test_peft_computes_the_same(
    pool: RankPool,
    tmp_path: Path,
    text: Path,
    config: dict[str, Any],
    targets: list[str],
    names: list[str],
    options: dict[str, Any],
) -> None:
    """An adapter that PEFT itself has written: its logits are those of the run."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model = write_model(tmp_path / "model", config, random_weights(config))
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    torch.manual_seed(5)
    settings = {"task_type": "CAUSAL_LM", "init_lora_weights": False, "target_modules": names, **options}
    adapted = peft.get_peft_model(plain, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, **settings)).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    run = from_adapter(config, model, tmp_path / "adapter", targets, {"tensor": 2})
    if options:
        assert run.training.lora is not None
        scaled = run.training.lora.model_copy(update={"alpha": ALPHA * RANK**0.5})
        run = run.model_copy(update={"training": run.training.model_copy(update={"lora": scaled})})
    first_loss(pool, run, text, tmp_path / "checkpoints")
    checkpoint, manifest = find_checkpoint(tmp_path / "checkpoints")
    tokens = torch.randint(0, 260, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = adapted(tokens).logits
        with adapted.disable_adapter():
            assert (adapted(tokens).logits - want).abs().max() > 1e-2
        logits = load_full_model(checkpoint, manifest, Precision.FP32, 20).read(tokens)
    # Without an adapter, too, DeepSeek's logits of transformers in fp32 are 2e-4 from those of the runtime in fp64.
    torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-3 if config is DEEPSEEK_V2 else 1e-5)
