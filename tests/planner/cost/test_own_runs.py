"""Steps of this runtime on a GPU against the estimates. Of the constants, one is fitted to the runs in bf16."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.training import TrainingSpec
from meshwright.layout import Layout
from meshwright.models.presets import published
from meshwright.planner.cost.accelerators import accelerator
from meshwright.planner.cost.estimate import Estimate, estimate, machine_for
from meshwright.planner.workload import TrainingJob

DIRECTORY = Path(__file__).parents[3] / "benchmarks" / "results"
RESULTS = json.loads((DIRECTORY / "throughput-nvidia-h200.json").read_text(encoding="utf-8"))
OTHER_CARDS = [
    json.loads((DIRECTORY / f"throughput-nvidia-h200-{number}.json").read_text(encoding="utf-8"))["results"]
    for number in (2, 3)
]
RUNS = {
    name: run
    for name, run in RESULTS["results"].items()
    # The bare loop is another runtime, and deterministic attention another kernel.
    if "bare loop" not in name and "deterministic" not in name
}
SECOND_CARD = {
    "llama-3.2-1b bf16": 62_631,
    "llama-3.2-1b fp8": 74_470,
    "llama-3.2-3b bf16": 25_101,
    "llama-3.2-3b fp8": 31_241,
    "llama-3-8b bf16, all bf16": 11_809,
    "llama-3-8b fp8, all bf16": 15_678,
}
"""Tokens per second of a slower H200 (docs/performance.md)."""


def estimate_of(name: str) -> Estimate:
    setting: dict[str, Any] = RUNS[name]["setting"]
    micro_batches = setting["micro_batches"]
    spec = TrainingSpec.model_validate(
        {
            "steps": 8,
            "sequenceLength": 4096,
            "precision": "bf16",
            "activationCheckpointing": setting["checkpointing"],
            "masterWeights": setting["master_weights"],
            "lossChunkTokens": setting["loss_chunk"],
            "fp8": {"scaling": setting["fp8"]} if setting["fp8"] else None,
            "globalBatchSize": setting["rows"] * micro_batches,
            "compile": setting["compile"],
        }
    )
    gpu = accelerator(RESULTS["circumstances"]["device"])
    assert gpu is not None
    job = TrainingJob.from_parts(published(name.split()[0]), spec, ParallelismSpec(), 1)
    return estimate(job.work, job.strategy(Layout(), micro_batches), machine_for(gpu, runtime=job.runtime))


def test_all_runs_are_compared() -> None:
    assert set(SECOND_CARD) == set(RUNS) - {"llama-3-8b bf16"}


@pytest.mark.parametrize("name", RUNS)
def test_steps_on_one_gpu(name: str) -> None:
    result, rate = estimate_of(name), RUNS[name]["tokens a second"]
    assert result.tokens_per_second == pytest.approx(rate, rel=0.06)
    assert result.memory.counted == pytest.approx(RUNS[name]["peak memory"], rel=0.05)


@pytest.mark.parametrize("name", SECOND_CARD)
def test_steps_on_the_mean_of_the_cards(name: str) -> None:
    rates = [RUNS[name]["tokens a second"], SECOND_CARD[name]]
    rates += [card[name]["tokens a second"] for card in OTHER_CARDS if name in card]
    assert estimate_of(name).tokens_per_second == pytest.approx(fmean(rates), rel=0.06)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("card", OTHER_CARDS, ids=["third", "fourth"])
def test_the_cards_ran_the_same(card: dict[str, Any], name: str) -> None:
    """But for fields that were added since."""
    if name in card:
        assert RUNS[name]["setting"].items() <= card[name]["setting"].items()
