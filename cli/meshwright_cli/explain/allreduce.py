"""`meshwright explain allreduce`: how a ring sums, hop by hop, and how long an all-reduce takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from meshwright.planner.cost.accelerators import ACCELERATORS, Accelerator, accelerator
from meshwright.planner.cost.collectives import all_gather, all_reduce
from meshwright.planner.cost.fabric import Fabric, Span
from meshwright.planner.cost_model import fabric_on_site, gpu_on_site
from meshwright.planner.topology.site import SiteFabric
from meshwright.planner.units import format_bytes
from meshwright_cli.explain.svg_option import svg_option, write_svg
from meshwright_cli.fabric import fabric_option, read_fabric
from meshwright_cli.figures.svg import Element, drawing, element, text

SIZES = tuple(1 << exponent for exponent in range(14, 34, 4))
MAX_DRAWN = 8
"""Most ranks whose ring is drawn."""


@dataclass(frozen=True, slots=True)
class Hop:
    """What a rank has after a step of the ring."""

    step: int
    """0 is the beginning."""
    parts: tuple[tuple[int, ...], ...]
    """Rank -> for each chunk the number of ranks whose values are summed in it."""
    moved: tuple[int, ...]
    """Rank -> the chunk that it received in this step, or -1."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one all-reduce."""

    size: int
    seconds: float
    bandwidth: float
    """Bytes per second that each rank sends."""
    gather: float
    """Seconds of an all-gather of the same size: the second half of a ring."""


@click.command()
@click.option("--ranks", type=click.IntRange(2, 1 << 17), default=4, show_default=True, help="Ranks of the group.")
@click.option("--gpu", default="NVIDIA-H100-80GB-HBM3", show_default=True, help="Product of the GPUs.")
@click.option(
    "--per-domain", type=click.IntRange(1, 1024), help="Ranks that share an NVLink domain (default: all that fit)."
)
@fabric_option
@svg_option
def allreduce(ranks: int, gpu: str, per_domain: int | None, fabric: Path | None, svg: Path | None) -> None:
    """Draw a ring all-reduce hop by hop, and estimate its time.

    Each rank has one chunk for each rank of the ring. In the first half of the steps, a chunk travels around the ring
    and is summed (reduce-scatter). In the second half, the sums travel (all-gather). Times are those of the planner's
    cost model, which takes the fastest algorithm of ring, tree and two levels.
    """
    product = accelerator(gpu)
    if product is None:
        raise click.ClickException(f"--gpu: unknown product `{gpu}`: use one of {', '.join(ACCELERATORS)}")
    network = site_fabric(product, read_fabric(fabric))
    inside = min(per_domain or network.domain, ranks)
    if ranks % inside:
        raise click.ClickException(f"--ranks must be a multiple of --per-domain ({inside}), got {ranks}")
    drawn = ring(min(ranks, MAX_DRAWN))
    click.echo(f"Ring of {len(drawn[0].parts)} ranks: values summed in each chunk, * just received")
    for line in ring_lines(drawn):
        click.echo(line)
    click.echo("")
    for line in timing_lines(timings(network, ranks, inside), ranks, inside, product.name):
        click.echo(line)
    title = f"Ring all-reduce of {len(drawn[0].parts)} ranks: the number of summed values in each chunk after each step"
    write_svg(svg, lambda: ring_figure(drawn, title))


def ring(ranks: int) -> list[Hop]:
    """Return every step of a ring all-reduce, by doing it: chunks are sets of the ranks that contributed."""
    have = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    hops = [_hop(0, have, [-1] * ranks)]
    for step in range(1, 2 * ranks - 1):
        reducing = step < ranks
        sent = [(rank - step + 1) % ranks if reducing else (rank + 1 - (step - ranks)) % ranks for rank in range(ranks)]
        before = [[set(chunk) for chunk in chunks] for chunks in have]
        for rank in range(ranks):
            source = (rank - 1) % ranks
            chunk = sent[source]
            arrived = before[source][chunk]
            have[rank][chunk] = have[rank][chunk] | arrived if reducing else set(arrived)
        hops.append(_hop(step, have, [sent[(rank - 1) % ranks] for rank in range(ranks)]))
    return hops


