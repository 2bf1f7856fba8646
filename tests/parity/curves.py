"""Loss curves on real text: a layout must learn as one process does, step for step.

Run as `python -m tests.parity.curves`: every layout, into docs/loss-curves.md. `make parity` does it last.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.api.data import DataSource, DataSpec
from meshwright.api.training import OptimizerSpec
from meshwright.protocol import RunConfig
from tests.distributed.cases import train_fully
from tests.distributed.configs import small_run
from tests.distributed.pool import RankPool

STEPS = 300
LIMIT = 0.01
"""Largest difference of any step's loss, relative to one process."""
LEARNT = 0.75
"""The last losses are at most this part of the first ones: a curve that stays flat shows nothing."""

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "data": {"data": 4},
    "ZeRO-3": {"data": 4, "zero": 3},
    "tensor, sequence": {"tensor": 2},
    "tensor x ZeRO-3": {"tensor": 2, "data": 2, "zero": 3},
    "1F1B": {"pipeline": 2, "micro_batches": 4},
    "tensor x pipeline x data": {"tensor": 2, "pipeline": 2, "data": 2},
    "tensor x pipeline x ZeRO-3": {"tensor": 2, "pipeline": 2, "data": 2, "zero": 3},
}


def text_run(**layout: Any) -> RunConfig:
    """A run on the Python standard library's own source."""
    run = small_run(**layout, steps=STEPS, layers=4, hidden_size=64, intermediate_size=128)
    assert run.training is not None
    optimizer = OptimizerSpec(learning_rate=3e-3, warmup_steps=20)
    training = run.training.model_copy(update={"sequence_length": 64, "optimizer": optimizer})
    data = DataSpec(source=DataSource.PYTHON_STDLIB)
    return run.model_copy(update={"training": training, "data": data, "checkpoint": None})


def losses(pool: RankPool, **layout: Any) -> list[float]:
    """The loss of every step."""
    answers = pool.run(train_fully, text_run(**layout), timeout=900)
    return [report.loss for report in answers[0][1].reports]


def largest_difference(curve: list[float], reference: list[float]) -> float:
    """Over all steps, relative to the reference's loss of that step."""
    return max(abs(got - want) / want for got, want in zip(curve, reference, strict=True))


def learnt(curve: list[float]) -> float:
    """The mean of the last ten losses relative to that of the first ten."""
    return sum(curve[-10:]) / sum(curve[:10])


def page(reference: list[float], found: Mapping[str, list[float]]) -> str:
    """The results as Markdown."""
    first, last = sum(reference[:10]) / 10, sum(reference[-10:]) / 10
    lines = [
        "# Loss curves",
        "",
        f"A small decoder trains {STEPS} steps on the source of the Python standard library, in one process and in",
        f"each layout. Every step must be within {LIMIT:.0%} of the one process. `make parity` writes this page.",
        "",
        f"One process: {first:.4f} over the first ten steps, {last:.4f} over the last ten.",
        "",
        "| Layout | Options | Last ten steps | Largest difference of any step |",
        "|---|---|---|---|",
    ]
    for name, curve in found.items():
        options = ", ".join(f"{key} {getattr(value, 'value', value)}" for key, value in LAYOUTS[name].items())
        lines.append(
            f"| {name} | {options} | {sum(curve[-10:]) / 10:.4f} | {largest_difference(curve, reference):.1e} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command line."""
    pool = RankPool()
    found = {}
    try:
        reference = losses(pool)
        for name, layout in LAYOUTS.items():
            found[name] = losses(pool, **layout)
            sys.stdout.write(f"{name}: {largest_difference(found[name], reference):.1e}\n")
            sys.stdout.flush()
    finally:
        pool.close()
    (Path(__file__).parents[2] / "docs" / "loss-curves.md").write_text(page(reference, found))
    return int(any(largest_difference(curve, reference) > LIMIT for curve in found.values()))


if __name__ == "__main__":
    sys.exit(main())
