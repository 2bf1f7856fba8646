"""Calibration: fits the constants of this cluster's GPUs to the measured steps of running jobs, every minute.

Its input is in the jobs' status (plan, measured throughput, step), so a restarted operator computes the same constants.
A job is left out if the cost model does not support its model or GPUs.

The measured throughput of running jobs varies all the time, and other constants mean other plans of all waiting jobs.
So a GPU's constants stay in use until the fitted ones differ by more than `THRESHOLD`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict
from math import isclose

from meshwright.api.data import DataFormat
from meshwright.api.objects import KubeObject
from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.parsing import InvalidSpecError, parse_spec, parse_status
from meshwright.api.status import PlacementStatus, PlanStatus
from meshwright.api.training import ActivationCheckpointing
from meshwright.layout import Layout
from meshwright.models.presets import UnknownModelError, resolve
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cost.constants import Constants
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.cost_model import Calibration, CostModel, StepMeasurement, cost_model_for, recalibrate
from meshwright.planner.placement.placed_cost import group_spans_of_status
from meshwright.rules.elastic import fixed_size
from meshwright_operator.kube.cache import Cache
from meshwright_operator.scheduling.inventories import NodeRequirements
from meshwright_operator.scheduling.scheduler import JobScheduler

PERIOD_SECONDS = 60.0
THRESHOLD = 0.05
"""Fraction by which one of a GPU's fitted constants must differ from the one in use to replace them."""

log = logging.getLogger(__name__)


class CalibrationLoop:
    """Keeps the scheduler's calibration up to date."""

    def __init__(self, cache: Cache, scheduler: JobScheduler) -> None:
        self._cache = cache
        self._scheduler = scheduler

    async def run(self) -> None:
        """Refits every minute, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            try:
                await self.refit()
            except Exception:
                # Planning continues with the last calibration: a wrong estimate must not stop the operator.
                log.exception("recalibration failed")

    async def refit(self) -> None:
        """Refits now, in a thread, because reading many jobs takes long."""
        jobs = list(self._cache.jobs.values())
        fitted = await asyncio.to_thread(self._refitted, jobs)
        used = self._scheduler.calibration
        settled = Calibration({gpu: _settled(used.constants.get(gpu), new) for gpu, new in fitted.constants.items()})
        if settled == used:
            return
        self._scheduler.recalibrate(settled)
        if changed := sorted(gpu for gpu, new in settled.constants.items() if used.constants.get(gpu) != new):
            log.info("recalibrated", extra={"gpus": changed})

    def _refitted(self, jobs: Sequence[KubeObject]) -> Calibration:
        inventories: dict[NodeRequirements, Inventory] = {}
        return recalibrate(
            Calibration(), (measured for job in jobs if (measured := self._read(job, inventories)) is not None)
        )

    def _read(self, job: KubeObject, inventories: dict[NodeRequirements, Inventory]) -> StepMeasurement | None:
        """A job's measurement; None if its object cannot be read, which must not affect other jobs."""
        try:
            return self._measured(job, inventories)
        except (ArithmeticError, AttributeError, InvalidSpecError, TypeError, UnknownModelError, ValueError):
            return None

    def _measured(self, job: KubeObject, inventories: dict[NodeRequirements, Inventory]) -> StepMeasurement | None:
        """A running job's measurement; None if it has none yet, or if the cost model does not support it.

        Args:
            job: The job's object.
            inventories: The inventory of jobs with the same node requirements, by those requirements.
        """
        status = parse_status(job)
        plan = status.plan
        if plan is None or not status.tokens_per_second or not status.step:
            return None
        spec = parse_spec(job)
        if spec.elastic is not None and spec.elastic.scaled_batch is not None:
            spec = fixed_size(spec, plan.data, plan.micro_batches)
        if spec.model is None or spec.training is None:
            return None
        if spec.data is not None and spec.data.format is DataFormat.PROMPT_COMPLETION:
            # Rows are as long as their records: measured throughput depends on it, the cost model does not.
            return None
        requirements = NodeRequirements.of(spec)
        if requirements not in inventories:
            inventories[requirements] = self._scheduler.inventory(spec)
        if spec.workers.resource_claims and _depends_on_claims(status.placement, inventories[requirements]):
            return None  # the claims' objects are not known here
        cost_model = cost_model_for(spec, resolve(spec.model), inventories[requirements])
        if cost_model is None:
            return None
        layout = Layout(plan.tensor, plan.pipeline, plan.data, plan.context, plan.expert)
        if plan.micro_batches < 1 or cost_model.work.global_batch % (layout.data * plan.micro_batches):
            return None  # not a layout that can have run
        strategy = _strategy_of(plan, layout, cost_model)
        if cost_model.estimate(strategy).seconds <= 0:
            return None
        seconds = cost_model.work.tokens / status.tokens_per_second
        groups = group_spans_of_status(
            layout,
            spec.workers.gpus_per_worker,
            status.placement,
            cost_model.machine.fabric,
            joined=inventories[requirements].pods_joined,
        )
        namespace = str(job["metadata"].get("namespace", ""))
        return StepMeasurement(cost_model, strategy, seconds, status.step, groups, namespace)


def _strategy_of(plan: PlanStatus, layout: Layout, cost_model: CostModel) -> Strategy:
    """How a job with this plan trains."""
    return cost_model.job.strategy(
        layout,
        plan.micro_batches,
        plan.schedule or PipelineSchedule.ONE_F_ONE_B,
        plan.activation_checkpointing or ActivationCheckpointing.NONE,
        virtual_stages=plan.virtual_stages,
        context_method=plan.context_method,
        zero_stage=plan.zero_stage,
    )


def _depends_on_claims(placement: PlacementStatus | None, inventory: Inventory) -> bool:
    """Whether NVLink joins the workers only if a claim does."""
    nodes = [entry.node for entry in placement.workers] if placement is not None else []
    cliques = any(inventory.nodes[name].separate_host for name in nodes if name in inventory.nodes)
    return cliques or len(set(nodes)) < len(nodes)


def _settled(used: Constants | None, fitted: Constants) -> Constants:
    """The constants in use, unless one of the fitted ones differs from them by more than `THRESHOLD`."""
    if used is None:
        return fitted
    before, now = asdict(used), asdict(fitted)
    close = all(isclose(now[name], value, rel_tol=THRESHOLD) for name, value in before.items())
    return used if close else fitted
