"""The neighbors of a layout: which are compared, and the reason against each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.models.architecture import Architecture
from meshwright.planner.cost.accelerators import ACCELERATORS
from meshwright.planner.cost.estimate import estimate, machine_for
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright.planner.search.alternatives import RejectedAlternative, alternatives_of
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.request import ALL_TECHNIQUES, MESHWRIGHT_TECHNIQUES, Pins, SearchRequest, Techniques

MACHINE = machine_for(ACCELERATORS["H100-SXM5-80GB"])
MODEL = Architecture(layers=24, hidden_size=2048, intermediate_size=8192, heads=16, kv_heads=4, vocab_size=32000)


def compared(
    strategy: Strategy, techniques: Techniques = MESHWRIGHT_TECHNIQUES, model: Architecture = MODEL, **pins: object
) -> dict[str, RejectedAlternative]:
    """The alternatives to a strategy by their change."""
    batch = strategy.data * strategy.micro_batches * strategy.micro_batch_size
    request = SearchRequest(
        Workload(model, 2048, batch),
        MACHINE,
        strategy.world_size,
        techniques=techniques,
        pins=Pins(**pins),  # type: ignore[arg-type]
    )
    best = Candidate(strategy, estimate(request.work, strategy, MACHINE), request.node)
    return {one.change: one for one in alternatives_of(request, best)}


def test_a_degree_is_traded_for_replicas() -> None:
    found = compared(Strategy(tensor=2, data=4, micro_batches=4))
    assert {"TP 1 instead of 2", "TP 4 instead of 2", "PP 2 instead of 1", "CP 2 instead of 1"} <= set(found)
    for one in found.values():
        assert one.sentence == f"{one.change}: {one.reason}"
        assert one.slower is None or one.slower > 0


def test_replicas_that_would_not_be_full_are_not_compared() -> None:
    found = compared(Strategy(tensor=1, data=3, micro_batches=4))
    assert not any(change.startswith(("TP", "PP", "CP")) for change in found)


def test_pinned_decisions_are_not_compared() -> None:
    found = compared(Strategy(tensor=2, data=4, micro_batches=4), tensor=2, zero_stage=0)
    assert not any(change.startswith(("TP", "ZeRO")) for change in found)
    assert "PP 2 instead of 1" in found


@pytest.mark.parametrize(
    ("strategy", "change", "reason"),
    [
        (Strategy(tensor=8, data=2, micro_batches=8), "TP 16 instead of 8", "leaves the NVLink domain of 8 GPUs"),
        (Strategy(tensor=4, data=2, micro_batches=4), "TP 8 instead of 4", "does not divide 4 key-value heads"),
        (Strategy(pipeline=16, data=2, micro_batches=32), "PP 32 instead of 16", "has more stages than 24 layers"),
        (Strategy(data=4, micro_batches=1, pipeline=1), "PP 2 instead of 1", "slower"),
    ],
)
def test_the_reason_names_the_limit(strategy: Strategy, change: str, reason: str) -> None:
    assert reason in compared(strategy)[change].reason


def test_what_does_not_fit_names_its_memory() -> None:
    large = MODEL.model_copy(update={"layers": 48, "hidden_size": 4096, "intermediate_size": 16384, "heads": 32})
    found = compared(Strategy(tensor=2, data=2, micro_batches=16), model=large)["TP 1 instead of 2"]
    assert found.slower is None
    assert found.reason.startswith("needs ")
    assert " of 77.2 GiB on stage 0" in found.reason


def test_the_rule_book_rejects_what_the_worker_does_not_run() -> None:
    odd = MODEL.model_copy(update={"vocab_size": 50257})
    strategy = Strategy(tensor=1, data=4, micro_batches=4)
    assert (
        compared(strategy, model=odd)["TP 2 instead of 1"].reason
        == "is a combination that the runtime does not execute"
    )
    assert compared(strategy, ALL_TECHNIQUES, odd)["TP 2 instead of 1"].slower is not None
    tied = MODEL.model_copy(update={"tie_embeddings": True})
    flat = replace(strategy, zero_stage=1)
    assert "does not execute" in compared(flat, model=tied)["PP 2 instead of 1"].reason
