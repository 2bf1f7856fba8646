"""What a plan will spend: FLOPs, GPU-hours, days and money for a number of tokens, from the plan's estimate. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.figures import format_number
from meshwright.models.counts import training_flops
from meshwright.planner.units import count_gpus
from meshwright.rules.elastic import with_own_batch
from meshwright_cli.plan.report import PlanReport


@dataclass(frozen=True, slots=True)
class Forecast:
    """A run of so many tokens. The times are None if the GPUs or the model are unknown, the cost without a price."""

    tokens: int
    flops: float | None
    gpus: int
    days: float | None = None
    gpu_hours: float | None = None
    cost: float | None = None


def forecast(report: PlanReport, tokens: int | None, price: float | None) -> Forecast:
    """Return what the plan spends on `tokens`; on the job's own steps if it is None.

    It has no restarts and no waits: divide by the goodput that you expect.

    Raises:
        ValueError: the number of tokens is unknown, because the job runs a user's command.
    """
    plan, training = report.plan, with_own_batch(report.spec).training
    if tokens is None and training is None:
        raise ValueError("--price: set --tokens too, because a job with `runtime.command` has no number of tokens")
    length = training.sequence_length if training is not None else 0
    wanted = tokens if tokens is not None else training.steps * training.global_batch_size * length if training else 0
    flops = None
    if plan.architecture is not None and training is not None:
        flops = wanted * training_flops(plan.architecture, length, lora=training.lora)
    gpus = plan.layout.world_size
    if plan.estimate is None:
        return Forecast(wanted, flops, gpus)
    hours = wanted / plan.estimate.tokens_per_second / 3600
    gpu_hours = hours * gpus
    return Forecast(wanted, flops, gpus, hours / 24, gpu_hours, None if price is None else gpu_hours * price)


def sentences(found: Forecast) -> list[str]:
    """The lines of the report."""
    flops = f", {found.flops:.3g} FLOPs" if found.flops is not None else ""
    lines = [f"{found.tokens:,} tokens{flops}"]
    if found.gpu_hours is None or found.days is None:
        return [*lines, "time and GPU-hours are unknown, because there is no estimate for this model on these GPUs"]
    money = "" if found.cost is None else f", cost {found.cost:,.2f}"
    time = f"{format_number(found.days)} days" if found.days >= 1 else f"{format_number(found.days * 24)} hours"
    hours = format_number(found.gpu_hours)
    return [*lines, f"{time} on {count_gpus(found.gpus)}, {hours} GPU-hours{money} (estimated, without restarts)"]


def as_json(found: Forecast) -> dict[str, Any]:
    """The forecast as JSON, without what is unknown."""
    numbers = {
        "tokens": found.tokens,
        "flops": found.flops,
        "gpus": found.gpus,
        "days": found.days,
        "gpuHours": found.gpu_hours,
        "cost": found.cost,
    }
    return {name: value for name, value in numbers.items() if value is not None}
