"""Which rows and heads can be shared by a context group: numbers alone, before any process group forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.api.parallelism import ContextMethod
from meshwright.api.training import TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.protocol.run_config import NativeRun
from meshwright.rules.context import head_exchange_ranks, heads_divide
from meshwright.rules.nearest import nearest
from meshwright.sequence_sharding import SequenceSharding, size


def context_problems(run: NativeRun, model: Architecture, training: TrainingSpec) -> Iterator[str]:
    """What forbids the run to share its rows, each with the nearest values that work."""
    spec, context, length = run.parallelism, run.context, training.sequence_length
    if spec.context_method is ContextMethod.RING_ULYSSES:
        inner = spec.ulysses or 1
        if context % inner:
            nearest_values = nearest(inner, lambda n: context % n == 0, context)
            yield (
                f"`parallelism.ulysses: {inner}` must divide `parallelism.context: {context}`; nearest: "
                f"{nearest_values}"
            )
            return
    deal = SequenceSharding.of(run)
    if context > 1 and length < deal.min_length:
        nearest_values = nearest(
            context, lambda n: n % deal.inner == 0 and replace(deal, ranks=n).min_length <= length, length
        )
        yield (
            f"`parallelism.context: {context}` needs `training.sequenceLength: {length}` to be at least "
            f"{deal.min_length}; "
            f"nearest that fit: {nearest_values}"
        )
    elif context > 1 and model.mixture is not None and len({size(part) for part in deal.slices(length)}) > 1:
        parts = 2 * context * deal.unit
        nearest_values = nearest(length, lambda n: n % parts == 0, length + parts)
        yield (
            f"`training.sequenceLength: {length}` must split evenly over `parallelism.context: {context}` with a "
            f"`model.mixture`, whose balance is counted by sequence; nearest that do: {nearest_values}"
        )
    ranks = head_exchange_ranks(spec.context_method, context, spec.ulysses)
    if ranks > 1 and not heads_divide(model.heads, model.kv_heads, run.tensor, ranks):
        field = "context" if spec.context_method is ContextMethod.ULYSSES else "ulysses"
        nearest_values = nearest(ranks, lambda n: heads_divide(model.heads, model.kv_heads, run.tensor, n), model.heads)
        yield (
            f"`parallelism.{field}: {ranks}` times `parallelism.tensor: {run.tensor}` must divide `model.heads: "
            f"{model.heads}`, and divide `model.kvHeads: {model.kv_heads}` or be a multiple of it, for "
            f"`parallelism.contextMethod: {spec.context_method}`; nearest that fit: {nearest_values}, or use "
            "`RingZigZag`"
        )
