"""Stages of equal time instead of equal length, for the leaders of a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.api.training import ActivationCheckpointing
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.expand import memory_if_fits, price
from meshwright.planner.search.request import SearchRequest
from meshwright.schedules.flop_costs import layer_costs, output_costs
from meshwright.schedules.partition import partition_layers

_WHOLE_LAYERS = (ActivationCheckpointing.FULL, ActivationCheckpointing.SQRT)


def balance_candidates(request: SearchRequest, found: list[Candidate]) -> list[Candidate]:
    """The few whose stages are worth balancing."""
    if not request.techniques.uneven_split:
        return []
    piped = [one for one in found if one.choices.pipeline > 1 and not one.choices.schedule_kind.folded]
    return sorted(piped, key=lambda f: f.score(request.objective))[:12]


def with_balanced_stages(request: SearchRequest, one: Candidate) -> Iterator[Candidate]:
    """The same layout with layers dealt by cost: embedding and logits count as the layers they are worth."""
    model, choices = request.work.model, one.choices
    if choices.virtual_stages > 1:
        return
    again, length, causal = choices.checkpointing in _WHOLE_LAYERS, request.work.sequence_length, request.work.causal
    costs = [layer_costs(model, length, layer, recomputes=again, causal=causal).total for layer in range(model.layers)]
    split = partition_layers(costs, choices.pipeline, last=output_costs(model).total)
    changed = replace(choices, layer_split=split)
    memory = memory_if_fits(request, changed) if request.techniques.allow(request.work, changed) else None
    if memory is not None:
        better = Candidate(changed, price(request, changed, memory), request.node)
        if better.seconds < one.seconds:
            yield better
