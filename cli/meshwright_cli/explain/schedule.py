"""`meshwright explain schedule`: what each rank of a pipeline does when."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.figures import counted
from meshwright.schedules.actions import Schedule
from meshwright.schedules.registry import kind_of, schedules_where
from meshwright.schedules.schedule import PipelineScheduleKind, PipelineShape
from meshwright.schedules.simulator import ActionCosts, Simulation, simulate
from meshwright_cli.explain.svg_option import svg_option, write_svg
from meshwright_cli.figures.schedule_figure import schedule_figure
from meshwright_cli.figures.schedule_text import schedule_lines

KINDS = {str(name): kind_of(name) for name in schedules_where(lambda _: True)}
MAX_RANKS, MAX_MICRO_BATCHES = 64, 512


@click.command()
@click.argument("name", metavar="[SCHEDULE]", default="1F1B", type=click.Choice(list(KINDS), case_sensitive=False))
@click.option("--ranks", type=click.IntRange(2, MAX_RANKS), default=4, show_default=True, help="Pipeline ranks.")
@click.option(
    "--micro-batches",
    type=click.IntRange(1, MAX_MICRO_BATCHES),
    default=8,
    show_default=True,
    help="Micro-batches of a step.",
)
@click.option(
    "--virtual-stages",
    type=click.IntRange(2, 16),
    default=2,
    show_default=True,
    help="Stages of each rank, for schedules that let you choose.",
)
@click.option(
    "--times",
    nargs=3,
    type=click.FloatRange(0.1, 1000.0),
    default=(1.0, 1.0, 1.0),
    help="Relative times of the forward pass, of gradients of inputs, and of gradients of weights (default: 1 1 1).",
)
@svg_option
def schedule(
    name: str, ranks: int, micro_batches: int, virtual_stages: int, times: tuple[float, float, float], svg: Path | None
) -> None:
    """Draw the timeline of a pipeline schedule, from the simulator.

    Each line is a rank, time goes from left to right. To see the schedule of a plan with its estimated times, use
    `meshwright report`.
    """
    kind = KINDS[name]
    try:
        made, simulation = timeline(kind, ranks, micro_batches, virtual_stages, ActionCosts(*times))
    except ValueError as error:
        raise click.ClickException(f"{name}: {error}") from error
    batches = counted(micro_batches, "micro-batch")
    title = f"{name}: {counted(ranks, 'rank')}, {batches}, {counted(made.stages, 'stage')}"
    click.echo(title)
    for line in schedule_lines(made, simulation):
        click.echo(line)
    about = summary(kind, simulation)
    click.echo("\n".join(about.split(". ")))
    write_svg(svg, lambda: schedule_figure(made, simulation, f"{title}. {about}", width=860, with_legend=True))


def timeline(
    kind: PipelineScheduleKind,
    ranks: int,
    micro_batches: int,
    virtual_stages: int = 2,
    costs: ActionCosts | None = None,
) -> tuple[Schedule, Simulation]:
    """Generate and simulate a schedule. `costs` are those of all stages of a rank together.

    Raises:
        ValueError: the schedule does not exist for these numbers.
    """
    whole = costs or ActionCosts()
    chunks = kind.stages_per_rank(virtual_stages)
    each = ActionCosts(whole.forward / chunks, whole.backward_input / chunks, whole.backward_weight / chunks)
    if not kind.accepts(ranks, micro_batches):
        raise ValueError(_requirement(kind, ranks, micro_batches))
    made = kind.generate(PipelineShape(ranks, micro_batches, chunks), each)
    return made, simulate(made, each)


def summary(kind: PipelineScheduleKind, simulation: Simulation) -> str:
    """Return bubble and micro-batches in flight in two sentences. Of an asynchronous pipeline one step is drawn."""
    in_flight = ", ".join(map(str, simulation.in_flight))
    waits = f"Ranks wait {simulation.bubble:.1%} of the time"
    if kind.asynchronous:
        waits = f"{waits} in this step alone: without a flush, others fill it"
    return f"{waits}. Most micro-batches in flight, by rank: {in_flight}"


def _requirement(kind: PipelineScheduleKind, ranks: int, micro_batches: int) -> str:
    """What the schedule needs of its numbers."""
    if kind.single_micro_batch:
        return f"a step must have one micro-batch: set --micro-batches 1, got {micro_batches}"
    if kind.even and (ranks % 2 or micro_batches % 2):
        return f"--ranks and --micro-batches must be even, got {ranks} and {micro_batches}"
    if kind.whole_rounds and micro_batches % ranks:
        return f"--micro-batches must be a multiple of --ranks ({ranks}), got {micro_batches}"
    least = kind.micro_batches_per_rank * ranks
    return f"--micro-batches must be at least {least} for {ranks} ranks, got {micro_batches}"
