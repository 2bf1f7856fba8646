"""Why a job cannot be planned or placed."""

from __future__ import annotations


class PlanError(ValueError):
    """No plan is possible. The text is for people and names field and fix.

    Attributes:
        reason: a condition's reason, such as `InvalidSpec`.
        depends_on_cluster: whether other nodes could help; false when only another spec can.
    """

    def __init__(self, message: str, reason: str, *, depends_on_cluster: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.depends_on_cluster = depends_on_cluster


class DoesNotFitError(ValueError):
    """The cluster has no room for a plan now. The text says what is short, by how much, and what would fit.

    Attributes:
        short_workers: how many workers found no place.
        replicas_that_fit: the largest number of replicas that would fit now; 0 when not even one does.
        because_of_kept: whether workers that must stay where they are stand in the way: placing all anew would fit.
    """

    def __init__(
        self, message: str, *, unplaced_workers: int, replicas_that_fit: int = 0, blocked_by_kept_workers: bool = False
    ) -> None:
        super().__init__(message)
        self.unplaced_workers = unplaced_workers
        self.replicas_that_fit = replicas_that_fit
        self.blocked_by_kept_workers = blocked_by_kept_workers
