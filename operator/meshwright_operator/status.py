"""Writing status: what changed, whether it is worth a write now, and as which patch."""

from __future__ import annotations

from typing import Any

from pydantic.alias_generators import to_camel

from meshwright_operator.decide.progress import THROTTLED

Object = dict[str, Any]

PROGRESS_SECONDS = 10.0
"""Shortest time between two writes of a job that only tell progress."""

SOFT = frozenset({*map(to_camel, THROTTLED), "readyRanks"})


def difference(old: Any, new: Any) -> Any:
    """The merge patch (RFC 7386) that makes `new` of `old`; None-valued keys delete; `{}` when nothing differs."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    patch: Object = {key: None for key in old if key not in new}
    for key, value in new.items():
        if key not in old:
            patch[key] = value
        elif old[key] != value:
            patch[key] = difference(old[key], value)
    return patch


def urgent(old: Object, new: Object) -> bool:
    """Whether `new` tells more than progress: then it is written at once."""
    return _hard(old) != _hard(new)


def _hard(status: Object) -> Object:
    """The status without progress, and without the wording of conditions; but with whether all ranks train.

    That is news even where the conditions cannot tell it, since an edit is held back.
    """
    hard = {key: value for key, value in status.items() if key not in SOFT}
    training, _, world = str(status.get("readyRanks", "")).partition("/")
    hard["allRanksTrain"] = bool(world) and training == world
    conditions = hard.get("conditions")
    if isinstance(conditions, list):
        dropped = ("message", "lastTransitionTime")
        hard["conditions"] = [
            {k: v for k, v in condition.items() if k not in dropped} if isinstance(condition, dict) else condition
            for condition in conditions
        ]
    return hard
