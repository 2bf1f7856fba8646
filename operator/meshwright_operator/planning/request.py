"""What a plan is made from, and the planning itself. Imports only the core, so that a planning process stays small."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import PlanStatus
from meshwright.planner.deadline import deadline_message, planning_deadline
from meshwright.planner.errors import PlanError
from meshwright.planner.hardware import Hardware
from meshwright.planner.plan import Plan, new_plans, running_plan

UNREAD_FIELDS = {"suspend", "priority"}
"""Fields of the spec that neither plans nor rules depend on."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A plan to make. Two requests with the same digest have the same answer."""

    spec_json: str
    hardware: Hardware
    keep_json: str = ""
    """The plan of a running job; empty for a job that has not started."""
    spec_digest: bytes = field(init=False)
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        spec_digest = _digest(self.spec_json, self.keep_json)
        object.__setattr__(self, "spec_digest", spec_digest)
        object.__setattr__(self, "digest", _digest(spec_digest.hex(), repr(self.hardware)))

    @classmethod
    def new(cls, spec: ParallelTrainingJobSpec, hardware: Hardware) -> PlanRequest:
        """A request for the plans of a job that has not started."""
        return cls(spec.model_dump_json(exclude=UNREAD_FIELDS), hardware)

    @classmethod
    def running(cls, spec: ParallelTrainingJobSpec, keep: PlanStatus) -> PlanRequest:
        """A request for the plan of a running job, which does not depend on nodes."""
        return cls(spec.model_dump_json(exclude=UNREAD_FIELDS), Hardware(), keep.model_dump_json())


@dataclass(frozen=True, slots=True)
class PlanFailure:
    """Why there is no plan."""

    message: str
    reason: str
    depends_on_cluster: bool = False

    @property
    def error(self) -> PlanError:
        """The failure as an exception."""
        return PlanError(self.message, self.reason, depends_on_cluster=self.depends_on_cluster)


Answer = tuple[Plan, ...] | PlanFailure


def solve(request: PlanRequest, cpu_seconds: float) -> Answer:
    """Make the plans of a request within this much CPU time."""
    spec = ParallelTrainingJobSpec.model_validate_json(request.spec_json)
    try:
        with planning_deadline(spec, cpu_seconds):
            if request.keep_json:
                keep = PlanStatus.model_validate_json(request.keep_json)
                return (running_plan(spec, request.hardware, keep),)
            return tuple(new_plans(spec, request.hardware))
    except PlanError as error:
        return PlanFailure(str(error), error.reason, error.depends_on_cluster)
    except (ValueError, ArithmeticError, LookupError, TypeError) as error:
        # A bug in the planner: report it on the job. A running revision keeps running.
        return PlanFailure(f"planning failed: {type(error).__name__}: {error}", "PlannerFailed")


def message_past_deadline(request: PlanRequest, cpu_seconds: float) -> str:
    """The message about a plan that was stopped."""
    return deadline_message(ParallelTrainingJobSpec.model_validate_json(request.spec_json), cpu_seconds)


def _digest(*texts: str) -> bytes:
    return blake2b("\0".join(texts).encode(), digest_size=16).digest()
