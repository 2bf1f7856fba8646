"""Pods that do not terminate although their node is ready.

A kubelet that cannot kill a process, for example one that waits for a device in the kernel, never finishes the deletion
of its pod. The worker's replacement may start elsewhere: it has the next incarnation, so the coordinator rejects the
agent of the old pod, and no mesh generation contains both. But the old process may still use its GPUs, so the job
avoids that node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.text import counted, sentences

STUCK_SECONDS = 120.0
"""Seconds after the end of its grace period at which a pod counts as stuck. A kubelet needs a few."""
POD_STUCK_TERMINATING = "PodStuckTerminating"
MAX_NAMED = 3


def seconds_until_stuck(pod: Pod, now: datetime) -> float | None:
    """Seconds until a pod that is being deleted counts as stuck, 0 if it does. None if it is not being deleted."""
    if not pod.deleting or pod.terminal or pod.deletion_deadline is None:
        return None
    return max(0.0, STUCK_SECONDS - (now - pod.deletion_deadline).total_seconds())


def is_stuck(pod: Pod, now: datetime) -> bool:
    """Whether the pod should have exited long ago."""
    return seconds_until_stuck(pod, now) == 0.0


def stuck_pods(pods: Sequence[Pod], down: Mapping[str, bool], now: datetime) -> tuple[Pod, ...]:
    """The stuck pods on nodes that are ready. On other nodes, a deletion is not expected to finish."""
    return tuple(pod for pod in pods if is_stuck(pod, now) and not (pod.bound and down.get(pod.node, True)))


def nodes_to_avoid(pods: Sequence[Pod]) -> dict[str, str]:
    """Node -> why the job must not use it, for stuck pods."""
    return {pod.node: f"pod {pod.name} does not terminate" for pod in pods if pod.node}


def describe(pods: Sequence[Pod]) -> str:
    """Which pods are stuck, and what to do; empty without pods."""
    if not pods:
        return ""
    named = ", ".join(f"{pod.name} on node {pod.node}" for pod in pods[:MAX_NAMED])
    more = f" and {len(pods) - MAX_NAMED} more" if len(pods) > MAX_NAMED else ""
    verb = "does" if len(pods) == 1 else "do"
    fix = f"Restart the node, or delete the {'pod' if len(pods) == 1 else 'pods'} with `kubectl delete pod --force`"
    return sentences(f"{counted(len(pods), 'pod')} {verb} not terminate: {named}{more}", fix)
