"""Places made a tree: every place of a level lies in one place of the level above.

Labels of real clusters contradict each other now and then. The closer tie wins, since it carries the most traffic,
and each label that had to give way is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from meshwright.planner.topology.levels import DOMAIN, Level
from meshwright.planner.topology.place import Place

_NOUN = {DOMAIN: "NVLink domain"}
_NAMED = 8


def as_tree(places: Mapping[str, Place], levels: Sequence[Level]) -> tuple[dict[str, Place], list[str]]:
    """The places of nodes made a tree, and a sentence for each label that had to give way.

    Nodes of one domain share the commonest rack among them, nodes of one rack the commonest spine, and so on. Levels
    that no node names are left out (unless they always exist), since they say nothing.
    """
    columns = {
        level.name: dict(zip(places, (place.names[i] for place in places.values()), strict=True))
        for i, level in enumerate(levels)
    }
    kept = [level for level in levels if level.always or any("/" not in name for name in columns[level.name].values())]
    warnings: list[str] = []
    for inner, outer in zip(kept, kept[1:], strict=False):
        below, above = columns[inner.name], columns[outer.name]
        pairs = ((below[node], above[node]) for node in places)
        chosen = _commonest(_noun(inner.name), _noun(outer.name), pairs, warnings)
        columns[outer.name] = {node: chosen[below[node]] for node in places}
    names = tuple(level.name for level in kept)
    shared: dict[tuple[str, ...], Place] = {}
    tree: dict[str, Place] = {}
    for node in places:
        path = tuple(columns[name][node] for name in names)
        tree[node] = shared.setdefault(path, Place(path, names))
    return tree, _first(warnings)


def _noun(level: str) -> str:
    return _NOUN.get(level, level)


def _commonest(inner: str, outer: str, pairs: Iterable[tuple[str, str]], warnings: list[str]) -> dict[str, str]:
    """For each place of the inner level, the outer place that most of its nodes name."""
    counts: dict[str, Counter[str]] = {}
    for (name, above), count in Counter(pairs).items():
        counts.setdefault(name, Counter())[above] += count
    chosen: dict[str, str] = {}
    for name, candidates in counts.items():
        named = {above: n for above, n in candidates.items() if "/" not in above} or candidates
        chosen[name] = min(named, key=lambda above: (-named[above], above))
        if len(named) > 1:
            warnings.append(f"{inner} {name} is labelled with several {outer}s; {chosen[name]} is taken")
    return chosen


def _first(warnings: list[str]) -> list[str]:
    if len(warnings) <= _NAMED:
        return warnings
    return [*warnings[:_NAMED], f"{len(warnings) - _NAMED} more places are labelled with several places above them"]
