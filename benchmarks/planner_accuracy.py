"""How well the cost model agrees with published runs: memory, step time and the choice between layouts.

    python benchmarks/planner_accuracy.py [--data FILE] [--json FILE] [--quick] [--fit]

Time is scored leave-one-model-out: the constants of a (hardware, framework) pair that estimate a model were fitted
without any run of it. They stand in `planner_constants.json` beside this file; `--fit` writes it anew from the data and
prints the constants that the planner ships. A model that was in no fit is estimated with those shipped constants.
Memory has no constants per model. Regret is the measured time of the layout that the estimates pick over the
best measured among the runs of the same model, batch and number of GPUs.

The second table leaves entire frameworks out: a run is estimated with the constants that the planner ships for other
frameworks on the same accelerator, else with the values from physics and data sheets.

The baseline of the same run is a roofline: model FLOPs (and recomputed ones) at half the peak, with the pipeline's
bubble; for memory, 18 bytes a parameter and Korthikanti's activations of the first stage.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from _published import LEFT_OUT, Case, load
from _published_llama import READERS
from _report import table, write_json

from meshwright.api.training import ActivationCheckpointing
from meshwright.models.counts import training_flops
from meshwright.planner.cost.comm_groups import group_spans
from meshwright.planner.cost.constants import FITTED, Constants, calibrate, constants_for
from meshwright.planner.cost.frameworks import FRAMEWORKS
from meshwright.planner.cost.machine import Machine
from meshwright.planner.cost.memory import memory_by_stage, worst_stage
from meshwright.planner.cost.step_time import step_time

HERE = Path(__file__).resolve().parent
CONSTANTS = HERE / "planner_constants.json"
QUICK = 8
"""With `--quick`, every so many of the single-node runs."""


def default_data() -> Path | None:
    """`shared/data/published_training_runs.json` in the checkout or a directory above it."""
    for directory in HERE.parents:
        found = directory / "shared" / "data" / "published_training_runs.json"
        if found.is_file():
            return found
    return None


def seconds_of(case: Case, constants: Constants) -> float:
    """The estimate of a step."""
    runtime = FRAMEWORKS[case.runtime]
    machine = Machine(case.gpu, case.fabric, runtime, constants)
    return step_time(case.work, case.strategy, machine, group_spans(case.strategy, case.fabric, runtime.order)).total


def memory_of(case: Case) -> float:
    """The estimate of the measured rank's bytes: of the fullest, if its stage is not known."""
    runtime = FRAMEWORKS[case.runtime]
    if case.stage is not None:
        return memory_by_stage(case.work, case.strategy, runtime)[case.stage].total
    return worst_stage(case.work, case.strategy, runtime).total


def roofline_seconds(case: Case) -> float:
    """The baseline of time."""
    again = 1.0 if case.strategy.checkpointing is ActivationCheckpointing.FULL else 0.0
    flops = case.work.tokens * training_flops(case.work.model, case.work.sequence_length, recomputed=again)
    pipeline, count = case.strategy.pipeline, case.strategy.micro_batches
    idle = (pipeline - 1) / (count * case.strategy.virtual_stages)
    return flops / (case.strategy.world_size * case.gpu.half * 0.5) * (1.0 + idle)


def simple_memory(case: Case) -> float:
    """The baseline of memory: 18 bytes a parameter, 34 s b h / t of every layer of the first stage in flight."""
    work, strategy = case.work, case.strategy
    shards = strategy.tensor * strategy.pipeline * (strategy.shard_ranks if strategy.zero_stage == 3 else 1)
    tokens = work.sequence_length * strategy.micro_batch_size / strategy.context
    layers = work.model.layers / strategy.pipeline * min(strategy.pipeline, strategy.micro_batches)
    per_token = 2.0 if strategy.checkpointing is ActivationCheckpointing.FULL else 34.0
    return (
        18.0 * work.model.parameters / shards + per_token * tokens * work.model.hidden_size * layers / strategy.tensor
    )


