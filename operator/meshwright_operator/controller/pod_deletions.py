"""Since when this process has seen pods being deleted, which no clock that is set can change.

A pod that does not end in time counts as stuck, and its worker starts elsewhere. By the wall clock alone, an operator
whose clock runs an hour ahead would find every pod stuck as soon as it is deleted, and run two pods of one worker.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta

from meshwright_operator.kube.pod_info import Pod

MAX_PODS = 65_536


class PodDeletions:
    """Pods that are being deleted, by uid. `monotonic` returns seconds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._first_seen: OrderedDict[str, float] = OrderedDict()

    def as_seen(self, pods: Iterable[Pod], now: datetime) -> list[Pod]:
        """The pods, of which none has missed its deadline for longer than this process has seen it being deleted."""
        return [self._as_seen(pod, now) for pod in pods]

    def _as_seen(self, pod: Pod, now: datetime) -> Pod:
        if not pod.deleting or pod.terminal or pod.deletion_deadline is None:
            return pod
        seconds = self._monotonic() - self._first_seen.setdefault(pod.uid, self._monotonic())
        self._first_seen.move_to_end(pod.uid)
        if len(self._first_seen) > MAX_PODS:
            self._first_seen.popitem(last=False)
        earliest = now - timedelta(seconds=seconds)
        return replace(pod, deletion_deadline=earliest) if pod.deletion_deadline < earliest else pod
