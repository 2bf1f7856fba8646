"""How long planning takes: full searches, placing 100,000 GPUs, and placing again after a lost node.

    .venv/bin/python benchmarks/planner_speed.py [--quick] [--json FILE]

The baseline of the same run is a search without its bounds, which estimates the cost of each of the same layouts. It is
run on the small case, where it ends in reasonable time.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

from _placing import place_100k, replace_node
from _report import table, write_json

from meshwright.models.presets import published
from meshwright.planner.cost.accelerators import accelerator
from meshwright.planner.cost.estimate import machine_for
from meshwright.planner.cost.strategy import Workload
from meshwright.planner.search.best_first import SearchResult, search
from meshwright.planner.search.expand import base_strategies, estimate_cost, memory_savings
from meshwright.planner.search.request import Objective, SearchRequest
from meshwright.planner.search.search_space import layouts, micro_batch_sizes

H100 = "NVIDIA-H100-80GB-HBM3"
CASES = {
    "llama405b_16384_s": ("llama-3.1-405b", 8192, 2048, 16384, 2.0),
    "moe_2048_s": ("deepseek-v3", 4096, 15360, 2048, 2.0),
    "dense7b_64_s": ("llama-2-7b", 4096, 1024, 64, 0.2),
}
"""Key -> model, tokens per sequence, sequences per step, GPUs, most seconds allowed."""


def request_of(model: str, length: int, batch: int, gpus: int) -> SearchRequest:
    """A search over every technique on H100 nodes."""
    gpu = accelerator(H100)
    assert gpu is not None
    return SearchRequest(Workload(published(model), length, batch), machine_for(gpu), gpus, objective=Objective.TIME)


def timed(request: SearchRequest, repeats: int) -> tuple[float, SearchResult]:
    """Least seconds of several searches, each with nothing cached from the one before but what a process keeps."""
    least, result = float("inf"), None
    for _ in range(repeats):
        started = time.perf_counter()
        result = search(request)
        least = min(least, time.perf_counter() - started)
    assert result is not None
    return least, result


def exhaustive(request: SearchRequest) -> tuple[float, int]:
    """(seconds, layouts) of estimating everything that fits."""
    started, estimated = time.perf_counter(), 0
    for layout in layouts(request):
        for size in micro_batch_sizes(request, layout):
            for base in base_strategies(request, layout, size):
                for strategy, memory in memory_savings(request, base):
                    estimate_cost(request, strategy, memory)
                    estimated += 1
    return time.perf_counter() - started, estimated


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the same numbers")
    parser.add_argument("--quick", action="store_true", help="one repeat, and no placing of 100,000 GPUs")
    args = parser.parse_args()
    numbers: dict[str, float] = {}
    rows = []
    for key, (model, length, batch, gpus, limit) in CASES.items():
        seconds, result = timed(request_of(model, length, batch, gpus), 1 if args.quick else 3)
        numbers[key] = seconds
        rows.append(
            [f"{model} on {gpus}", f"{seconds:.3f}", f"{limit:.1f}", f"{result.estimated}", result.best.summary]
        )
    table("Full search", ["case", "seconds", "limit", "estimated", "best"], rows)
    small = CASES["dense7b_64_s"]
    taken, estimated = exhaustive(request_of(*small[:4]))
    ratio = taken / numbers["dense7b_64_s"]
    table(
        "Baseline: every layout estimated (7B on 64)",
        ["way", "seconds", "layouts", "ratio"],
        [
            ["search", f"{numbers['dense7b_64_s']:.3f}", "", "1.0"],
            ["all", f"{taken:.3f}", f"{estimated}", f"{ratio:.1f}"],
        ],
    )
    numbers["exhaustive_ratio"] = ratio
    placing = [["re-place after a lost node, 2,048 nodes", f"{replace_node():.1f} ms", "50 ms"]]
    numbers["replace_node_ms"] = float(placing[0][1].split()[0])
    if not args.quick:
        numbers["place_100k_s"] = place_100k()
        placing.append(["plan and place 100,000 GPUs in 12,500 nodes", f"{numbers['place_100k_s']:.2f} s", "3 s"])
    table("Placing", ["case", "taken", "limit"], placing)
    numbers["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\npeak memory: {numbers['peak_rss_mib']:.0f} MiB (limit 1,024)")
    if args.json:
        write_json(args.json, numbers)


if __name__ == "__main__":
    main()