def fit(cases: list[Case]) -> tuple[dict[str, Constants], dict[str, dict[str, Constants]]]:
    """(pair -> constants of all its runs, pair -> model left out -> constants of the rest)."""
    pairs: defaultdict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if case.seconds is not None:
            pairs[case.pair].append(case)
    everything = {pair: _calibrated(members) for pair, members in pairs.items()}
    without = {
        pair: {
            model: _calibrated([case for case in members if case.model != model])
            for model in sorted({case.model for case in members})
        }
        for pair, members in pairs.items()
    }
    return everything, without


def _calibrated(cases: list[Case]) -> Constants:
    measured = [case.seconds for case in cases if case.seconds is not None]
    return calibrate([lambda constants, case=case: seconds_of(case, constants) for case in cases], measured)


def constants_of(case: Case, without: dict[str, dict[str, list[float]]]) -> Constants:
    """Constants that never saw the case's model."""
    held_out = without.get(case.pair, {}).get(case.model)
    if held_out is not None:
        return Constants(*held_out)
    accelerator, runtime = case.pair.split("/")
    return constants_for(accelerator, runtime)


def score(cases: list[Case], without: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Errors by table."""
    tables: defaultdict[str, list[Case]] = defaultdict(list)
    for case in cases:
        tables[case.table].append(case)
    return {name: _score_table(members, without) for name, members in tables.items()}


def score_frameworks(cases: list[Case]) -> dict[str, dict[str, float]]:
    """Errors of time by framework, with constants that were fitted without it."""
    families: defaultdict[str, list[tuple[Case, float]]] = defaultdict(list)
    for case in cases:
        if case.seconds is not None:
            families[case.pair.split("/")[1]].append((case, case.seconds))
    result = {}
    for name, members in families.items():
        others = {pair: constants for pair, constants in FITTED.items() if pair[1] != name}
        errors = [
            seconds_of(case, constants_for(case.gpu.name, name, others)) / seconds - 1 for case, seconds in members
        ]
        result[name] = {
            "rows": len(errors),
            "time_error": _mean(abs(error) for error in errors),
            "time_error_max": max(abs(error) for error in errors),
            "time_bias": _mean(errors),
        }
    return result


def _score_table(cases: list[Case], without: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    result: dict[str, float] = {"rows": len(cases)}
    timed = [(case, case.seconds) for case in cases if case.seconds is not None]
    if timed:
        guesses = {id(case): seconds_of(case, constants_of(case, without)) for case, _ in timed}
        errors = [guesses[id(case)] / seconds - 1 for case, seconds in timed]
        result["time_error"] = _mean(abs(error) for error in errors)
        result["time_bias"] = _mean(errors)
        result["time_error_roofline"] = _mean(abs(roofline_seconds(case) / seconds - 1) for case, seconds in timed)
        result.update(_regret([case for case, _ in timed], guesses))
    weighed = [(case, case.memory) for case in cases if case.memory is not None]
    if weighed:
        errors = [memory_of(case) / measured - 1 for case, measured in weighed]
        result["memory_error"] = _mean(abs(error) for error in errors)
        result["memory_underestimate"] = max(0.0, *(-error for error in errors), 0.0)
        result["memory_certain"] = float(all(case.certain for case, _ in weighed))
        result["memory_error_simple"] = _mean(abs(simple_memory(case) / held - 1) for case, held in weighed)
    return result


def _regret(cases: list[Case], guesses: dict[int, float]) -> dict[str, float]:
    groups: defaultdict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if case.rivals is not None:
            groups[case.rivals].append(case)
    regrets = []
    for rivals in groups.values():
        if len(rivals) > 1:
            picked = min(rivals, key=lambda case: guesses[id(case)])
            regrets.append((picked.seconds or 0.0) / min(case.seconds or 0.0 for case in rivals) - 1)
    return {"regret": _mean(regrets), "choices": float(len(regrets))} if regrets else {}


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def summary(tables: dict[str, dict[str, float]], frameworks: dict[str, dict[str, float]]) -> dict[str, object]:
    """The figures over all tables. Memory is over rows; time and regret over tables, so that none drowns the rest."""
    held = [(t["memory_error"], t["rows"]) for t in tables.values() if "memory_error" in t]
    rows = sum(count for _, count in held)
    others = [t["time_error"] for name, t in tables.items() if "time_error" in t and name != "vtrain_multi_node"]
    vtrain = tables.get("vtrain_multi_node", {})
    regrets = [t["regret"] for t in tables.values() if "regret" in t]
    return {
        "memory_error_mean": sum(error * count for error, count in held) / rows if rows else None,
        "memory_underestimate_max": max(
            (t["memory_underestimate"] for t in tables.values() if t.get("memory_certain")), default=None
        ),
        "time_error_lomo_vtrain": vtrain.get("time_error"),
        "time_error_mean": _mean(others) if others else None,
        "time_error_framework_left_out": _mean(f["time_error"] for f in frameworks.values()) if frameworks else None,
        "regret_mean": _mean(regrets) if regrets else None,
        "frameworks": frameworks,
        "tables": tables,
    }


def main() -> None:
    """Scores the data and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=default_data(), help="rows in the format of the published runs")
    parser.add_argument("--json", type=Path, help="write the same numbers here")
    parser.add_argument("--quick", action="store_true", help="a part of the single-node runs")
    parser.add_argument("--fit", action="store_true", help="fit the constants anew and write them")
    arguments = parser.parse_args()
    if arguments.data is None:
        parser.error("no shared/data/published_training_runs.json here or above: give --data FILE")
    loaded = load(arguments.data, READERS)
    cases = loaded.cases
    if arguments.quick:
        single = [case for case in cases if case.table == "vtrain_single_node"]
        cases = [case for case in cases if case.table != "vtrain_single_node"] + single[::QUICK]
    if arguments.fit:
        write_constants(cases)
    without = json.loads(CONSTANTS.read_text(encoding="utf-8"))
    tables = score(cases, without)
    frameworks = score_frameworks(cases)
    report(tables, frameworks, loaded.skipped, loaded.unknown)
    if arguments.json is not None:
        write_json(arguments.json, summary(tables, frameworks))


