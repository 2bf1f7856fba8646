"""Stages of equal time instead of equal length, for the leaders of a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.planner.search.fill import FOLDED, memory_in, price
from meshwright.planner.search.found import Found
from meshwright.planner.search.request import Request
from meshwright.planner.search.split import balanced


def leaders(request: Request, found: list[Found]) -> list[Found]:
    """The few whose stages are worth balancing."""
    if not request.techniques.uneven_split:
        return []
    piped = [one for one in found if one.choices.pipeline > 1 and one.choices.schedule not in FOLDED]
    return sorted(piped, key=lambda f: f.score(request.objective))[:12]


def uneven(request: Request, one: Found) -> Iterator[Found]:
    """The same layout with layers dealt by cost: embedding and logits count as the layers they are worth."""
    model, choices = request.work.model, one.choices
    if choices.virtual_stages > 1:
        return
    per_layer = [_layer_cost(request, layer) for layer in range(model.layers)]
    head = 6.0 * model.hidden * model.vocab
    split = balanced(per_layer, choices.pipeline, first=0.0, last=head)
    changed = replace(choices, layer_split=split)
    memory = memory_in(request, changed) if request.techniques.allow(request.work, changed) else None
    if memory is not None:
        better = Found(changed, price(request, changed, memory), request.node)
        if better.seconds < one.seconds:
            yield better


def _layer_cost(request: Request, layer: int) -> float:
    """FLOPs per token of one layer, forward and backward."""
    model = request.work.model
    head = model.head_size
    attention = model.hidden * (2 * model.heads * head + 2 * model.kv_heads * head)
    scores = model.heads * head * request.work.sequence_length * (1 if request.work.causal else 2)
    matrices = 3 if model.gated else 2
    if model.experts is not None and model.is_mixture(layer):
        width = model.experts.per_token * model.experts.intermediate + model.experts.shared_intermediate
    else:
        width = model.intermediate
    return 6.0 * (attention + scores + matrices * model.hidden * width)
