"""The parts of a step that only mixtures of experts have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.api.precision import Precision
from meshwright.models.presets import published
from meshwright.planner.cost.accelerators import ACCELERATORS
from meshwright.planner.cost.comm_groups import group_spans
from meshwright.planner.cost.comm_time import expert_comm_time, nodes_per_token
from meshwright.planner.cost.estimate import machine_for
from meshwright.planner.cost.fabric import BASE_LATENCY, INTER_LATENCY, INTRA_LATENCY
from meshwright.planner.cost.frameworks import FRAMEWORKS
from meshwright.planner.cost.strategy import LayerStrategy, Strategy

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
