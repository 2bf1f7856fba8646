"""How much time the worker's training step takes, against bare loops in the same processes and on the same batches.

On CPU, in turns, with an interval of the ratio: one process against a loop written by hand; ZeRO-3 on two ranks against
bare `fully_shard`; a pipeline of two ranks against bare `torch.distributed.pipelining`. Losses of the first steps must
agree, or the two do not do the same work. Exit status 1 when an overhead is above 3% for certain.

On a GPU (`--device cuda`, taken where there is one): Llama shapes at 4,096 tokens, tokens a second, MFU, HFU and peak
memory; see `_gpu_throughput.py`.

    python -m benchmarks.throughput [--quick] [--device cpu|cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks._circumstances import circumstances
from benchmarks._contests import CLOCKS, contest, run_of
from benchmarks._gpu_settings import LABELS
from benchmarks._gpu_throughput import MODELS, failed, measure_models
from benchmarks._pairs import FEWEST, Ratio, ratio_of
from benchmarks._ranks import on_ranks
from benchmarks._report import table, write_json
from meshwright.models.architecture import Architecture
from meshwright.protocol.run_config import NativeRun

LIMIT = 0.03
MODEL = Architecture(layers=4, hidden_size=256, intermediate_size=688, heads=8, kv_heads=4, vocab_size=2048)
"""Small enough for CPUs; a step of it takes some tenths of a second, so that milliseconds of a framework's show."""
TINY = Architecture(layers=2, hidden_size=64, intermediate_size=96, heads=4, kv_heads=2, vocab_size=512)


def runs(*, quick: bool) -> dict[str, tuple[str, NativeRun]]:
    """By name: the baseline, and the run that both do."""
    model = TINY if quick else MODEL
    training: dict[str, object] = {"globalBatchSize": 4, "sequenceLength": 32 if quick else 128}
    return {
        "one process": ("a loop written by hand", run_of(model, training)),
        "accumulating": ("a loop written by hand", run_of(model, training, micro_batches=4)),
        "ZeRO-3, 2 ranks": ("fully_shard", run_of(model, training, data=2)),
        "1F1B, 2 ranks": ("Schedule1F1B", run_of(model, training, pipeline=2, micro_batches=4)),
    }


def measure(run: NativeRun, pairs: int, steps: int, clock: str) -> tuple[Ratio, float, float]:
    """The ratio of the slowest rank's times, and the median milliseconds of a step of ours and of theirs."""
    ranks = on_ranks(contest, run, pairs, steps, clock)
    ours = [max(times) for times in zip(*(rank.ours for rank in ranks), strict=True)]
    theirs = [max(times) for times in zip(*(rank.theirs for rank in ranks), strict=True)]
    middle = pairs // 2
    return ratio_of(ours, theirs), sorted(ours)[middle] / steps * 1e3, sorted(theirs)[middle] / steps * 1e3


def on_cpu(args: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> list[str]:
    """Every comparison, its numbers saved as soon as they are known; the names of those too slow for certain."""
    pairs, steps = (FEWEST, 2) if args.quick else (args.pairs, args.steps)
    numbers: dict[str, Any] = {}
    rows, slow = [], []
    for name, (baseline, run) in runs(quick=args.quick).items():
        ratio, ours, theirs = measure(run, pairs, steps, args.clock)
        verdict = ratio.verdict(LIMIT)
        slow += [name] if verdict == "above" else []
        overheads = [f"{value - 1:+.1%}" for value in (ratio.median, ratio.low, ratio.high)]
        rows.append([name, baseline, f"{ours:.1f}", f"{theirs:.1f}", overheads[0], " to ".join(overheads[1:]), verdict])
        numbers[name] = {
            "baseline": baseline,
            "ratio": ratio.median,
            "low": ratio.low,
            "high": ratio.high,
            "pairs": ratio.pairs,
            "milliseconds": ours,
            "baseline milliseconds": theirs,
        }
        print(f"{name}: {overheads[0]} ({' to '.join(overheads[1:])})", flush=True)
        save(numbers)
    columns = ["run", "baseline", "ms a step", "baseline", "overhead", "95% interval", f"of {LIMIT:.0%}"]
    table(f"Training step, {pairs} pairs of {steps} steps, one thread a rank, {args.clock} time", columns, rows)
    return slow


def main() -> None:
    """Runs it; exit status 1 when an overhead on CPU is above the limit for certain, or a run on a GPU failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the same numbers")
    parser.add_argument("--quick", action="store_true", help="tiny models and few steps: whether it runs, not how fast")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one, when left out")
    parser.add_argument("--pairs", type=int, default=20, help="CPU: pairs of each comparison")
    parser.add_argument("--steps", type=int, default=5, help="CPU: steps of each half of a pair; GPU: measured steps")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall", help="CPU: `cpu` on a busy machine")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS), help="GPU: which shapes")
    parser.add_argument(
        "--runs", nargs="+", choices=LABELS, default=[], help="GPU: which runs of each, all if left out"
    )
    args = parser.parse_args()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    known = circumstances(device)

    def save(results: dict[str, Any]) -> None:
        write_json(args.json, {"circumstances": known, "results": results})

    slow: list[str] = []
    if device == "cuda":
        numbers = measure_models(args.models, args.steps, quick=args.quick, runs=args.runs, save=save)
        if problems := failed(numbers):
            print(f"did not run: {', '.join(problems)}")
            sys.exit(1)
    else:
        slow = on_cpu(args, save)
    if slow and not args.quick:
        print(f"more than {LIMIT:.0%} slower: {', '.join(slow)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