def site_fabric(gpu: Accelerator, site: SiteFabric) -> Fabric:
    """Return the fabric of a GPU on a site."""
    return fabric_on_site(gpu_on_site(gpu, site), site)


def timings(fabric: Fabric, ranks: int, per_domain: int, sizes: Sequence[int] = SIZES) -> list[Timing]:
    """Return the estimated times of all-reduces of several sizes."""
    span = Span((*[per_domain] * (len(fabric.levels) - 1), ranks))
    found = []
    for size in sizes:
        seconds = all_reduce(float(size), span, fabric)
        sent = 2 * size * (ranks - 1) / ranks
        found.append(Timing(size, seconds, sent / seconds, all_gather(float(size), span, fabric)))
    return found


def ring_lines(hops: Sequence[Hop]) -> list[str]:
    """Draw the steps as text: a line for each rank, a column for each step."""
    ranks = len(hops[0].parts)
    shown = hops if len(hops) * (2 * ranks + 2) + 8 <= 80 else _selected(hops, (80 - 8) // (2 * ranks + 2))
    width = 2 * ranks + 1
    lines = ["rank    " + " ".join(f"{_step_name(hop):<{width}}" for hop in shown).rstrip()]
    for rank in range(ranks):
        cells = []
        for hop in shown:
            marked = [
                f"{count}{'*' if chunk == hop.moved[rank] else ' '}" for chunk, count in enumerate(hop.parts[rank])
            ]
            cells.append("".join(marked).ljust(width))
        lines.append(f"{rank:<8}" + " ".join(cells).rstrip())
    return lines


def timing_lines(found: Sequence[Timing], ranks: int, per_domain: int, gpu: str) -> list[str]:
    """Return the table of times."""
    lines = [
        f"{ranks} x {gpu}, {per_domain} in each NVLink domain",
        f"{'size':>9} {'time':>11} {'sent by each rank':>19}",
    ]
    lines += [
        f"{format_bytes(one.size):>9} {_time(one.seconds):>11} {one.bandwidth / 1e9:>14.1f} GB/s" for one in found
    ]
    return lines


def ring_figure(hops: Sequence[Hop], title: str) -> Element:
    """Draw the steps as SVG: a grid of ranks and chunks for each step, darker the more values are summed."""
    ranks = len(hops[0].parts)
    cell, gap, top, left = 20.0, 22.0, 44.0, 52.0
    width = left + len(hops) * (ranks * cell + gap)
    children: list[Element] = [text(f"rank {rank}", 0, top + rank * cell + 14, class_="muted") for rank in range(ranks)]
    for number, hop in enumerate(hops):
        start = left + number * (ranks * cell + gap)
        children.append(text(_step_name(hop), start, top - 8, class_="small"))
        for rank, counts in enumerate(hop.parts):
            for chunk, count in enumerate(counts):
                children += _cell(start + chunk * cell, top + rank * cell, cell, count, ranks, chunk == hop.moved[rank])
    half = left + ranks * (ranks * cell + gap) - gap / 2
    children.append(text("reduce-scatter", left + ranks * cell + gap, 14, class_="bold"))
    children.append(text("all-gather", half + gap / 2, 14, class_="bold"))
    return drawing(width, top + ranks * cell + 12, title, children)


def _cell(x: float, y: float, size: float, count: int, ranks: int, moved: bool) -> list[Element]:
    color = "backward" if count == ranks else "forward" if count > 1 else "idle"
    made = [element("rect", x=x, y=y, width=size - 1, height=size - 1, class_=color)]
    if moved:
        made.append(element("rect", x=x, y=y + size - 4, width=size - 1, height=3, class_="accent"))
    made.append(text(str(count), x + size / 2 - 0.5, y + 13, text_anchor="middle", class_="small"))
    return made


def _hop(step: int, have: list[list[set[int]]], moved: list[int]) -> Hop:
    return Hop(step, tuple(tuple(len(chunk) for chunk in chunks) for chunks in have), tuple(moved))


def _selected(hops: Sequence[Hop], count: int) -> list[Hop]:
    """The first steps, and the last one, of a ring that is too wide."""
    return [*hops[: max(1, count - 1)], hops[-1]]


def _step_name(hop: Hop) -> str:
    return "start" if hop.step == 0 else f"step {hop.step}"


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"
