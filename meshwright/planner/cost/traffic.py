"""Bytes that one rank sends per step, by dimension, and the level of the fabric whose links carry them.

The numbers describe a rank of the stage with the most layers. They count all bytes, also those that computation hides:
`step_time` has the seconds that are exposed.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.api.parallelism import ContextMethod
from meshwright.planner.cost.comm_groups import GroupSpans
from meshwright.planner.cost.comm_time import (
    key_value_width,
    recomputed_part,
    recomputed_tensor_part,
    stage_send_bytes,
)
from meshwright.planner.cost.fabric import Span
from meshwright.planner.cost.machine import Machine
from meshwright.planner.cost.stages import Stage, stages_of
from meshwright.planner.cost.strategy import Strategy, Workload, matmul_bytes
from meshwright.planner.cost.update_time import gradient_sync_bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank sends in one step for one dimension."""

    dimension: str
    """`tensor`, `context`, `expert`, `pipeline` or `data`."""
    by_level: tuple[float, ...]
    """Bytes on the links of each level of the fabric, closest first: the mean over the ranks of a group."""

    @property
    def total(self) -> float:
        """Bytes on all levels."""
        return sum(self.by_level)


def step_traffic(work: Workload, strategy: Strategy, machine: Machine, groups: GroupSpans) -> tuple[Traffic, ...]:
    """Return the traffic of every dimension with more than one rank.

    Args:
        work: what a step processes.
        strategy: the layout.
        machine: the hardware and framework.
        groups: the spans of the groups of each dimension.

    Raises:
        ValueError: the layers cannot be split over the pipeline's ranks.
    """
    stages = stages_of(work.model, strategy)
    stage = max(stages.distinct, key=lambda one: one.layers)
    count = len(machine.fabric.levels)
    passes = strategy.micro_batches
    found = []
    if strategy.tensor > 1:
        sent = passes * _tensor_bytes(work, strategy, machine, stage)
        found.append(Traffic("tensor", _spread(sent, ring_shares(groups.tensor), count)))
    if strategy.context > 1:
        sent = passes * stage.layers * _context_bytes(work, strategy)
        uses_ring = strategy.context_method not in (ContextMethod.ULYSSES,)
        shares = ring_shares(groups.context) if uses_ring else peer_shares(groups.context)
        found.append(Traffic("context", _spread(sent, shares, count)))
    if strategy.expert > 1 and stage.mixtures:
        sent = passes * stage.mixtures * _expert_bytes(work, strategy, machine)
        found.append(Traffic("expert", _spread(sent, peer_shares(groups.expert), count)))
    if strategy.pipeline > 1:
        sent = 2.0 * passes * strategy.virtual_stages * stage_send_bytes(work, strategy, machine.runtime)
        shares = [float(level == min(groups.pipeline_level, count - 1)) for level in range(count)]
        found.append(Traffic("pipeline", _spread(sent, shares, count)))
    if strategy.shard_ranks > 1:
        sent = gradient_sync_bytes(work, strategy, machine.runtime, stages)
        found.append(Traffic("data", _spread(sent, ring_shares(groups.shard_ranks), count)))
    return tuple(found)


def ring_shares(span: Span) -> list[float]:
    """Return the part of a ring's bytes on each level: a ring leaves each location once."""
    members, size = span.members, span.size
    shares, leaving_below = [], 1.0
    for inside in members:
        leaving = 1.0 / inside if inside < size else 0.0
        shares.append(leaving_below - leaving)
        leaving_below = leaving
    return shares


def peer_shares(span: Span) -> list[float]:
    """Return the part of the bytes on each level if every rank sends equally much to every other rank."""
    members, others = span.members, max(1, span.size - 1)
    below = [1, *members[:-1]]
    return [(inside - inner) / others for inside, inner in zip(members, below, strict=True)]


def _spread(sent: float, shares: list[float], levels: int) -> tuple[float, ...]:
    return tuple(sent * share for share in shares[:levels])


def _tokens(work: Workload, strategy: Strategy) -> int:
    """Tokens of one micro-batch on a rank."""
    return -(-work.sequence_length * strategy.micro_batch_size // strategy.context)


def _tensor_bytes(work: Workload, strategy: Strategy, machine: Machine, stage: Stage) -> float:
    """Bytes of one micro-batch in a stage's layers.

    With sequence parallelism a layer has two gathers and two scatters in each pass, and its backward pass gathers both
    inputs again (Korthikanti et al., arXiv 2205.05198, section 4.2.2). Without, it has two all-reduces in each pass.
    """
    hop = (strategy.tensor - 1) / strategy.tensor
    size = hop * _tokens(work, strategy) * work.model.hidden_size * strategy.precision.bytes
    again = recomputed_tensor_part(strategy.checkpointing, machine.runtime, strategy.sequence_parallel)
    backward = 6.0 if strategy.sequence_parallel and not machine.runtime.keeps_gathered else 4.0
    return stage.layers * size * (4.0 * (1.0 + again) + backward)


def _context_bytes(work: Workload, strategy: Strategy) -> float:
    """Bytes of one micro-batch in one layer: keys and values in the forward pass, also gradients in the backward."""
    tokens, ranks, model = _tokens(work, strategy), strategy.context, work.model
    keys_and_values = tokens * key_value_width(model) / strategy.tensor * strategy.precision.bytes
    queries = tokens * model.heads * (model.key_size + model.value_size) / strategy.tensor * strategy.precision.bytes
    if strategy.context_method is ContextMethod.ULYSSES:
        return 2.0 * (keys_and_values + queries) * (ranks - 1) / ranks
    inner = strategy.ulysses if strategy.context_method is ContextMethod.RING_ULYSSES else 1
    exchanged = 2.0 * (keys_and_values + queries) * (inner - 1) / inner
    return exchanged + 3.0 * (ranks // inner - 1) * keys_and_values


def _expert_bytes(work: Workload, strategy: Strategy, machine: Machine) -> float:
    """Bytes of one micro-batch in one mixture layer: rows to the experts and back, in each pass."""
    moe = work.model.mixture
    if moe is None:
        return 0.0
    tokens = _tokens(work, strategy) / (strategy.tensor if strategy.sequence_parallel else 1)
    sent = matmul_bytes(strategy) if machine.runtime.fp8_dispatch else strategy.precision.bytes
    one_pass = tokens * moe.per_token * work.model.hidden_size * (sent + strategy.precision.bytes)
    passes = 2.0 + recomputed_part(strategy.checkpointing, machine.runtime)
    return passes * one_pass * (strategy.expert - 1) / strategy.expert
