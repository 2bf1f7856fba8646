"""Places made a tree: every place of a level lies in one place of the level above.

Labels of real clusters contradict each other now and then. The closer tie wins, since it carries the most traffic,
and each label that had to give way is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from meshwright.planner.topology.levels import DOMAIN, Level
from meshwright.planner.topology.location import Location

_NOUN = {DOMAIN: "NVLink domain"}
_NAMED = 8


def as_tree(places: Mapping[str, Location], levels: Sequence[Level]) -> tuple[dict[str, Location], list[str]]:
    """The places of nodes made a tree, and a sentence for each label that had to give way.

    Nodes of one domain share the commonest rack among them, nodes of one rack the commonest spine, and so on. Levels
    that no node names are left out (unless they always exist), since they say nothing.
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
    """For each place of the inner level, the outer place that most of its nodes name."""
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
