"""Mixtures of experts on one rank against the papers' equations, token by token."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.api.mixture import Balancing, MixtureSpec, Router
from meshwright.api.model import ModelSpec
from meshwright.api.parallelism import ParallelismSpec
from meshwright.models.architecture import Architecture
from meshwright.models.mixture import capacity
from meshwright.rules.facts import ResolvedFacts
from meshwright.rules.mixture import MIXTURE_RULES
from meshwright.rules.model import MODEL_RULES
from meshwright_worker.agent.metrics import WorkerMetrics
from meshwright_worker.models import grouped_mm
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.grouped_mm import grouped_mm_kernel, grouped_mm_loop
from meshwright_worker.models.init_weights import init_weights
from meshwright_worker.models.load_balancing import LoadBalancer, SequencePartition
from meshwright_worker.models.moe import Experts, MixtureOfExperts, iter_moe_layers
from meshwright_worker.models.router import Routing, select_experts

HIDDEN, WIDTH, BATCH, LENGTH = 12, 8, 2, 10


def mixture_of(**fields: Any) -> MixtureSpec:
    return MixtureSpec(**{"experts": 6, "per_token": 2, "intermediate_size": WIDTH, **fields})


def built(spec: MixtureSpec, seed: int = 0) -> MixtureOfExperts:
    model = Architecture(
        layers=2, hidden_size=HIDDEN, intermediate_size=16, heads=2, kv_heads=2, vocab_size=257, mixture=spec
    )
    module = MixtureOfExperts(model).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return module


def tokens(seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, LENGTH, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()


def expert(experts: Experts, index: int, x: torch.Tensor) -> torch.Tensor:
    return experts.down[index] @ (F.silu(experts.gate[index] @ x) * (experts.up[index] @ x))


def gradients(y: torch.Tensor, module: MixtureOfExperts, x: torch.Tensor) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    found = torch.autograd.grad((y * weights).sum(), [x, *module.parameters()])
    return list(found)


def check(module: MixtureOfExperts, by_token: Any) -> None:
    x = tokens()
    want = torch.stack([torch.stack([by_token(module, row) for row in rows]) for rows in x])
    got = module(x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for mine, expected in zip(gradients(got, module, x), gradients(want, module, x), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-11)


def mixtral(module: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """arXiv 2401.04088, section 2.1: softmax over the logits of the two best."""
    best = (module.router.weight @ x).topk(2)
    shares = best.values.softmax(0)
    parts = [share * expert(module.experts, int(i), x) for share, i in zip(shares, best.indices, strict=True)]
    return torch.stack(parts).sum(0)


def switch(module: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """arXiv 2101.03961, equations 1 and 2, with one expert: its output times its probability."""
    shares = (module.router.weight @ x).softmax(0)
    index = int(shares.argmax())
    return shares[index] * expert(module.experts, index, x)


def deepseek(module: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """arXiv 2412.19437, equations 12 to 16: the bias takes part in the choice alone."""
    assert module.router.bias is not None
    assert module.shared is not None
    scores = (module.router.weight @ x).sigmoid()
    wanted = (scores + module.router.bias).detach()
    groups = wanted.view(3, 2)
    open_groups = groups.sum(1).topk(2).indices.tolist()
    allowed = [2 * group + place for group in open_groups for place in range(2)]
    best = sorted(allowed, key=lambda i: -float(wanted[i]))[:3]
    total = torch.stack([scores[i] for i in best]).sum()
    routed = [2.5 * scores[i] / total * expert(module.experts, i, x) for i in best]
    shared = module.shared
    both = F.silu(shared.gate.weight @ x) * (shared.up.weight @ x)
    return torch.stack(routed).sum(0) + shared.down.weight @ both


def test_top_two_of_softmax_is_mixtral() -> None:
    check(built(mixture_of()), mixtral)


def test_top_one_is_switch() -> None:
    check(built(mixture_of(per_token=1, renormalize=False)), switch)


def test_sigmoid_groups_bias_and_shared_experts_are_deepseek_v3() -> None:
    spec = mixture_of(
        per_token=3, groups=3, groups_per_token=2, router=Router.SIGMOID, balancing=Balancing.BIAS, scaling=2.5,
        shared_intermediate_size=10,
    )  # fmt: skip
    module = built(spec)
    assert module.router.bias is not None
    module.router.bias.copy_(torch.tensor([0.3, -0.2, 0.0, 0.4, -0.5, 0.1]))
    check(module, deepseek)


def test_groups_of_softmax_go_by_their_best_expert() -> None:
    spec = mixture_of(per_token=2, groups=3, groups_per_token=1)
    scores = torch.tensor([[0.30, 0.01, 0.25, 0.24, 0.15, 0.05]])
    assert select_experts(scores, spec).tolist() == [[0, 1]]
    sigmoid = spec.model_copy(update={"router": Router.SIGMOID})
    assert select_experts(scores, sigmoid).tolist() == [[2, 3]]


def test_an_expert_takes_the_first_tokens_of_each_sequence_up_to_its_capacity() -> None:
    spec = mixture_of(experts=2, per_token=1, renormalize=False, capacity_factor=0.8)  # ceil(0.8 * 10 / 2) = 4
    module, x = built(spec), tokens()
    with torch.no_grad():
        routes = module.router(x).experts.squeeze(-1).tolist()
        y = module(x)
    for row, route in enumerate(routes):
        room = {0: 4, 1: 4}
        for place, index in enumerate(route):
            room[index] -= 1
            want = switch(module, x[row, place]) if room[index] >= 0 else torch.zeros(HIDDEN)
            torch.testing.assert_close(y[row, place], want.to(y), rtol=1e-12, atol=1e-12)
    assert any(route.count(0) != 5 for route in routes)
    assert any(max(route.count(0), route.count(1)) > 4 for route in routes)


def routing_of(experts: list[list[int]], scores: torch.Tensor) -> Routing:
    chosen_ones = torch.tensor([experts])
    return Routing(chosen_ones, torch.ones_like(chosen_ones, dtype=scores.dtype), scores, scores.log())


@pytest.mark.parametrize(
    ("factor", "experts", "per_token", "length", "want"),
    [(1.1, 10, 1, 100, 11), (1.1, 4, 2, 100, 55), (1.25, 8, 2, 10, 4), (1.0, 3, 1, 10, 4)],
)
def test_a_capacity_is_rounded_up_from_the_factor_as_written(
    factor: float, experts: int, per_token: int, length: int, want: int
) -> None:
    assert capacity(mixture_of(experts=experts, per_token=per_token, capacity_factor=factor), length) == want


def test_balancing_biases_move_by_small_steps_with_any_parameters() -> None:
    spec = mixture_of(balancing=Balancing.BIAS)
    model = Architecture(
        layers=1, hidden_size=HIDDEN, intermediate_size=16, heads=2, kv_heads=2, vocab_size=257, mixture=spec
    )
    with torch.device("meta"):
        stage = DecoderStage(model, torch.bfloat16).to(torch.bfloat16)
    init_weights(stage, model, 0, torch.device("cpu"))
    ((_, mixture),) = iter_moe_layers(stage)
    assert mixture.router.weight.dtype is torch.bfloat16
    assert mixture.router.bias.dtype is torch.float32


def test_the_auxiliary_loss_is_switchs_and_one_when_balanced() -> None:
    spec = mixture_of(experts=4, per_token=1, renormalize=False)
    even = torch.full((1, 4, 4), 0.25, dtype=torch.float64)
    auxiliary, z = LoadBalancer(spec, SequencePartition()).losses(routing_of([[0], [1], [2], [3]], even))
    assert float(auxiliary) / 4 == pytest.approx(1.0)  # summed over the four tokens
    assert float(z) == pytest.approx(0.0)  # the logs of probabilities sum up to one
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(1, 4, 4, dtype=torch.float64, generator=generator).softmax(-1)
    auxiliary, _ = LoadBalancer(spec, SequencePartition()).losses(routing_of([[0], [0], [0], [2]], scores))
    fractions, means = [0.75, 0, 0.25, 0], scores[0].mean(0).tolist()
    assert float(auxiliary) / 4 == pytest.approx(4 * sum(f * p for f, p in zip(fractions, means, strict=True)))


def test_the_z_loss_is_the_squared_log_sum_exp() -> None:
    logits = torch.tensor([[[1.0, 2.0, -1.0], [0.5, 0.0, 3.0]]], dtype=torch.float64)
    routing = Routing(torch.tensor([[[1], [2]]]), logits[..., :1], logits.softmax(-1), logits)
    _, z = LoadBalancer(mixture_of(experts=3, per_token=1, renormalize=False), SequencePartition()).losses(routing)
    assert float(z) == pytest.approx(sum(math.log(sum(map(math.exp, row))) ** 2 for row in logits[0].tolist()))


def test_balancing_losses_reach_the_gradient_without_a_way_to_the_last_stage() -> None:
    spec = mixture_of(auxiliary_weight=0.3, z_loss_weight=0.2)
    module, x = built(spec), tokens()
    module.routing_stats.loss_weight = 0.05
    weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
    got = torch.autograd.grad((module(x) * weights).sum(), [x, module.router.weight])
    routed = module.route(x)
    module.routing_stats.loss_weight = 0.0
    y = module(x)
    want = torch.autograd.grad((y * weights).sum() + 0.05 * routed.balancing_loss, [x, module.router.weight])
    for mine, expected in zip(got, want, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_recomputed_micro_batches_are_counted_once_and_evaluation_never() -> None:
    module, x = built(mixture_of()), tokens()
    with torch.no_grad():
        module(x)
    assert not module.routing_stats.take(x.device).any()
    for reentrant in (False, True):
        y = checkpoint(module, x, use_reentrant=reentrant)
        y.sum().backward()
        assert float(module.routing_stats.take(x.device)[:6].sum()) == BATCH * LENGTH * 2


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [10, 0, 0, 0], [0, 0, 0, 10]])
def test_the_grouped_kernel_computes_what_the_loop_does(counts: list[int]) -> None:
    rows = torch.randn(10, 16, requires_grad=True)
    weight = torch.randn(4, 8, 16, requires_grad=True)
    sizes = torch.tensor(counts)
    got, want = grouped_mm_kernel(rows, weight, sizes), grouped_mm_loop(rows, weight, sizes)
    torch.testing.assert_close(got, want)
    gradient = torch.randn_like(want)
    for mine, expected in zip(
        torch.autograd.grad(got, [rows, weight], gradient),
        torch.autograd.grad(want, [rows, weight], gradient),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected)


def test_every_expert_gets_a_gradient_when_no_row_came() -> None:
    experts = Experts(2, HIDDEN, WIDTH)
    rows = torch.empty(0, HIDDEN, requires_grad=True)
    experts(rows, torch.tensor([0, 0])).sum().backward()
    assert all(parameter.grad is not None for parameter in experts.parameters())


@pytest.mark.parametrize(
    "fields",
    [{}, {"dense_layers": 1}, {"every": 2, "shared_intermediate_size": 4}, {"balancing": Balancing.BIAS}],
    ids=str,
)
def test_a_model_has_the_parameters_that_are_counted(fields: dict[str, Any]) -> None:
    model = Architecture(
        layers=4, hidden_size=16, intermediate_size=24, heads=4, kv_heads=2, vocab_size=257,
        mixture=mixture_of(**fields),
    )  # fmt: skip
    with torch.device("meta"):
        stage = DecoderStage(model, torch.float32)
    held = [*stage.parameters(), *stage.buffers()]
    assert sum(tensor.numel() for tensor in held) == model.parameters


def test_the_page_names_what_there_is() -> None:
    page = (Path(__file__).parents[3] / "docs" / "experts.md").read_text()
    (example,) = re.findall(r"```yaml[^\n]*\n(.*?)```", page, re.DOTALL)
    model = ModelSpec.model_validate(yaml.safe_load(example)["model"])
    assert model.mixture is not None
    assert [
        rule.message
        for rule in (*MODEL_RULES, *MIXTURE_RULES)
        if not rule.holds(ResolvedFacts(1, ParallelismSpec(), model, None, None))
    ] == []
    exported = {family.name for family in WorkerMetrics("namespace", "job").registry.collect()}
    assert set(re.findall(r"`(ptj_\w+)`", page)) <= exported
    fields = {info.alias for info in MixtureSpec.model_fields.values()}
    table = page.split("## Routing")[0].split("| as in")[1]
    assert set(re.findall(r"`([a-z]\w+)[:`]", table)) <= fields


@pytest.mark.parametrize("rows", [7, 16])
def test_how_many_rows_there_are_decides_no_kernel(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    widths: list[tuple[int, ...]] = []
    judge = grouped_mm._has_kernel

    def noted(given: torch.Tensor, *asked: int) -> bool:
        widths.append(asked)
        with FakeTensorMode():
            judged.append(judge(torch.empty(given.shape, dtype=torch.bfloat16, device="cuda"), *asked))
        return False

    judged: list[bool] = []
    monkeypatch.setattr(grouped_mm, "_has_kernel", noted)
    counts = torch.tensor([3, rows - 3])
    x, weight = torch.ones(rows, 24), torch.ones(2, 12, 24)
    grouped_mm.grouped_linear(x, weight, counts)
    assert grouped_mm.grouped_weight_grad(torch.ones(rows, 32), x, counts).shape == (2, 32, 24)
    assert widths == [(12, 24), (32, 24)]
    # 12 numbers of bf16 are 24 bytes.
    assert judged == [False, True]
