"""A decoder and its layers, in one process."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from meshwright.layout import split_layers
from meshwright_worker.data.batch import TokenMetadata
from meshwright_worker.models.attention import AttentionCore
from meshwright_worker.models.layers import RMSNorm, TokenLoss
from meshwright_worker.models.rotary import RotaryEmbedding
from tests.worker.stages import MODEL, built


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


def test_rotary_attention_depends_only_on_distance() -> None:
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


def test_values_padded_to_the_size_of_keys_change_nothing() -> None:
    generator = torch.Generator().manual_seed(2)
    shapes = [(4, 24), (2, 24), (2, 16), (4, 16)]
    tensors = [torch.randn(2, 9, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    gradients = []
    for pads in (False, True):
        core = AttentionCore()
        core.pads_values = pads
        leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
        attended = core(*leaves, TokenMetadata())
        attended.backward(tensors[3])
        gradients.append([attended, *(leaf.grad for leaf in leaves)])
    for padded, plain in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-12, atol=1e-12)
