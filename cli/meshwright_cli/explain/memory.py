"""`meshwright explain memory`: what fills a GPU, with each ZeRO stage and each kind of activation checkpointing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from meshwright.api.precision import GradientFormat
from meshwright.api.training import ActivationCheckpointing
from meshwright.figures import counted
from meshwright.models.architecture import Architecture
from meshwright.models.presets import PRESETS, UnknownModelError
from meshwright.planner.cost.accelerators import ACCELERATORS, Accelerator, accelerator
from meshwright.planner.cost.estimate import machine_for, memory_of
from meshwright.planner.cost.memory import Memory
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright.planner.units import GIB
from meshwright_cli.explain.svg_option import svg_option, write_svg
from meshwright_cli.figures.bars_figure import Row, bars_figure
from meshwright_cli.figures.bars_text import bar_lines
from meshwright_cli.figures.svg import Element

KINDS = ("parameters", "gradients", "optimizer state", "activations", "everything else")
SYMBOLS = "PGOA."
_MICRO_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One way to train, and the memory of the fullest rank."""

    name: str
    memory: Memory

    @property
    def parts(self) -> tuple[float, ...]:
        """Bytes in the order of `KINDS`. Master copies count as parameters."""
        memory = self.memory
        known = (memory.parameters + memory.master, memory.peak_gradients, memory.optimizer, memory.activations)
        return (*known, memory.total - sum(known))


@click.command()
@click.option("--model", default="llama-3-8b", show_default=True, help="Preset of the model.")
@click.option("--ranks", type=click.IntRange(1, 65536), default=8, show_default=True, help="Data-parallel ranks.")
@click.option(
    "--sequence-length", type=click.IntRange(1, 1 << 24), default=8192, show_default=True, help="Tokens of a sequence."
)
@click.option("--gpu", default="NVIDIA-H100-80GB-HBM3", show_default=True, help="Product of the GPUs.")
@svg_option
def memory(model: str, ranks: int, sequence_length: int, gpu: str, svg: Path | None) -> None:
    """Draw the memory of one rank by kind, from the planner's cost model.

    First with ZeRO stages 0 to 3, which divide states over the ranks, also with `training.shardedMasters`; then with
    four micro-batches, whose gradients accumulate; then with activation checkpointing, which stores less for the
    backward pass. One sequence per rank and micro-batch, bf16, AdamW.
    """
    architecture, product = _model(model), _gpu(gpu)
    groups = memory_cases(architecture, ranks, sequence_length, product)
    click.echo(f"{model} on {counted(ranks, 'rank')}, sequences of {sequence_length:,} tokens: GiB of one rank")
    for line in memory_lines(groups, product.memory):
        click.echo(line)
    title = f"Memory of one of {ranks} ranks that train {model}, by kind, with sequences of {sequence_length:,} tokens"
    write_svg(svg, lambda: memory_figure(groups, product.memory, title))


def memory_cases(
    architecture: Architecture, ranks: int, sequence_length: int, gpu: Accelerator
) -> list[tuple[str, list[Case]]]:
    """Return (heading, cases): ZeRO stages without recomputation; accumulation and recomputation with ZeRO stage 3."""
    machine = machine_for(gpu)
    work = Workload(architecture, sequence_length, ranks)
    base = Strategy(data=ranks)
    zero = [
        Case(f"ZeRO {stage}" if stage else "DDP", memory_of(work, replace(base, zero_stage=stage), machine))
        for stage in range(4)
    ]
    masters = replace(base, settings=replace(base.settings, flat=True, master_gradient=GradientFormat.BF16.bytes))
    published = [
        Case(f"ZeRO {stage}", memory_of(work, replace(masters, zero_stage=stage), machine)) for stage in (1, 2)
    ]
    sharded = replace(base, zero_stage=3)
    accumulating = replace(sharded, micro_batches=_MICRO_BATCHES)
    each = replace(accumulating, settings=replace(base.settings, reduces_each=True))
    steps = Workload(architecture, sequence_length, ranks * _MICRO_BATCHES)
    reduced = [
        Case(name, memory_of(steps, strategy, machine)) for name, strategy in (("once", accumulating), ("each", each))
    ]
    kinds = (ActivationCheckpointing.NONE, ActivationCheckpointing.SELECTIVE, ActivationCheckpointing.FULL)
    saved = [Case(kind.value, memory_of(work, replace(sharded, checkpointing=kind), machine)) for kind in kinds]
    return [
        ("ZeRO stage, without activation checkpointing", zero),
        ("The same with `training.shardedMasters`", published),
        ("Reduction of 4 micro-batches, with ZeRO 3 (`reduceEveryMicroBatch`: each)", reduced),
        ("Activation checkpointing, with ZeRO 3", saved),
    ]


def memory_lines(groups: Sequence[tuple[str, Sequence[Case]]], limit: float) -> list[str]:
    """Draw the cases as text, with the GPU's memory as `|`."""
    longest = max(limit, *(sum(case.parts) for _, cases in groups for case in cases))
    lines = []
    for heading, cases in groups:
        rows = [(case.name, case.parts, f"{sum(case.parts) / GIB:.1f}") for case in cases]
        lines += ["", heading, *bar_lines(rows, SYMBOLS, longest, limit)]
    legend = ", ".join(f"{symbol} {kind}" for symbol, kind in zip(SYMBOLS, KINDS, strict=True))
    return [*lines, "", legend, f"| the GPU's {limit / GIB:.0f} GiB"]


def memory_figure(groups: Sequence[tuple[str, Sequence[Case]]], limit: float, title: str) -> Element:
    """Draw the cases as SVG."""
    rows = [
        (heading, [Row(case.name, case.parts, f"{sum(case.parts) / GIB:.1f} GiB") for case in cases])
        for heading, cases in groups
    ]
    return bars_figure(rows, KINDS, title, limit, f"GPU: {limit / GIB:.0f} GiB")


def _model(name: str) -> Architecture:
    try:
        return PRESETS[name]
    except (KeyError, UnknownModelError):
        raise click.ClickException(
            f"--model: unknown preset `{name}`: use one of {', '.join(sorted(PRESETS))}"
        ) from None


def _gpu(name: str) -> Accelerator:
    found = accelerator(name)
    if found is None:
        raise click.ClickException(f"--gpu: unknown product `{name}`: use one of {', '.join(ACCELERATORS)}")
    return found
