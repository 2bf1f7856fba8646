"""Nodes that running jobs keep free for the day that they lose one: nobody else's while those jobs hold pods.

What a job keeps stands in its `status.placement.spares`, so a restarted operator keeps the same. It keeps this
operator's other jobs off; pods of others do not ask here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from meshwright_operator.kube.cache import Cache, JobKey


class ReservedSpares(NamedTuple):
    """What one job keeps free."""

    uid: str
    why: str
    nodes: tuple[str, ...]

    @classmethod
    def by(cls, key: JobKey, uid: str, nodes: Iterable[str]) -> ReservedSpares:
        """What the job of this name keeps."""
        return cls(uid, f"kept as a spare for job {key}", tuple(nodes))


def reserved_spares(cache: Cache) -> list[ReservedSpares]:
    """The spares of every job that holds pods: no more of them than its spec still asks for."""
    found = []
    for key, job in cache.jobs.items():
        count, nodes = _get_path(job, "spec", "recovery", "spareNodes"), _get_path(job, "status", "placement", "spares")
        if not isinstance(count, int) or not isinstance(nodes, list) or count < 1 or not nodes:
            continue
        uid = str(job["metadata"].get("uid", ""))
        if any(not pod.terminal for pod in cache.pods(key, uid)):
            found.append(ReservedSpares.by(key, uid, map(str, nodes[:count])))
    return found


def reserved_for_others(reserved: Iterable[ReservedSpares], uid: str) -> Mapping[str, str]:
    """Node -> why it is not for the job `uid`."""
    return {node: one.why for one in reserved if one.uid != uid for node in one.nodes}


def _get_path(obj: object, *path: str) -> object:
    """What stands there; None where nothing does, or the object is malformed: then it keeps nothing."""
    for name in path:
        obj = obj.get(name) if isinstance(obj, Mapping) else None
    return obj