def write_constants(cases: list[Case]) -> None:
    """Fits, writes the held-out constants, and prints what the planner ships."""
    everything, without = fit(cases)
    numbers = {
        pair: {model: [round(c.compute, 4), round(c.communication, 4), round(c.host, 4)] for model, c in models.items()}
        for pair, models in without.items()
    }
    CONSTANTS.write_text(json.dumps(numbers, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for pair, found in sorted(everything.items()):
        print(f"{pair}: Constants({found.compute:.3f}, {found.communication:.3f}, {found.host:.3f})")


def report(
    tables: dict[str, dict[str, float]],
    frameworks: dict[str, dict[str, float]],
    skipped: dict[str, list[str]],
    unknown: list[str],
) -> None:
    """Prints everything."""
    columns = ["table", "rows", "time", "roofline", "regret", "memory", "simple", "under"]
    keys = [
        "time_error",
        "time_error_roofline",
        "regret",
        "memory_error",
        "memory_error_simple",
        "memory_underestimate",
    ]
    lines = [
        [name, str(int(values["rows"])), *(f"{values[key]:.1%}" if key in values else "" for key in keys)]
        for name, values in sorted(tables.items())
    ]
    table("Mean absolute error against published runs (time: leave-one-model-out)", columns, lines)
    measures = ("time_error", "time_error_max", "time_bias")
    lines = [
        [name, str(int(values["rows"])), *(f"{values[key]:.1%}" for key in measures)]
        for name, values in sorted(frameworks.items())
    ]
    title = "Mean absolute error of time, leave-one-framework-out"
    table(title, ["framework", "rows", "time", "largest", "bias"], lines)
    for name, value in summary(tables, frameworks).items():
        if isinstance(value, float):
            print(f"{name}: {value:.2%}")
    for name, reasons in sorted(skipped.items()):
        print(f"skipped {len(reasons)} rows of {name}: {', '.join(sorted(set(reasons)))}")
    for name in unknown:
        print(f"table {name} is not known: not scored")
    print("\nNot scored:")
    for name, reason in LEFT_OUT.items():
        print(f"  {name}: {reason}")


if __name__ == "__main__":
    main()
