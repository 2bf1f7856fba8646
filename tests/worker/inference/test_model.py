"""Generation with a cache, in one process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from meshwright.models.architecture import Architecture
from meshwright_worker.inference.model import CachedModel
from meshwright_worker.inference.sampling import sample
from tests.worker.stages import FAMILIES_BUILT, MODEL, built


def test_the_likeliest_token_needs_no_luck() -> None:
    texts = [sample(CachedModel(built(), MODEL, 16), [1, 2], 8, 0.0, seed) for seed in (0, 1)]
    assert texts[0] == texts[1]
    tokens = [1, 2]
    for _ in range(8):
        tokens.append(int(built()(torch.tensor([tokens]))[0, -1].argmax()))
    assert texts[0] == tokens[2:]


def test_a_full_memory_is_read_again_from_its_half() -> None:
    text = [1, 2, 3]
    for size in range(3, 11):
        seen = text if size <= 8 else text[-(size - 5) :]
        text.append(int(built()(torch.tensor([seen]))[0, -1].argmax()))
    assert sample(CachedModel(built(), MODEL, 8), [1, 2, 3], 8, 0.0, 0) == text[3:]


@pytest.mark.parametrize("cut", [[12], [1] * 12, [5, 1, 6]])
@pytest.mark.parametrize(
    "model",
    [MODEL, *FAMILIES_BUILT, MODEL.model_copy(update={"sliding_window": 3})],
    ids=["llama", "gpt", "qwen", "latent", "sliding window"],
)
def test_cached_logits_are_those_of_the_full_text(model: Architecture, cut: list[int]) -> None:
    tokens = torch.randint(0, model.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    whole = built(model)(tokens)
    cached = CachedModel(built(model), model, 12)
    parts = [cached.read(part) for part in tokens.split(cut, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole.float(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="13 tokens do not fit a cache of 12"):
        cached.read(tokens[:, :1])


@pytest.mark.long
def test_generate_without_a_checkpoint_is_an_error(tmp_path: object) -> None:
    command = [sys.executable, "-m", "meshwright_worker.generate", "--checkpoint", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": "worker:."})
    assert ended.returncode == 1, "2 is for wrong usage"
    assert ended.stderr.endswith(f"error: `--checkpoint {tmp_path}` contains no complete checkpoint\n")
    assert "usage" not in ended.stderr
