"""The parts of a step that only mixtures of experts have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.api.parallelism import PipelineSchedule as Schedule
from meshwright.api.precision import Precision
from meshwright.models.presets import published
from meshwright.planner.cost.accelerators import ACCELERATORS
from meshwright.planner.cost.comm_groups import group_spans
from meshwright.planner.cost.comm_time import expert_comm_time, nodes_per_token
from meshwright.planner.cost.estimate import estimate, machine_for
from meshwright.planner.cost.fabric import BASE_LATENCY, INTER_LATENCY, INTRA_LATENCY, Fabric
from meshwright.planner.cost.frameworks import FRAMEWORKS
from meshwright.planner.cost.strategy import LayerStrategy, Strategy, Workload
from meshwright.schedules.registry import kind_of
from meshwright.schedules.schedule import PipelineShape

H100S = machine_for(ACCELERATORS["H100-SXM5-80GB"])
V3 = published("deepseek-v3")
TOKENS, HIDDEN, PER_TOKEN = 4096, 7168, 8
SPREAD = Strategy(pipeline=16, data=128, expert=64, micro_batches=120, zero_stage=1)
"""Experts on 8 nodes. With stages of a replica on consecutive ranks, each has one expert rank of a group."""


def exchange(strategy: Strategy, runtime: str = "meshwright") -> float:
    framework = FRAMEWORKS[runtime]
    span = group_spans(strategy, H100S.fabric, framework.order).expert
    time = expert_comm_time(TOKENS, V3, LayerStrategy.of(strategy), span, H100S.fabric, framework)
    return time.forward / (1.0 - framework.overlap_experts)


def test_every_expert_of_a_token_gets_a_row() -> None:
    # 8 rows of 7,168 bf16 numbers for each token, there and back, of which 63/64 leave the rank: 50 GB/s, 96 % of it.
    sent = 2 * 2 * TOKENS * PER_TOKEN * HIDDEN * 63 / 64
    assert exchange(SPREAD) == pytest.approx(sent / (50e9 * 0.96), rel=0.01)


def test_a_library_that_forwards_inside_nodes_sends_one_row_to_each() -> None:
    # Ranks of an expert group fill nodes: 7 of 8 nodes are others, and 3.6 of at most 4 have an expert of a token.
    nodes = 4 * (1 - (3 / 4) ** 8)
    assert V3.mixture is not None
    assert nodes_per_token(V3.mixture, 8) == pytest.approx(nodes)
    sent = 2 * 2 * TOKENS * nodes * HIDDEN * 7 / 8
    assert exchange(SPREAD, "megatron-core-deepep") == pytest.approx(sent / (50e9 * 0.96), rel=0.02)
    latency = 2 * (BASE_LATENCY + 3 * INTER_LATENCY + 3 * INTRA_LATENCY)
    copies = exchange(SPREAD, "megatron-core") - latency
    assert copies / (exchange(SPREAD, "megatron-core-deepep") - latency) == pytest.approx(PER_TOKEN / nodes)


def test_rows_travel_in_the_format_of_the_layer() -> None:
    # The runtime quantizes rows at the experts, after they arrived; others send fp8.
    fp8 = replace(SPREAD, precision=Precision.BF16, fp8=True)
    assert exchange(fp8) == pytest.approx(exchange(SPREAD))
    assert exchange(fp8, "megatron-core") == pytest.approx(0.75 * exchange(fp8, "meshwright") * 56 / 63, rel=0.02)


def test_overlapped_passes_hide_the_exchange() -> None:
    # Every rank sends its rows while the other micro-batch of the pair computes, and pairs are most of a step.
    work = Workload(V3, 4096, 15360)
    apart, pairs = (
        estimate(work, replace(SPREAD, schedule=schedule), H100S).time.expert
        for schedule in (Schedule.ZB_V, Schedule.DUAL_PIPE_V)
    )
    assert pairs < 0.7 * apart
    # An exchange that takes longer than the other pass's kernels is not hidden entirely.
    slow = machine_for(ACCELERATORS["H100-SXM5-80GB"], fabric=Fabric.of(ACCELERATORS["H100-SXM5-80GB"], nic=5e9))
    apart, pairs = (
        estimate(work, replace(SPREAD, schedule=schedule), slow).time.expert
        for schedule in (Schedule.ZB_V, Schedule.DUAL_PIPE_V)
    )
    assert 0.85 * apart < pairs < apart


def test_passes_that_fill_and_drain_hide_nothing() -> None:
    work = Workload(V3, 4096, 15360)
    spread = replace(SPREAD, schedule=Schedule.DUAL_PIPE_V)
    few, many = (
        estimate(work, replace(spread, data=data, micro_batches=15360 // data), H100S).time for data in (64 * 6, 64)
    )
    assert few.expert / few.compute > 1.3 * many.expert / many.compute


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 20), (8, 64), (16, 120)])
@pytest.mark.parametrize("schedule", [Schedule.DUAL_PIPE, Schedule.DUAL_PIPE_V])
def test_pairs_are_those_of_the_schedule(schedule: Schedule, ranks: int, micro_batches: int) -> None:
    kind, shape = kind_of(schedule), PipelineShape(ranks, micro_batches)
    order = kind.generate(shape)
    passes = micro_batches * (2 if kind.v_shaped else 1)
    fewest = min(sum(len(slot) == 2 for slot in slots) for slots in order.ranks)
    assert kind.paired(shape) == pytest.approx(fewest / passes)
