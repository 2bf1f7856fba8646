"""The tokens of a sequence on each rank of a context-parallel group, as ranges of positions. Pure, without tensors.

With causal attention later tokens attend to more keys. If ranks have consecutive parts of a sequence, their work is
unequal, and the last rank is the slowest. The zig-zag order cuts a sequence into two parts per rank and assigns parts i
and 2n - 1 - i to rank i (Llama 3, arXiv 2407.21783, section 3.3.2; Brandon et al., arXiv 2311.09431, balance in the
same way).

If a sequence does not divide evenly, parts differ by at most one `unit`, and nothing is padded. A unit is one token or,
with Megatron's sequence parallelism, one token for each rank of the tensor group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from meshwright.api.parallelism import ContextMethod
from meshwright.protocol.run_config import Run

TokenSlice = tuple[range, ...]
"""Positions of a rank's tokens, in the order of its tensor."""


_CONSECUTIVE = (ContextMethod.RING, ContextMethod.ULYSSES)


@dataclass(frozen=True, slots=True)
class SequenceSharding:
    """How sequences are split over the ranks of a context-parallel group.

    Args:
        method: the method of context parallelism. It determines the order.
        ranks: size of the group.
        unit: number of tokens that the length of every part is a multiple of.
        inner: with `RingUlysses`, the number of consecutive ranks that exchange heads. They divide one ring rank's
            slice.
    """

    method: ContextMethod = ContextMethod.RING_ZIG_ZAG
    ranks: int = 1
    unit: int = 1
    inner: int = 1

    @classmethod
    def of(cls, run: Run) -> SequenceSharding:
        """Return the sharding of a run."""
        spec = run.parallelism
        unit = run.tensor if spec.sequence else 1
        method = spec.context_method_or_default
        inner = (spec.ulysses or 1) if method is ContextMethod.RING_ULYSSES else 1
        return cls(method, run.context, unit, inner)

    @property
    def min_length(self) -> int:
        """Number of tokens of the shortest sequence without an empty part."""
        if self.ranks == 1:
            return self.unit
        if self.method in _CONSECUTIVE:
            return self.ranks * self.unit
        parts = 2 * (self.ranks // self.inner)
        return parts * -(-self.inner // 2) * self.unit

    def slices(self, length: int) -> tuple[TokenSlice, ...]:
        """Return each rank's slice of a sequence of `length` tokens, by rank.

        Raises:
            ValueError: the sequence is shorter than `min_length`, or not a multiple of `unit`.
        """
        return _slices(self, length)

    def ring(self, length: int) -> tuple[TokenSlice, ...]:
        """Return the slice of each group of `inner` ranks, by their position in the ring."""
        method = ContextMethod.RING if self.method is ContextMethod.RING else ContextMethod.RING_ZIG_ZAG
        return _slices(SequenceSharding(method, self.ranks // self.inner, self.unit), length)


@lru_cache(maxsize=256)
def _slices(deal: SequenceSharding, length: int) -> tuple[TokenSlice, ...]:
    if length % deal.unit or length < deal.min_length:
        raise ValueError(
            f"a row of {length} tokens does not split over {deal.ranks} ranks in parts of {deal.unit} tokens"
        )
    if deal.ranks == 1:
        return ((range(length),),)
    if deal.method in _CONSECUTIVE:
        return tuple((part,) for part in _split(length, deal.ranks, deal.unit))
    rings = _zig_zag(length, deal.ranks // deal.inner, deal.unit)
    return tuple(part for ring in rings for part in _even_parts(ring, deal.inner, deal.unit))


def size(part: TokenSlice) -> int:
    """Return the number of tokens of a slice."""
    return sum(len(positions) for positions in part)


def _zig_zag(length: int, ranks: int, unit: int) -> tuple[TokenSlice, ...]:
    parts = _split(length, 2 * ranks, unit)
    return tuple((parts[rank], parts[-1 - rank]) for rank in range(ranks))


def _split(length: int, count: int, unit: int) -> list[range]:
    units, extra = divmod(length // unit, count)
    ends = list(accumulate((units + (index < extra)) * unit for index in range(count)))
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _even_parts(whole: Sequence[range], count: int, unit: int) -> list[TokenSlice]:
    """Consecutive parts of a slice, as even as units allow."""
    return [_positions_within(whole, part_range) for part_range in _split(size(tuple(whole)), count, unit)]


def _positions_within(whole: Sequence[range], part_range: range) -> TokenSlice:
    ranges_found, begin = [], 0
    for positions in whole:
        first, last = max(part_range.start - begin, 0), min(part_range.stop - begin, len(positions))
        if first < last:
            ranges_found.append(positions[first:last])
        begin += len(positions)
    return tuple(ranges_found)
