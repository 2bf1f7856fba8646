"""Loss curves on real text: a layout must learn as one process does, step for step.

Run as `python -m tests.parity.curves`: every layout, into docs/loss-curves.md. `make parity` does it last.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.api.data import DataSource, DataSpec
from meshwright.api.parallelism import ContextMethod
from meshwright.api.training import OptimizerSpec
from meshwright.protocol.run_config import NativeRun
from tests.distributed.cases import train_fully
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool

STEPS = 300
LIMIT = 0.01
"""Largest difference of any step's loss, relative to one process."""
LEARNED = 0.75
"""The last losses are at most this part of the first ones: a curve that stays flat shows nothing."""

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "data": {"data": 4},
    "ZeRO-3": {"data": 4, "zero": 3},
    "tensor, sequence": {"tensor": 2},
    "tensor x ZeRO-3": {"tensor": 2, "data": 2, "zero": 3},
    "hybrid shards": {"data": 4, "zero": 3, "replicas": {"shard_size": 2}},
    "ring attention": {"context": 2, "method": ContextMethod.RING_ZIG_ZAG},
    "Ulysses": {"context": 2, "method": ContextMethod.ULYSSES},
    "1F1B": {"pipeline": 2, "micro_batches": 4},
    "interleaved 1F1B": {"pipeline": 2, "micro_batches": 4, "parallelism": {"schedule": "Interleaved1F1B"}},
    "ZB-H2": {"pipeline": 2, "micro_batches": 4, "parallelism": {"schedule": "ZBH2"}},
    "DualPipeV": {"pipeline": 2, "micro_batches": 4, "parallelism": {"schedule": "DualPipeV"}},
    "tensor x pipeline x data": {"tensor": 2, "pipeline": 2, "data": 2},
    "tensor x pipeline x ZeRO-3": {"tensor": 2, "pipeline": 2, "data": 2, "zero": 3},
    "tensor x context x ZeRO-2": {"tensor": 2, "context": 2, "data": 2, "zero": 2},
    "experts x ZeRO-2": {"data": 2, "expert": 2, "zero": 2, "mixture": "Mixtral"},
    "experts x tensor x pipeline": {"data": 2, "expert": 2, "tensor": 2, "pipeline": 2, "mixture": "Mixtral"},
}


def text_run(**layout: Any) -> NativeRun:
    """A run on the Python standard library's own source."""
    run = small_run(**layout, steps=STEPS, layers=4, hidden_size=64, intermediate_size=128)
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


def learned(curve: list[float]) -> float:
    """The mean of the last ten losses relative to that of the first ten."""
    return sum(curve[-10:]) / sum(curve[:10])


def mixture_of(name: str) -> str | None:
    """The mixture of experts in a layout's model, or None for the dense one: its one process trains the same."""
    mixture: str | None = LAYOUTS[name].get("mixture")
    return mixture


def page(references: Mapping[str | None, list[float]], found: Mapping[str, list[float]]) -> str:
    """The results as Markdown; a reference is the curve of one process, by the mixture of its model."""
    lines = [
        "# Loss curves",
        "",
        f"A small decoder trains {STEPS} steps on the source of the Python standard library, in one process and in",
        f"each layout. The loss of every step must be within {LIMIT:.0%} of that of one process. `make parity`",
        "writes this page.",
        "",
        *(
            f"One process, {mixture or 'dense'}: {sum(curve[:10]) / 10:.4f} over the first ten steps, "
            f"{sum(curve[-10:]) / 10:.4f} over the last ten.\n"
            for mixture, curve in references.items()
        ),
        "| Layout | Options | Last ten steps | Largest difference of any step |",
        "|---|---|---|---|",
    ]
    for name, curve in found.items():
        far = largest_difference(curve, references[mixture_of(name)])
        lines.append(f"| {name} | {_options(LAYOUTS[name])} | {sum(curve[-10:]) / 10:.4f} | {far:.1e} |")
    return "\n".join(lines) + "\n"


def _options(layout: Mapping[str, Any]) -> str:
    flat = {**layout, **layout.get("parallelism", {}), **layout.get("replicas", {})}
    told = {key: value for key, value in flat.items() if key not in ("parallelism", "replicas")}
    return ", ".join(f"{key.replace('_', ' ')} {getattr(value, 'value', value)}" for key, value in told.items())


def main() -> int:
    """The command line."""
    pool = RankPool()
    references, found, worst = {}, {}, 0.0
    try:
        for name, layout in LAYOUTS.items():
            mixture = mixture_of(name)
            if mixture not in references:
                references[mixture] = losses(pool, mixture=mixture)
            found[name] = losses(pool, **layout)
            far = largest_difference(found[name], references[mixture])
            worst = max(worst, far)
            sys.stdout.write(f"{name}: {far:.1e}\n")
            sys.stdout.flush()
    finally:
        pool.close()
    (Path(__file__).parents[2] / "docs" / "loss-curves.md").write_text(page(references, found))
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
