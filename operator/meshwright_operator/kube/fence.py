"""The fence around writes: until when this process may change anything in the cluster.

A leader that was cut off, or slept, does not know that another one leads by now. So nobody asks "do I lead?" but "how
long do I surely lead?": every renewal of the lease moves the deadline, every write checks it first and may last no
longer. The deadline lies before the moment at which another process may take the lease.
"""

from __future__ import annotations

import time


class Fence:
    """A deadline on the monotonic clock. Closed until it is first moved."""

    def __init__(self) -> None:
        self._deadline = float("-inf")

    def extend(self, deadline: float) -> None:
        """Writes may last until `deadline`, in seconds of the monotonic clock."""
        self._deadline = deadline

    def close(self) -> None:
        """No more writes."""
        self._deadline = float("-inf")

    def seconds_left(self) -> float:
        """Seconds that a write that begins now may last; zero or less when there may be none."""
        return self._deadline - time.monotonic()
