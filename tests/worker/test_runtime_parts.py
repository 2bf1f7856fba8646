"""Parts of the runtime that need no other rank."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from meshwright.layout import split_layers
from meshwright.models.architecture import Architecture
from meshwright.models.presets import PRESETS
from meshwright_worker.distributed.mesh import find_interface
from meshwright_worker.inference.model import CachedModel
from meshwright_worker.inference.sampling import sample
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.init_weights import init_weights
from meshwright_worker.models.layers import RMSNorm, TokenLoss
from meshwright_worker.models.rotary import RotaryEmbedding

MODEL = Architecture(layers=3, hidden_size=16, intermediate_size=24, heads=4, kv_heads=2, vocab_size=257)
FAMILIES_BUILT = [PRESETS[name] for name in ("tiny-gpt", "tiny-qwen", "tiny-latent")]
CPU = torch.device("cpu")


def built(model: Architecture = MODEL, stage: int = 0, stages: int = 1, seed: int = 0) -> DecoderStage:
    with torch.device("meta"):
        decoder = DecoderStage(model, torch.float32, stage, stages)
    init_weights(decoder, model, seed, CPU)
    return decoder


def test_the_model_has_the_parameters_the_planner_counts() -> None:
    assert sum(parameter.numel() for parameter in built().parameters()) == MODEL.parameters
    tied = MODEL.model_copy(update={"tie_embeddings": True})
    assert sum(parameter.numel() for parameter in built(tied).parameters()) == tied.parameters


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_together_are_the_model(stages: int) -> None:
    whole = dict(built().named_parameters())
    parts = [dict(built(stage=stage, stages=stages).named_parameters()) for stage in range(stages)]
    assert sum(len(part) for part in parts) == len(whole)
    for part in parts:
        assert all(torch.equal(value, whole[name]) for name, value in part.items())
    assert [len({name.split(".")[1] for name in part if name.startswith("layers.")}) for part in parts] == [
        len(layers) for layers in split_layers(3, stages)
    ]


def test_a_seed_decides_the_weights() -> None:
    one, same, other = built(seed=1), built(seed=1), built(seed=2)
    assert torch.equal(one.output.weight, same.output.weight)
    assert not torch.equal(one.output.weight, other.output.weight)
    assert not torch.equal(one.output.weight, one.embedding.weight)
    assert float(one.embedding.weight.detach().std()) == pytest.approx((0.4 / 16) ** 0.5, rel=0.05)


def test_a_token_sees_no_later_one() -> None:
    decoder = built()
    tokens = torch.randint(0, 257, (1, 12))
    changed = tokens.clone()
    changed[0, 8] += 1
    before, after = decoder(tokens), decoder(changed % 257)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_rotary_attention_depends_on_distance_alone() -> None:
    rotary = RotaryEmbedding(8, 10000.0)
    query, key = torch.randn(8), torch.randn(8)
    queries, keys = rotary(query.expand(1, 10, 1, 8)), rotary(key.expand(1, 10, 1, 8))
    products = (queries[0, :, 0] @ keys[0, :, 0].T).numpy()
    for distance in range(5):
        along = products.diagonal(-distance)
        assert along == pytest.approx(along[0], rel=1e-4, abs=1e-5)


def test_rms_norm_follows_its_definition() -> None:
    norm = RMSNorm(6, 1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 6)
    want = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), want)


def test_the_loss_is_a_sum_over_tokens() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.randint(0, 5, (2, 3))
    want = -F.log_softmax(logits, -1).gather(-1, targets.unsqueeze(-1)).sum()
    torch.testing.assert_close(TokenLoss()(logits, targets), want)


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
@pytest.mark.parametrize("model", [MODEL, *FAMILIES_BUILT], ids=["llama", "gpt", "qwen", "latent"])
def test_cached_logits_are_those_of_the_whole_text(model: Architecture, cut: list[int]) -> None:
    tokens = torch.randint(0, model.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    whole = built(model)(tokens)
    cached = CachedModel(built(model), model, 12)
    parts = [cached.read(part) for part in tokens.split(cut, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole.float(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="13 tokens do not fit a cache of 12"):
        cached.read(tokens[:, :1])


@pytest.mark.long
def test_generate_without_a_checkpoint_says_so(tmp_path: object) -> None:
    command = [sys.executable, "-m", "meshwright_worker.generate", "--checkpoint", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": "worker:."})
    assert ended.returncode == 2
    assert "holds no complete checkpoint" in ended.stderr


@pytest.mark.skipif("lo" not in {name for _, name in socket.if_nameindex()}, reason="no loopback interface")
def test_interfaces() -> None:
    assert find_interface("127.0.0.1") == find_interface("127.8.0.3") == "lo"
    assert find_interface("192.0.2.77") is None
