"""The search over every degree, with some of them pinned: what it finds for drawn models, GPUs, objectives and pins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from meshwright.api.parallelism import ContextMethod, PipelineSchedule
from meshwright.api.training import ActivationCheckpointing
from meshwright.models.presets import PRESETS
from meshwright.planner.cost_model import cost_model_for
from meshwright.planner.search.alternatives import alternatives_of
from meshwright.planner.search.best_first import search
from meshwright.planner.search.explain import reasons
from meshwright.planner.search.request import ALL_TECHNIQUES, MESHWRIGHT_TECHNIQUES, Objective, Pins
from meshwright.planner.search.spec_request import apply_strategy, search_request
from tests.golden.files import check, check_sample
from tests.golden.planner.clusters import Draws
from tests.golden.planner.jobs import OBJECTIVES, job
from tests.golden.planner.records import attempt, found_record, inventory_of, spec_of
from tests.tiers import mostly_long

MODELS = (
    *("gpt2", "gpt3-2.7b", "llama-3.2-1b", "llama-3-8b", "llama-2-13b", "qwen2.5-7b", "qwen3-32b", "megatron-18.4b"),
    *("llama-3-70b", "deepseek-v2-lite", "qwen3-30b-a3b", "mixtral-8x7b", "tiny-latent"),
)
ON = ("1 h100 node", "4 h100 nodes", "16 a100 nodes", "h100 racks", "nvl72", "l40s", "v100", "h200")
PINNED: dict[str, tuple[Any, ...]] = {
    "TP": (1, 2, 4, 8, 16),
    "PP": (1, 2, 4, 5, 8),
    "CP": (1, 2, 4),
    "EP": (1, 2, 8),
    "DP": (1, 2, 4, 8, 64),
    "zero": (0, 1, 2, 3),
    "micro-batch": (1, 2, 4),
    "micro-batches": (1, 4, 8, 16),
    "schedule": (
        *("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "ZBH1", "ZBH2", "ZBV", "DualPipe", "DualPipeV", "Naive"),
        *("Automatic", "PipeDream", "PipeDream2BW"),
    ),
    "chunks": (2, 3, 4),
    "method": ("Ring", "RingZigZag", "Ulysses", "AllGather", "RingUlysses"),
    "recompute": ("None", "Selective", "Full", "Sqrt"),
    "sequence": (True, False),
}
SAMPLE = (37, 42, 58, 67, 99, 101, 111, 128, 136, 154, 166, 182, 185, 192, 208)
"""Searches of the long tier that take little time and together have many different messages."""


@dataclass(frozen=True)
class Asked:
    """One search."""

    model: str
    cluster: str
    objective: str
    every: bool
    pins: dict[str, Any]
    gpus_per_worker: int

    @property
    def name(self) -> str:
        """What tells it from the others."""
        pins = ", ".join(f"{key} {value}" for key, value in self.pins.items())
        among = " among all" if self.every else ""
        return f"{self.model} on {self.cluster} for {self.objective}{among}, workers of {self.gpus_per_worker}: {pins}"


def drawn(number: int) -> Asked:
    """The search of a number: with one to four pins, so that each takes little time."""
    draws = Draws(f"search {number}")
    names = {draws.choice(tuple(PINNED)) for _ in range(1 + draws.below(4))}
    pins = {name: draws.choice(PINNED[name]) for name in PINNED if name in names}
    return Asked(
        draws.choice(MODELS),
        draws.choice(ON),
        draws.choice(OBJECTIVES),
        draws.below(3) == 0,
        pins,
        draws.choice((1, 1, 2, 4, 8)),
    )


def found(asked: Asked) -> tuple[Any, Any]:
    """(decisions, text) of a search."""
    length = 1024 if asked.model in ("gpt2", "gpt3-2.7b", "megatron-18.4b") else 8192
    batch = Draws(asked.name).choice((16, 128, 480))
    spec = spec_of(job(asked.model, replicas=1, training={"sequenceLength": length, "globalBatchSize": batch}))
    inventory = inventory_of(asked.cluster, spec)
    cost_model = cost_model_for(spec, PRESETS[asked.model], inventory)
    assert cost_model is not None
    techniques = ALL_TECHNIQUES if asked.every else MESHWRIGHT_TECHNIQUES
    gpus = sum(node.capacity.gpus for node in inventory.usable)
    request = search_request(spec, cost_model, gpus, Objective(asked.objective), techniques)
    result = search(replace(request, pins=_pins(asked.pins), gpus_per_worker=asked.gpus_per_worker))
    others = alternatives_of(result.request, result.best)
    decided = {
        "best": found_record(result.best),
        "asGood": [found_record(one) for one in result.ranked[1:5]],
        "alternatives": [found_record(one) for one in result.alternatives],
        "lost": [one.slower for one in others],
    }
    if not asked.every:
        spec = apply_strategy(spec, result.best.strategy)
        decided["spec"] = spec.model_dump(
            mode="json", by_alias=True, exclude_none=True, exclude_defaults=True, include={"replicas", "parallelism"}
        )
    return decided, [result.best.summary, *reasons(result), *(one.sentence for one in others)]


def _pins(pins: dict[str, Any]) -> Pins:
    schedule, method, recompute = (pins.get(name) for name in ("schedule", "method", "recompute"))
    return Pins(
        tensor=pins.get("TP"),
        pipeline=pins.get("PP"),
        context=pins.get("CP"),
        expert=pins.get("EP"),
        data=pins.get("DP"),
        zero_stage=pins.get("zero"),
        micro_batch_size=pins.get("micro-batch"),
        micro_batches=pins.get("micro-batches"),
        schedule=PipelineSchedule(schedule) if schedule else None,
        virtual_stages=pins.get("chunks"),
        context_method=ContextMethod(method) if method else None,
        checkpointing=ActivationCheckpointing(recompute) if recompute else None,
        sequence_parallel=pins.get("sequence"),
    )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tier", mostly_long(["searches", "searches-long"], lambda _: False))
def test_searches(tier: str) -> None:
    numbers = range(20) if tier == "searches" else range(20, 240)
    results = searched(numbers)
    check(f"planner/{tier}.jsonl", {name: one for name, (one, _) in results.items()})
    check(f"planner/{tier}-text.jsonl", {name: text for name, (_, text) in results.items()})


def test_a_sample_of_the_searches() -> None:
    results = searched(SAMPLE)
    check_sample("planner/searches-long.jsonl", {name: one for name, (one, _) in results.items()})
    check_sample("planner/searches-long-text.jsonl", {name: text for name, (_, text) in results.items()})


def searched(numbers: Iterable[int]) -> dict[str, tuple[Any, Any]]:
    return {asked.name: attempt(lambda asked=asked: found(asked)) for asked in map(drawn, numbers)}
