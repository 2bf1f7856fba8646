"""The plan that says how a custom module is split over ranks, by the names of its parts.

Names are those of `named_modules()`. `*`, `?` and `[...]` match as in shells, but never a dot: `layers.*` matches the
layers of a list, and nothing inside them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


class PlanError(ValueError):
    """A plan that does not fit its module. The message names the entry and the fix."""


@dataclass(frozen=True)
class ParallelPlan:
    """Names of a module's parts.

    A region is a sub-layer such as attention or a feed-forward layer: the tensors it is called with are whole on every
    rank of a tensor group, and the sum of its outputs over the ranks is its output. So a residual connection and its
    norm stay outside. In a region, matrices split by rows (`column` linear layers in the words of Megatron-LM, arXiv
    1909.08053) give each rank some of the features or heads, and those split by columns take them in. Heads must be
    counted from the tensors, `x.unflatten(-1, (-1, head_size))`: a rank has some of them.

    Raises:
        PlanError: an entry is a string instead of a tuple of strings.
    """

    regions: tuple[str, ...] = ()
    """Modules that are split inside; each has `column` and `row` layers and returns one tensor."""
    column: tuple[str, ...] = ()
    """`nn.Linear` layers in regions of which each rank computes some of the outputs."""
    row: tuple[str, ...] = ()
    """`nn.Linear` layers in regions of which each rank takes some of the inputs. What comes after one in its region
    must treat a sum as the sum of what it makes of its terms, as dropout and scales do."""
    gathered: tuple[str, ...] = ()
    """`nn.Linear` layers outside regions, such as the one to logits, of which each rank computes some of the outputs,
    which every rank then gets. May be tied to a `vocabulary` table."""
    vocabulary: tuple[str, ...] = ()
    """`nn.Embedding` tables outside regions of which each rank holds some of the rows."""
    partial: tuple[str, ...] = ()
    """Modules or parameters in regions that every rank holds whole, such as norms of heads: a rank has a part of their
    gradient, which is summed over ranks."""
    blocks: tuple[str, ...] = ()
    """Modules that ZeRO stages 2 and 3 gather one at a time: the layers."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if isinstance(getattr(self, field.name), str):
                raise PlanError(f"`{field.name}` is a tuple of names: write a comma after the only one")
