"""What the simulation needs of a job, from its manifest: nodes, replicas, speed at each size, and how it recovers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.api.parsing import parse_spec
from meshwright.api.spec import ParallelTrainingJobSpec, ReplicaLossAction
from meshwright.memory_recovery import cannot_continue, state_of, unsupported
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.errors import PlanError
from meshwright.planner.plan import Plan, make_plans
from meshwright.planner.topology.site import DEFAULT_SITE
from meshwright.rules.elastic import continues_on_loss, resized, sizes, wanted_replicas, with_own_batch
from meshwright.simulation.setting import Policy
from meshwright_cli.plan.report import inventory_of


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job with its plan."""

    spec: ParallelTrainingJobSpec
    plan: Plan
    nodes: int
    """Nodes that it fills at its full size."""
    units: int
    """Groups of nodes that can be lost and replaced one by one: replicas, or nodes with several replicas."""
    rates: tuple[float, ...]
    """Speed with 1, 2, ... units, relative to all."""
    min_units: int
    """Units of `elastic.minReplicas`."""

    @property
    def step_seconds(self) -> float | None:
        """The planner's estimate of a step."""
        return self.plan.estimate.seconds if self.plan.estimate is not None else None

    @property
    def steps(self) -> int | None:
        """Steps of the job; None for a user's command."""
        return self.spec.training.steps if self.spec.training is not None else None

    def policy(self, spares: int) -> Policy:
        """How the job recovers as its spec says, with so many nodes beside its own."""
        elastic, policy = self.spec.elastic, Policy(spares=spares)
        if elastic is not None:
            policy = replace(
                policy,
                shrinks=self.min_units < self.units,
                at_once=continues_on_loss(self.spec),
                min_units=self.min_units,
                replacement_seconds=float(elastic.replacement_seconds),
                pause_seconds=float(elastic.pause_seconds),
            )
        return self._in_memory(policy) if self.spec.recovery.in_memory and not self.restarts_why else policy

    def _in_memory(self, policy: Policy) -> Policy:
        recovery, run = self.spec.recovery, self.plan.run_config(self.spec)
        world = run.layout.world_size
        ranks_of_state = len({state_of(run, rank) for rank in range(world)})
        return replace(
            policy,
            in_memory=True,
            state_units=-(-ranks_of_state * self.units // world) if ranks_of_state < world else None,
            copy_steps=recovery.copy_every_steps,
            continues=policy.shrinks and self._asks_to_continue and not cannot_continue(run),
        )

    @property
    def _asks_to_continue(self) -> bool:
        return self.spec.recovery.on_replica_loss is ReplicaLossAction.CONTINUE

    @property
    def restarts_why(self) -> str:
        """Why all ranks restart although the job has `recovery.inMemory`; empty if they do not."""
        recovery, run = self.spec.recovery, self.plan.run_config(self.spec)
        copied = recovery.copy_every_steps is not None
        return unsupported(run, copies=copied, continues=self._asks_to_continue) if recovery.in_memory else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is assumed of the job's recovery."""
        if not self.spec.recovery.in_memory:
            return ()
        if self.restarts_why:
            return (f"`recovery.inMemory` has no effect, and all ranks restart: {self.restarts_why}",)
        found = (
            "`recovery.inMemory` is simulated as for ranks without GPUs, the only ones that keep their state in this"
            " version: ranks on GPUs restart from the latest checkpoint",
        )
        why = cannot_continue(self.plan.run_config(self.spec)) if self._asks_to_continue else ""
        return (*found, f"`recovery.onReplicaLoss: Continue` has no effect: {why}") if why else found


def planned_job(job: dict[str, Any], nodes: Sequence[dict[str, Any]], pods: Sequence[dict[str, Any]]) -> PlannedJob:
    """Plan the job on these nodes, also at its smaller sizes.

    Raises:
        InvalidSpecError: the job violates the schema.
        PlanError: no layout fits.
    """
    given = parse_spec(job)
    spec = given.model_copy(update={"replicas": wanted_replicas(given)}) if given.elastic is not None else given
    inventory = inventory_of(spec, nodes, pods, DEFAULT_SITE)
    plan = make_plans(with_own_batch(spec), inventory, max_plans=1)[0]
    gpus_of_node = max((node.capacity.gpus for node in inventory.usable), default=plan.gpus_per_worker)
    each = max(1, gpus_of_node // plan.gpus_per_worker)
    count = -(-len(plan.workers) // each)
    replicas = plan.layout.data
    units = math.gcd(count, replicas)
    least = given.elastic.min_replicas if given.elastic is not None else replicas
    rates = tuple(_rates(spec, plan, inventory, units))
    return PlannedJob(spec, plan, count, units, rates, max(1, -(-least * units // replicas)))


def _rates(spec: ParallelTrainingJobSpec, plan: Plan, inventory: Inventory, units: int) -> list[float]:
    """Speed with 1, 2, ... units: that of the largest size that they allow, by the planner's estimates."""
    replicas = plan.layout.data
    speeds = {replicas: 1.0}
    for size in sizes(spec, replicas - 1, 1) if replicas > 1 else ():
        speeds[size] = _speed(spec, plan, size, inventory)
    rates = []
    for unit in range(1, units + 1):
        most = unit * replicas // units
        size = max((one for one in speeds if one <= most), default=0)
        rates.append(max(speeds.get(size, 0.0), 1e-6))
    return rates


def _speed(spec: ParallelTrainingJobSpec, plan: Plan, replicas: int, inventory: Inventory) -> float:
    """Tokens per second with fewer replicas, relative to the plan's."""
    share = replicas / plan.layout.data
    fewer = resized(spec, replicas)
    if fewer is None or plan.estimate is None:
        return share
    try:
        smaller = make_plans(fewer, inventory, max_plans=1)[0].estimate
    except PlanError:
        return share
    return share if smaller is None else min(1.0, smaller.tokens_per_second / plan.estimate.tokens_per_second)
