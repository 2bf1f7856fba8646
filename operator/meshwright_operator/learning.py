"""What the jobs that run teach: the constants of this cluster's GPUs, refitted now and then to measured steps.

Everything it needs stands in the jobs' own status (plan, measured throughput, step), so a restarted operator arrives at
the same constants. A job whose model or GPUs have no price teaches nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict
from math import isclose

from meshwright.api.data import DataFormat
from meshwright.api.job import InvalidSpecError, parse_spec, parse_status
from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.training import ActivationCheckpointing
from meshwright.layout import Layout
from meshwright.models.presets import UnknownModelError, resolve
from meshwright.planner.cost.constants import Constants
from meshwright.planner.feedback import Measured, recalibrated
from meshwright.planner.inventory import Inventory
from meshwright.planner.pricing import Calibration, pricer_for
from meshwright.planner.recost import groups_of_status
from meshwright_operator.cache import Cache, Object
from meshwright_operator.placing import Placer

PERIOD_SECONDS = 60.0
WORTH_TELLING = 0.05
"""Share by which a constant must have changed before that is logged again."""

log = logging.getLogger(__name__)


class Learning:
    """Keeps the placer's calibration up to date."""

    def __init__(self, cache: Cache, placer: Placer) -> None:
        self._cache = cache
        self._placer = placer
        self._told: dict[str, Constants] = {}

    async def run(self) -> None:
        """Refits every minute, for ever."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            try:
                await self.refit()
            except Exception:
                # Planning goes on with what was learnt before: an estimate is never worth an operator.
                log.exception("could not recalibrate")

    async def refit(self) -> None:
        """Refits now; in a thread, since many jobs on many nodes take a while to read."""
        jobs = list(self._cache.jobs.values())
        found = await asyncio.to_thread(self._refitted, jobs)
        self._placer.calibration = found
        if news := sorted(gpu for gpu in found.constants if self._is_news(gpu, found)):
            self._told = {**self._told, **{gpu: found.constants[gpu] for gpu in news}}
            log.info("recalibrated", extra={"gpus": news})

    def _is_news(self, gpu: str, found: Calibration) -> bool:
        """Whether a GPU's constants are others than were told last, by more than every new step changes them."""
        old = self._told.get(gpu)
        if old is None:
            return True
        before, now = asdict(old), asdict(found.constants[gpu])
        return any(not isclose(now[name], value, rel_tol=WORTH_TELLING) for name, value in before.items())

    def _refitted(self, jobs: Sequence[Object]) -> Calibration:
        known: dict[str, Inventory] = {}
        return recalibrated(Calibration(), (found for job in jobs if (found := self._read(job, known)) is not None))

    def _read(self, job: Object, known: dict[str, Inventory]) -> Measured | None:
        """What a job measures; None for one that cannot be read: it teaches nothing, and keeps nobody else from it."""
        try:
            return self._measured(job, known)
        except (ArithmeticError, AttributeError, InvalidSpecError, TypeError, UnknownModelError, ValueError):
            return None

    def _measured(self, job: Object, known: dict[str, Inventory]) -> Measured | None:
        """What a job that runs measures; None where there is nothing yet, or no price for it.

        `known` holds the nodes as jobs with the same wishes see them.
        """
        status = parse_status(job)
        plan = status.plan
        if plan is None or not status.tokens_per_second or not status.step:
            return None
        spec = parse_spec(job)
        if spec.model is None or spec.training is None:
            return None
        if spec.data is not None and spec.data.format is DataFormat.PROMPT_COMPLETION:
            # Its rows are as long as its records, which its tokens per second say and no price knows.
            return None
        wishes = spec.workers.model_dump_json(include={"gpu_resource", "node_selector", "tolerations"})
        if wishes not in known:
            known[wishes] = self._placer.nodes(spec)
        pricer = pricer_for(spec, resolve(spec.model), known[wishes])
        if pricer is None:
            return None
        order, again = plan.schedule or PipelineSchedule.ONE_F_ONE_B, plan.activation_checkpointing
        pricer = pricer.on(pricer.job.decided(order, again or ActivationCheckpointing.NONE))
        layout = Layout(plan.tensor, plan.pipeline, plan.data, plan.context, plan.expert)
        whole = plan.micro_batches > 0 and pricer.work.global_batch % (layout.data * plan.micro_batches) == 0
        if not whole or pricer.price(layout, plan.micro_batches).seconds <= 0:
            return None  # no layout that ever ran
        seconds = pricer.work.tokens / status.tokens_per_second
        groups = groups_of_status(layout, spec.workers.gpus_per_worker, status.placement, pricer.machine.fabric)
        return Measured(pricer, layout, plan.micro_batches, seconds, status.step, groups)
