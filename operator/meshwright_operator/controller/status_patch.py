"""Writing status: what changed, whether it is worth a write now, and as which patch."""

from __future__ import annotations

from typing import Any

from pydantic.alias_generators import to_camel

from meshwright_operator.decide.progress import THROTTLED_FIELDS

Object = dict[str, Any]

PROGRESS_SECONDS = 10.0
"""Shortest time between two writes of a job that only tell progress."""

PROGRESS_FIELDS = frozenset({*map(to_camel, THROTTLED_FIELDS), "readyRanks"})


def merge_diff(old: Any, new: Any) -> Any:
    """The merge patch (RFC 7386) that makes `new` of `old`; None-valued keys delete; `{}` when nothing differs."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    patch: Object = {key: None for key in old if key not in new}
    for key, value in new.items():
        if key not in old:
            patch[key] = value
        elif old[key] != value:
            patch[key] = merge_diff(old[key], value)
    return patch


def is_urgent(old: Object, new: Object) -> bool:
    """Whether `new` tells more than progress: then it is written at once."""
    return _without_progress(old) != _without_progress(new)


def _without_progress(status: Object) -> Object:
    """The status without progress, and without the wording of conditions; but with whether all ranks train.

    That is news even where the conditions cannot tell it, since an edit is held back.
    """
    rest = {key: value for key, value in status.items() if key not in PROGRESS_FIELDS}
    training, _, world = str(status.get("readyRanks", "")).partition("/")
    rest["allRanksTrain"] = bool(world) and training == world
    conditions = rest.get("conditions")
    if isinstance(conditions, list):
        dropped = ("message", "lastTransitionTime")
        rest["conditions"] = [
            {k: v for k, v in condition.items() if k not in dropped} if isinstance(condition, dict) else condition
            for condition in conditions
        ]
    return rest
