"""Models pass between the frameworks in the format of Hugging Face: exported ones out, those of their checkpoints in.

`FRAMEWORKS_PYTHON` names an interpreter with transformers and DeepSpeed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch

from meshwright_worker.checkpoint.full_tensors import find_checkpoint
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.pretrained.hf_export import export
from tests.distributed.cases import train_fully
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_pretrained import published_run
from tests.patience import patient
from tests.pretrained.published import LLAMA, random_weights, write_model
from tests.pretrained.test_published_models import loaded

pytestmark = pytest.mark.long
SCRIPT = Path(__file__).with_name("framework_models.py")
TOKENS = torch.arange(40).reshape(2, 20)


def logits(stage: DecoderStage) -> torch.Tensor:
    """What a model of the runtime answers."""
    with torch.no_grad():
        return stage(TOKENS).float()


def test_models_pass_between_frameworks(pool: RankPool, tmp_path: Path, text: Path) -> None:
    python = os.environ.get("FRAMEWORKS_PYTHON")
    if python is None:
        pytest.skip("set FRAMEWORKS_PYTHON")
    base = write_model(tmp_path / "base", LLAMA, random_weights(LLAMA))
    pool.run(
        train_fully, published_run(LLAMA, base, {"tensor": 2}, steps=2),
        checkpoint_dir=tmp_path / "checkpoints", data_dir=text,
    )  # fmt: skip
    checkpoint, manifest = find_checkpoint(tmp_path / "checkpoints")
    export(checkpoint, manifest, tmp_path / "exported", dtype=torch.float32, file_bytes=1 << 30)
    output = tmp_path / "output"
    output.mkdir()
    port = str(random.randint(20000, 29000))  # noqa: S311 - spreading, not secrecy
    done = subprocess.run(  # noqa: S603 - the interpreter is the tester's
        [python, str(SCRIPT), str(tmp_path / "exported"), str(output), port],
        capture_output=True, text=True, check=False, timeout=patient(900),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    def answers(name: str) -> torch.Tensor:
        return torch.load(output / f"{name}.logits", weights_only=True)

    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    own = logits(loaded(tmp_path / "exported", config))
    torch.testing.assert_close(
        answers("exported"), own, rtol=1e-4, atol=1e-4, msg="transformers loads what is exported"
    )
    seen = [answers("trainer")]
    for name in ("trainer", "deepspeed", "fully_shard"):
        directory = output / f"{name}-model"
        config = json.loads((directory / "config.json").read_text())
        torch.testing.assert_close(logits(loaded(directory, config)), answers(name), rtol=1e-4, atol=1e-4)
        seen.append(answers(name))
    assert not torch.allclose(seen[1], seen[2], atol=1e-3), "each was trained"
