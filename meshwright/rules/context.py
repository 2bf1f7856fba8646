"""Rules on how a sequence is shared."""

from __future__ import annotations

from meshwright.api.parallelism import ContextMethod
from meshwright.rules.facts import Facts
from meshwright.rules.rule import Rule

_TENSOR = "(has(self.parallelism.tensor) ? self.parallelism.tensor : 1)"
_UNIT = f"(self.parallelism.sequence ? {_TENSOR} : 1)"
_ULYSSES = "(has(self.parallelism.ulysses) ? self.parallelism.ulysses : 1)"
_HEAD_EXCHANGE_RANKS = (
    f"(self.parallelism.contextMethod == 'Ulysses' ? self.parallelism.context : {_ULYSSES}) * {_TENSOR}"
)
_KV_HEADS = "(has(self.model.kvHeads) ? self.model.kvHeads : self.model.heads)"


def heads_divide(heads: int, kv_heads: int, tensor: int, head_exchange_ranks: int) -> bool:
    """Whether heads divide over a tensor group and then over the ranks that exchange them.

    Fewer key and value heads than ranks are held by several ranks each, if they divide those.
    """
    ranks = tensor * head_exchange_ranks
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def head_exchange_ranks(method: ContextMethod, context: int, ulysses: int | None) -> int:
    """How many ranks of a context group exchange heads for tokens."""
    return context if method is ContextMethod.ULYSSES else (ulysses or 1)


def _sequence_long_enough(facts: Facts) -> bool:
    p = facts.parallelism
    unit = (p.tensor or 1) if p.sequence else 1
    return (
        p.context_or_default == 1
        or facts.training is None
        or facts.training.sequence_length >= 2 * p.context_or_default * unit
    )


def _ulysses_divides_context(facts: Facts) -> bool:
    p = facts.parallelism
    if p.ulysses is None:
        return p.context_method is not ContextMethod.RING_ULYSSES
    return p.context_method is ContextMethod.RING_ULYSSES and p.context_or_default % p.ulysses == 0


def _heads_exchange(facts: Facts) -> bool:
    p, model = facts.parallelism, facts.model
    if model is None or model.heads is None:
        return True
    ranks = head_exchange_ranks(p.context_method, p.context_or_default, p.ulysses)
    return ranks == 1 or heads_divide(model.heads, model.kv_heads or model.heads, p.tensor or 1, ranks)


CONTEXT_RULES: tuple[Rule[Facts], ...] = (
    Rule(
        "parallelism.context",
        "times 2, and times `parallelism.tensor` when `parallelism.sequence` is true, must be at most "
        "`training.sequenceLength`: every rank gets two parts of a row",
        f"self.parallelism.context == 1 || !has(self.training)"
        f" || self.training.sequenceLength >= 2 * self.parallelism.context * {_UNIT}",
        _sequence_long_enough,
    ),
    Rule(
        "parallelism.ulysses",
        "must be set with `parallelism.contextMethod: RingUlysses`, and only then, and divide `parallelism.context`",
        "has(self.parallelism.ulysses) == (self.parallelism.contextMethod == 'RingUlysses')"
        f" && self.parallelism.context % {_ULYSSES} == 0",
        _ulysses_divides_context,
    ),
    Rule(
        "parallelism.contextMethod",
        "exchanges heads: the ranks that do (`parallelism.ulysses`, or with `Ulysses` `parallelism.context`) times "
        "`parallelism.tensor` must divide `model.heads`, and divide `model.kvHeads` or be a multiple of it",
        "!has(self.model) || !has(self.model.heads)"
        f" || (self.parallelism.contextMethod == 'Ulysses' ? self.parallelism.context : {_ULYSSES}) == 1"
        f" || (self.model.heads % ({_HEAD_EXCHANGE_RANKS}) == 0"
        f" && ({_KV_HEADS} % ({_HEAD_EXCHANGE_RANKS}) == 0 || ({_HEAD_EXCHANGE_RANKS}) % {_KV_HEADS} == 0))",
        _heads_exchange,
    ),
)
