"""Makes a tree of locations: every location of a level is in exactly one location of the level above.

Labels of real clusters sometimes contradict each other. The location of the closer level wins, because its links carry
the most traffic. A warning names each label that is ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from meshwright.planner.topology.levels import DOMAIN, Level
from meshwright.planner.topology.location import Location

_NOUN = {DOMAIN: "NVLink domain"}
_NAMED = 8


def as_tree(places: Mapping[str, Location], levels: Sequence[Level]) -> tuple[dict[str, Location], list[str]]:
    """Return the locations of nodes as a tree, and a warning for each label that is ignored.

    Nodes of one domain get the most common rack among them, nodes of one rack the most common spine, and so on. Levels
    that no node names are left out, unless they always exist.
    """
    columns = {
        level.name: dict(zip(places, (place.names[i] for place in places.values()), strict=True))
        for i, level in enumerate(levels)
    }
    used_levels = [
        level for level in levels if level.always or any("/" not in name for name in columns[level.name].values())
    ]
    warnings: list[str] = []
    for inner, outer in zip(used_levels, used_levels[1:], strict=False):
        below, above = columns[inner.name], columns[outer.name]
        pairs = ((below[node], above[node]) for node in places)
        chosen = _majority(_display_name(inner.name), _display_name(outer.name), pairs, warnings)
        columns[outer.name] = {node: chosen[below[node]] for node in places}
    names = tuple(level.name for level in used_levels)
    locations: dict[tuple[str, ...], Location] = {}
    tree: dict[str, Location] = {}
    for node in places:
        path = tuple(columns[name][node] for name in names)
        tree[node] = locations.setdefault(path, Location(path, names))
    return tree, _limited(warnings)


def _display_name(level: str) -> str:
    return _NOUN.get(level, level)


def _majority(inner: str, outer: str, pairs: Iterable[tuple[str, str]], warnings: list[str]) -> dict[str, str]:
    """For each location of the inner level, the outer location that most of its nodes name."""
    counts: dict[str, Counter[str]] = {}
    for (name, above), count in Counter(pairs).items():
        counts.setdefault(name, Counter())[above] += count
    chosen: dict[str, str] = {}
    for name, candidates in counts.items():
        labelled = {above: n for above, n in candidates.items() if "/" not in above} or candidates
        chosen[name] = min(labelled, key=lambda above: (-labelled[above], above))
        if len(labelled) > 1:
            warnings.append(f"{inner} {name} is labelled with several {outer}s; {chosen[name]} is taken")
    return chosen


def _limited(warnings: list[str]) -> list[str]:
    if len(warnings) <= _NAMED:
        return warnings
    return [*warnings[:_NAMED], f"{len(warnings) - _NAMED} more places are labelled with several places above them"]
