"""Which rows and heads can be shared by a context group: numbers alone, before any process group forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.api.parallelism import ContextMethod
from meshwright.api.rules.context import exchanging, heads_are_shared
from meshwright.api.training import TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.protocol import RunConfig
from meshwright.runs.context_slices import Deal, size
from meshwright.runs.nearest import nearest


def context_problems(run: RunConfig, model: Architecture, training: TrainingSpec) -> Iterator[str]:
    """What forbids the run to share its rows, each with the nearest values that work."""
    asked, context, length = run.parallelism, run.context, training.sequence_length
    if asked.context_method is ContextMethod.RING_ULYSSES:
        inner = asked.ulysses or 1
        if context % inner:
            fits = nearest(inner, lambda n: context % n == 0, context)
            yield f"`parallelism.ulysses: {inner}` must divide `parallelism.context: {context}`; nearest: {fits}"
            return
    deal = Deal.of(run)
    if context > 1 and length < deal.least:
        fits = nearest(context, lambda n: n % deal.inner == 0 and replace(deal, ranks=n).least <= length, length)
        yield (
            f"`parallelism.context: {context}` needs `training.sequenceLength: {length}` to be at least {deal.least}; "
            f"nearest that fit: {fits}"
        )
    elif context > 1 and model.mixture is not None and len({size(part) for part in deal.slices(length)}) > 1:
        parts = 2 * context * deal.unit
        fits = nearest(length, lambda n: n % parts == 0, length + parts)
        yield (
            f"`training.sequenceLength: {length}` must split evenly over `parallelism.context: {context}` with a "
            f"`model.mixture`, whose balance is counted by sequence; nearest that do: {fits}"
        )
    ranks = exchanging(asked.context_method, context, asked.ulysses)
    if ranks > 1 and not heads_are_shared(model.heads, model.kv_heads, run.tensor, ranks):
        field = "context" if asked.context_method is ContextMethod.ULYSSES else "ulysses"
        fits = nearest(ranks, lambda n: heads_are_shared(model.heads, model.kv_heads, run.tensor, n), model.heads)
        yield (
            f"`parallelism.{field}: {ranks}` times `parallelism.tensor: {run.tensor}` must divide `model.heads: "
            f"{model.heads}`, and divide `model.kvHeads: {model.kv_heads}` or be a multiple of it, for "
            f"`parallelism.contextMethod: {asked.context_method}`; nearest that fit: {fits}, or use `RingZigZag`"
        )
