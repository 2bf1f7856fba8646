"""What the phase of a pod says."""

from __future__ import annotations

from meshwright.api.objects import KubeObject

ENDED = ("Succeeded", "Failed")
"""Phases of a pod whose containers have exited for good."""


def has_ended(pod: KubeObject) -> bool:
    """Return whether a pod has ended, so that it no longer occupies resources."""
    return (pod.get("status") or {}).get("phase") in ENDED
