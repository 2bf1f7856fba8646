"""Errors of planning and placement."""

from __future__ import annotations


class PlanError(ValueError):
    """No plan is possible. The message names the field and the fix.

    Attributes:
        reason: reason of the condition, such as `InvalidSpec`.
        depends_on_cluster: whether other nodes could help. False if only another spec can.
    """

    def __init__(self, message: str, reason: str, *, depends_on_cluster: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.depends_on_cluster = depends_on_cluster


class DoesNotFitError(ValueError):
    """A plan does not fit on the cluster now. The message says what is missing, and what would fit.

    Attributes:
        unplaced_workers: number of workers without a node.
        replicas_that_fit: the largest number of replicas that would fit now. 0 if not even one fits.
        blocked_by_kept_workers: whether the job would fit if the workers that stay could move too.
    """

    def __init__(
        self, message: str, *, unplaced_workers: int, replicas_that_fit: int = 0, blocked_by_kept_workers: bool = False
    ) -> None:
        super().__init__(message)
        self.unplaced_workers = unplaced_workers
        self.replicas_that_fit = replicas_that_fit
        self.blocked_by_kept_workers = blocked_by_kept_workers
