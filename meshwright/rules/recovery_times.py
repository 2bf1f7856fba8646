"""When a rank counts as hung, after what ranks keep their state, and how long the next start waits after failures.

Operator and simulations apply it.
"""

from __future__ import annotations

from meshwright.api.spec import RecoverySpec

LOSSES = frozenset({"NodeLost", "Preempted", "Evicted", "PodLost", "PodFailed", "RankFailure"})
"""The causes after which ranks that are left may go on. All others change what they run, or concern all of them."""
CAUSE_WAIT_SECONDS = 2.0
"""How long to wait after a failed rank or a crashed pod for others to fail too: the first pause of the backoff."""
LONGEST_BACKOFF_SECONDS = 60.0
FAILURE_RESET_SECONDS = 600.0
"""Training for this long resets the number of consecutive failures."""
MIN_TIMEOUT_SECONDS = 300.0
"""Shortest default timeout: saving a large checkpoint or a slow volume is not a hang."""
TIMEOUT_STEPS = 10
"""The default timeout, in steps."""
FIRST_STEP_SECONDS = 900.0
"""Shortest timeout before the first step, in which ranks connect, load the checkpoint and compile."""


def backoff_seconds(failed: int) -> float:
    """Seconds to wait before the start that follows the `failed`-th failure: 0, 2, 4, ... 60."""
    return 0.0 if failed <= 1 else min(2.0 ** min(failed - 1, 10), LONGEST_BACKOFF_SECONDS)


def hang_timeout(recovery: RecoverySpec, step_seconds: float, *, started: bool) -> float:
    """Seconds without progress after which a rank counts as hung.

    Args:
        recovery: The job's `recovery`.
        step_seconds: Time of a step; 0 if unknown.
        started: Whether the rank has finished a step of this generation.
    """
    chosen = recovery.hang_timeout_seconds
    seconds = float(chosen) if chosen is not None else max(MIN_TIMEOUT_SECONDS, TIMEOUT_STEPS * step_seconds)
    return seconds if started else max(seconds, FIRST_STEP_SECONDS)
