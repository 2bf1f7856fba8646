"""Rules on context parallelism, and on techniques that need full sequences."""

from __future__ import annotations

from meshwright.api.parallelism import ContextMethod
from meshwright.rules.facts import Facts, sequence_unit
from meshwright.rules.rule import Rule
from meshwright.sequence_sharding import SequenceSharding

_TENSOR = "(has(self.parallelism.tensor) ? self.parallelism.tensor : 1)"
_UNIT = f"(self.parallelism.sequence ? {_TENSOR} : 1)"
_ULYSSES = "(has(self.parallelism.ulysses) ? self.parallelism.ulysses : 1)"
_RING_GROUP = f"(self.parallelism.contextMethod == 'RingUlysses' ? {_ULYSSES} : 1)"
_MIN_LENGTH = (
    "(self.parallelism.contextMethod in ['Ring', 'Ulysses'] ? self.parallelism.context"
    f" : 2 * (self.parallelism.context / {_RING_GROUP}) * (({_RING_GROUP} + 1) / 2)) * {_UNIT}"
)
_KV_HEADS = "(has(self.model.kvHeads) ? self.model.kvHeads : self.model.heads)"


def heads_divide(heads: int, kv_heads: int, tensor: int, head_exchange_ranks: int) -> bool:
    """Whether heads divide over a tensor group and then over the ranks that exchange them.

    If there are fewer key and value heads than ranks, several ranks have the same head.
    """
    ranks = tensor * head_exchange_ranks
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def head_exchange_ranks(method: ContextMethod, context: int, ulysses: int | None) -> int:
    """Number of ranks of a context group that exchange heads for tokens."""
    return context if method is ContextMethod.ULYSSES else (ulysses or 1)


def _sequence_long_enough(facts: Facts) -> bool:
    p = facts.parallelism
    if p.context_or_default == 1 or facts.training is None:
        return True
    method = p.context_method_or_default
    inner = (p.ulysses or 1) if method is ContextMethod.RING_ULYSSES else 1
    sharding = SequenceSharding(method, p.context_or_default, sequence_unit(p), inner)
    return facts.training.sequence_length >= sharding.min_length


def _sequence_splits_evenly(facts: Facts) -> bool:
    context, training = facts.parallelism.context_or_default, facts.training
    if context == 1 or training is None or facts.model is None or facts.model.mixture is None:
        return True
    return training.sequence_length % (context * sequence_unit(facts.parallelism)) == 0


def _ulysses_divides_context(facts: Facts) -> bool:
    p = facts.parallelism
    if p.ulysses is None:
        return p.context_method_or_default is not ContextMethod.RING_ULYSSES
    return p.context_method_or_default is ContextMethod.RING_ULYSSES and p.context_or_default % p.ulysses == 0


def _heads_exchange(facts: Facts, method: ContextMethod) -> bool:
    p, model = facts.parallelism, facts.model
    if p.context_method_or_default is not method or model is None or model.heads is None:
        return True
    ranks = head_exchange_ranks(method, p.context_or_default, p.ulysses)
    return ranks == 1 or heads_divide(model.heads, model.kv_heads or model.heads, p.tensor or 1, ranks)


def _heads_exchange_cel(method: ContextMethod, ranks: str) -> str:
    group = f"({ranks} * {_TENSOR})"
    return (
        f"!has(self.model) || !has(self.model.heads) || self.parallelism.contextMethod != '{method}' || {ranks} == 1"
        f" || (self.model.heads % {group} == 0 && ({_KV_HEADS} % {group} == 0 || {group} % {_KV_HEADS} == 0))"
    )


def _attention_dropout_sees_whole_rows(facts: Facts) -> bool:
    dropout = facts.training is not None and facts.training.attention_dropout > 0
    return not dropout or facts.parallelism.context_or_default == 1


def _capacity_counts_whole_rows(facts: Facts) -> bool:
    mixture = facts.model.mixture if facts.model is not None else None
    return mixture is None or mixture.capacity_factor is None or facts.parallelism.context_or_default == 1


CONTEXT_RULES: tuple[Rule[Facts], ...] = (
    Rule(
        "parallelism.context",
        "must leave each rank at least two tokens of `training.sequenceLength` (one with `contextMethod: Ring` or "
        "`Ulysses`), times `parallelism.tensor` with `sequence: true`: lower it, or raise the sequence length",
        f"self.parallelism.context == 1 || !has(self.training) || self.training.sequenceLength >= {_MIN_LENGTH}",
        _sequence_long_enough,
    ),
    Rule(
        "training.sequenceLength",
        "must be a multiple of `parallelism.context` (times `parallelism.tensor` with `sequence: true`) with "
        "`model.mixture`, because experts are balanced by sequence: change the length or the degree",
        "self.parallelism.context == 1 || !has(self.training) || !has(self.model) || !has(self.model.mixture)"
        f" || self.training.sequenceLength % (self.parallelism.context * {_UNIT}) == 0",
        _sequence_splits_evenly,
    ),
    Rule(
        "parallelism.ulysses",
        "is required with `parallelism.contextMethod: RingUlysses`, is not supported with other methods, and must "
        "divide `parallelism.context`",
        "has(self.parallelism.ulysses) == (self.parallelism.contextMethod == 'RingUlysses')"
        f" && self.parallelism.context % {_ULYSSES} == 0",
        _ulysses_divides_context,
    ),
    Rule(
        "parallelism.context",
        "times `parallelism.tensor` must divide `model.heads` with `contextMethod: Ulysses`, and must divide "
        "`model.kvHeads` or be a multiple of it, because ranks exchange heads: change a degree, or use "
        "`contextMethod: RingZigZag`",
        _heads_exchange_cel(ContextMethod.ULYSSES, "self.parallelism.context"),
        lambda facts: _heads_exchange(facts, ContextMethod.ULYSSES),
    ),
    Rule(
        "parallelism.ulysses",
        "times `parallelism.tensor` must divide `model.heads`, and must divide `model.kvHeads` or be a multiple of "
        "it, because ranks exchange heads: change a degree, or use `contextMethod: RingZigZag`",
        _heads_exchange_cel(ContextMethod.RING_ULYSSES, _ULYSSES),
        lambda facts: _heads_exchange(facts, ContextMethod.RING_ULYSSES),
    ),
    Rule(
        "training.attentionDropout",
        "needs `parallelism.context: 1`, because ranks that share a sequence do not store attention probabilities: "
        "set it to 0 and use `dropout` instead",
        "!has(self.training) || self.training.attentionDropout == 0.0 || self.parallelism.context == 1",
        _attention_dropout_sees_whole_rows,
    ),
    Rule(
        "model.mixture.capacityFactor",
        "needs `parallelism.context: 1`, because the order of tokens is only known to a rank with the full "
        "sequence: remove it, or set the context degree to 1",
        "!has(self.model) || !has(self.model.mixture) || !has(self.model.mixture.capacityFactor)"
        " || self.parallelism.context == 1",
        _capacity_counts_whole_rows,
    ),
)
