"""Loss curves on real text: a layout must learn as one process does, step for step.

Run as `python -m tests.parity.curves`: every layout, into docs/loss-curves.md. `make parity` does it last.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
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


def train_all(layouts: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float]]:
    """The loss of every step of each layout, by its name.

    Two pools of ranks train at a time: ranks that meet wait for each other, and leave a core idle by that. One pool
    begins with the layouts of the fewest ranks and one with those of the most, so that both seldom start ranks.
    """
    left = deque(sorted(layouts, key=lambda name: text_run(**layouts[name]).layout.world_size))
    found: dict[str, list[float]] = {}

    def some(take: Callable[[], str]) -> None:
        pool = RankPool()
        try:
            while True:
                try:
                    name = take()
                except IndexError:
                    return
                began = time.monotonic()
                found[name] = losses(pool, **layouts[name])
                sys.stdout.write(f"{name}: {time.monotonic() - began:.0f} s\n")
                sys.stdout.flush()
        finally:
            pool.close()

    with ThreadPoolExecutor(2) as threads:
        for under_way in [threads.submit(some, take) for take in (left.popleft, left.pop)]:
            under_way.result()
    return found


def main() -> int:
    """The command line."""
    began = time.monotonic()
    alone = {mixture: f"one process, {mixture or 'dense'}" for mixture in dict.fromkeys(map(mixture_of, LAYOUTS))}
    curves = train_all({**{name: {"mixture": mixture} for mixture, name in alone.items()}, **LAYOUTS})
    references = {mixture: curves[name] for mixture, name in alone.items()}
    found = {name: curves[name] for name in LAYOUTS}
    differences = {name: largest_difference(curve, references[mixture_of(name)]) for name, curve in found.items()}
    far = [name for name, difference in differences.items() if difference > LIMIT]
    sys.stdout.write(f"{len(found)} layouts, {len(far)} over the limit, {time.monotonic() - began:.0f} s\n")
    sys.stdout.writelines(f"  {name}: {differences[name]:.1e}\n" for name in far)
    (Path(__file__).parents[2] / "docs" / "loss-curves.md").write_text(page(references, found))
    return int(bool(far))


if __name__ == "__main__":
    sys.exit(main())
