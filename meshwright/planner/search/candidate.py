"""The results of a search: layouts with their estimated cost, and the Pareto front."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.training import ActivationCheckpointing, OptimizerOffload
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.memory import Memory
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.search.request import Objective

OFFLOAD_MEMORY = {OptimizerOffload.CPU: "cpu", OptimizerOffload.FILE: "nvme"}
"""The memory that stores offloaded state, in words."""


@dataclass(frozen=True, slots=True)
class FittingLayout:
    """A layout that fits. Its step time need not be known."""

    strategy: Strategy
    memory: Memory
    """Memory of the ranks of the fullest stage."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with its estimated cost."""

    strategy: Strategy
    estimate: Estimate
    node: int
    """GPUs of one node."""

    @property
    def seconds(self) -> float:
        """Seconds of one step."""
        return self.estimate.seconds

    @property
    def seconds_after_node_loss(self) -> float:
        """Seconds for the tokens of one step after a node and its replicas are lost. Infinite if none is left.

        A node failure stops every replica that has a rank on the node.
        """
        replica = self.strategy.tensor * self.strategy.context * self.strategy.pipeline
        rejected = -(-self.node // replica)
        left = self.strategy.data - rejected
        return self.seconds * self.strategy.data / left if left > 0 else float("inf")

    @property
    def dimensions(self) -> int:
        """Number of dimensions of parallelism in use."""
        used = self.strategy
        return sum(degree > 1 for degree in (used.tensor, used.context, used.pipeline, used.expert, used.data))

    @property
    def complexity(self) -> tuple[int, ...]:
        """Sort key for candidates that are equally good: fewer dimensions first, then fewer other techniques."""
        used = self.strategy
        return (
            self.dimensions,
            int(used.optimizer_offload is not OptimizerOffload.NONE) + int(used.activation_offload),
            int(used.checkpointing is not ActivationCheckpointing.NONE),
            int(used.schedule is not PipelineSchedule.ONE_F_ONE_B),
            used.zero_stage,
        )

    def score(self, objective: Objective) -> float:
        """The number that the objective minimizes."""
        if objective is Objective.COST:
            return self.seconds * self.estimate.gpus
        if objective is Objective.ROBUST:
            return self.seconds_after_node_loss
        if objective is Objective.GPUS:
            return float(self.estimate.gpus)
        return self.seconds

    @property
    def summary(self) -> str:
        """The layout in one line, without degrees of 1."""
        used = self.strategy
        degrees = (
            ("TP", used.tensor),
            ("CP", used.context),
            ("PP", used.pipeline),
            ("EP", used.expert),
            ("DP", used.data),
        )
        shown = " x ".join(f"{name} {degree}" for name, degree in degrees if degree > 1) or "one GPU"
        extras = [f"micro-batch {used.micro_batch_size}"]
        if used.pipeline > 1:
            chunks = f" with {used.virtual_stages} chunks" if used.virtual_stages > 1 else ""
            extras.append(f"{used.schedule_kind.short_name}{chunks}")
        if used.zero_stage:
            extras.append(f"ZeRO-{used.zero_stage}")
        if used.checkpointing is not ActivationCheckpointing.NONE:
            extras.append(f"{used.checkpointing.value.lower()} recomputation")
        if used.optimizer_offload is not OptimizerOffload.NONE:
            extras.append(f"optimizer in {OFFLOAD_MEMORY[used.optimizer_offload]} memory")
        return f"{shown} ({', '.join(extras)})"


def pareto(found: list[Candidate], limit: int = 8) -> list[Candidate]:
    """Return the candidates that no other beats in step time, GPUs and robustness at once, the fastest first."""
    front: list[Candidate] = []
    for one in sorted(found, key=lambda f: (f.seconds, f.estimate.gpus, f.seconds_after_node_loss)):
        if not any(_dominates(other, one) for other in front):
            front.append(one)
    return front[:limit]


def _dominates(other: Candidate, one: Candidate) -> bool:
    return (
        other.seconds <= one.seconds
        and other.estimate.gpus <= one.estimate.gpus
        and other.seconds_after_node_loss <= one.seconds_after_node_loss
    )
