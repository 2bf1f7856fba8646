"""The write fence: a deadline after which this process must not write to the cluster.

A leader that was disconnected or suspended does not know that another process leads now. So writes do not check a flag
but a deadline: every renewal of the lease extends it, and a write must end before it. The deadline is earlier than the
time at which another process may take the lease.
"""

from __future__ import annotations

import time


class Fence:
    """A deadline on the monotonic clock. Closed until it is first moved."""

    def __init__(self) -> None:
        self._deadline = float("-inf")

    def extend(self, deadline: float) -> None:
        """Allow writes until `deadline`, in seconds of the monotonic clock."""
        self._deadline = deadline

    def close(self) -> None:
        """Allow no more writes."""
        self._deadline = float("-inf")

    def seconds_left(self) -> float:
        """Seconds that a write may take if it begins now; zero or less if writes are not allowed."""
        return self._deadline - time.monotonic()
