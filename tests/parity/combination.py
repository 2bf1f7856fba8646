"""How a set of techniques becomes a case, in the smallest layout that holds them, and what validation says of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from meshwright_worker.rank.failures import InvalidRunError
from meshwright_worker.trainer.train import validate_run
from tests.parity.case import Case
from tests.parity.techniques import ISLANDS, TECHNIQUES, Options

RANKS = 8
"""The largest world of a case."""
FEW_RANKS = 4
"""The world of a case unless it needs more."""
ROUNDED_OTHERWISE = 0.15
"""The limit of gradients in fp8 where ranks add up in another order than one process, see `_rounded_otherwise`."""
ROUTED_OTHERWISE = 0.4
"""The same in a mixture: where a router's scores are close, a token goes to another expert, whose gradient is small."""


def case_of(names: Iterable[str], refused: str | None = None) -> Case:
    """The techniques together, in the order of `TECHNIQUES`, in the smallest layout that holds them."""
    wanted = set(names)
    techniques = [technique for technique in TECHNIQUES if technique.name in wanted]
    # Small, and with as few passes as there can be: the techniques are what costs.
    common = _merged({"layers": 2, "micro_batches": 1}, *(each.common for each in techniques))
    layout = _merged(*(each.layout for each in techniques))
    for technique in techniques:
        layout |= {name: value for name, value in technique.unless.items() if name not in layout | common}
        if "micro_batches" in technique.unless:
            layout["micro_batches"] = max(layout.get("micro_batches", 1), technique.unless["micro_batches"])
    if "outer" in layout:
        layout["data"] = ISLANDS * layout.get("data", 1)
    if "mixture" in layout:
        common["mixture"] = layout.pop("mixture")
    if layout.get("context", 1) > 1 and "shard_size" in layout.get("replicas", {}):
        # The ranks that share a sequence share shards as well: copies of those are all that hybrid shards need more.
        layout |= {"data": 2, "replicas": {**layout["replicas"], "shard_size": 1}}
    parts = layout.get("data", 1) * layout.get("micro_batches", 1)
    common |= {"batch": 16} if parts > 8 else {}
    tolerances = [each.tolerance for each in techniques if each.tolerance is not None]
    if any(each.factor == "products" for each in techniques) and _rounded_otherwise(layout):
        tolerances.append(ROUTED_OTHERWISE if "mixture" in common else ROUNDED_OTHERWISE)
    if any(each.factor == "precision" for each in techniques) and "mixture" in common:
        tolerances.append(ROUTED_OTHERWISE)
    if any(each.factor == "products" for each in techniques):
        common["micro_batches"] = parts
        layout.setdefault("micro_batches", 1)
    # What a case and one process have of the same kind does not add up by itself.
    layout |= {
        name: {**common[name], **layout[name]}
        for name in ("training", "optimizer")
        if name in layout and name in common
    }
    return Case(
        " + ".join(each.name for each in techniques),
        layout,
        common,
        refused=refused,
        exact=not tolerances,
        tolerance=max(tolerances, default=1e-5),
        vanishing="key.bias" if "GPT" in wanted else "-",
        together=tuple(each.name for each in techniques),
    )


def _rounded_otherwise(layout: Options) -> bool:
    """Whether a product's factors differ from those of one process: scales are the same, but sums over a tensor group,
    and attention in parts, have another order, so that now and then a number is rounded to the other side, which rounds
    others otherwise behind it."""
    return layout.get("context", 1) > 1 or layout.get("tensor", 1) > 1


def _merged(*many: Options) -> dict[str, Any]:
    """All options; degrees are the largest asked for."""
    merged: dict[str, Any] = {}
    for options in many:
        for name, value in options.items():
            if isinstance(value, Mapping):
                merged[name] = {**merged.get(name, {}), **value}
            elif isinstance(value, int) and not isinstance(value, bool):
                merged[name] = max(merged.get(name, value), value)
            else:
                merged[name] = value
    return merged


def verdict(names: Iterable[str]) -> str | None:
    """What is said against the techniques together, problem by problem; None where they are legal."""
    try:
        validate_run(case_of(names).run())
    except InvalidRunError as error:
        return str(error)
    return None


def ranks_of(names: Iterable[str]) -> int:
    """How many ranks the techniques take together."""
    layout = case_of(names).layout
    return int(layout.get("data", 1) * layout.get("pipeline", 1) * layout.get("context", 1) * layout.get("tensor", 1))
