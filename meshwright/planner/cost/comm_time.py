"""Seconds of communication inside a micro-batch: tensor, context and expert parallelism, and between stages."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from meshwright.api.mixture import MixtureSpec
from meshwright.api.parallelism import ContextMethod
from meshwright.api.training import ActivationCheckpointing
from meshwright.models.architecture import Architecture
from meshwright.planner.cost.collectives import all_gather, all_reduce, all_to_all, send
from meshwright.planner.cost.comm_groups import GroupSpans
from meshwright.planner.cost.constants import SYNCHRONIZE
from meshwright.planner.cost.fabric import Fabric, Span
from meshwright.planner.cost.frameworks import Framework
from meshwright.planner.cost.strategy import LayerStrategy, Strategy, Workload, matmul_bytes


@dataclass(frozen=True, slots=True)
class LayerCommTime:
    """Seconds of one layer's collectives for one micro-batch, and how many collectives block the critical path."""

    forward: float
    backward: float
    blocking_forward: int
    blocking_backward: int


NO_COMM = LayerCommTime(0.0, 0.0, 0, 0)


def tensor_comm_time(
    tokens: float, model: Architecture, strategy: LayerStrategy, mixture: bool, span: Span, fabric: Fabric
) -> LayerCommTime:
    """Time of one layer: after attention and after the feed-forward layer, once in each pass.

    A mixture without shared experts whose ranks route their own positions has only those of attention.

    With sequence parallelism each all-reduce is a gather and a scatter. The backward pass gathers the input once more
    for the weights' gradient (Korthikanti et al., arXiv 2205.05198, section 4.2.2), hidden behind the input's gradient.
    """
    if strategy.tensor == 1:
        return NO_COMM
    size = tokens * model.hidden_size * strategy.precision.bytes
    if strategy.sequence_parallel:
        one = 2 * all_gather(size, span, fabric)
        moe = model.mixture
        if mixture and moe is not None and not moe.shared_intermediate_size and _routes_slices(strategy):
            return LayerCommTime(one, one, 2, 2)
        return LayerCommTime(2 * one, 2 * one, 4, 4)
    one = all_reduce(size, span, fabric)
    return LayerCommTime(2 * one, 2 * one, 2, 2)


def _routes_slices(strategy: LayerStrategy) -> bool:
    """Whether each rank of a tensor group routes its own positions to the experts."""
    spread = strategy.expert > 1 or not strategy.expert_tensor
    return strategy.tensor > 1 and strategy.sequence_parallel and spread


def expert_gather_time(
    tokens: float, model: Architecture, strategy: LayerStrategy, span: Span, fabric: Fabric
) -> LayerCommTime:
    """Time of one mixture layer in the tensor group that splits the experts' widths.

    Each rank received the rows of its positions. The group gathers all rows before the experts, and sums and scatters
    their outputs (DeepSpeed-TED, arXiv 2303.06318, section 5.1). `span` is that of the tensor group.
    """
    moe = model.mixture
    if moe is None or not strategy.expert_tensor or strategy.expert == 1 or not _routes_slices(strategy):
        return NO_COMM
    one = 2 * all_gather(tokens * moe.per_token * model.hidden_size * strategy.precision.bytes, span, fabric)
    return LayerCommTime(one, one, 2, 2)


def context_comm_time(
    tokens: float, model: Architecture, strategy: LayerStrategy, span: Span, fabric: Fabric, core: float
) -> LayerCommTime:
    """Time of one layer that attention's `core` seconds of computation do not hide."""
    if strategy.context == 1:
        return NO_COMM
    element = strategy.precision.bytes
    own_bytes = tokens * key_value_width(model) / strategy.tensor * element
    query_and_output = model.heads * (model.key_size + model.value_size) / strategy.tensor
    exchanged_bytes = tokens * element * query_and_output + own_bytes
    if strategy.context_method is ContextMethod.ULYSSES:
        exchange_seconds = all_to_all(exchanged_bytes, span, fabric)
        return LayerCommTime(exchange_seconds, exchange_seconds, 2, 2)
    if strategy.context_method is ContextMethod.ALL_GATHER:
        gathered = all_gather(own_bytes * strategy.context, span, fabric)
        return LayerCommTime(gathered, 2 * gathered, 1, 2)
    # With an exchange of heads inside it, a ring has fewer turns with the same bytes each (USP, arXiv 2405.07719).
    inner = strategy.ulysses if strategy.context_method is ContextMethod.RING_ULYSSES else 1
    ring_steps = strategy.context // inner - 1
    ring = ring_steps * send(own_bytes, span.top, fabric)
    step_overhead = ring_steps * SYNCHRONIZE  # each turn waits for its neighbor and launches separate kernels
    exchange_seconds = all_to_all(
        exchanged_bytes, Span(tuple(min(ranks_inside, inner) for ranks_inside in span.members)), fabric
    )
    blocking_calls = 2 if inner > 1 else 0
    return LayerCommTime(
        exchange_seconds + max(0.0, ring - core) + step_overhead,
        exchange_seconds + max(0.0, 2 * ring - 2 * core) + step_overhead,
        blocking_calls,
        blocking_calls,
    )


def key_value_width(model: Architecture) -> int:
    """Elements of a token's keys and values that context parallelism moves, before tensor parallelism splits them.

    Latent attention expands its latent before attention: the keys and values of every head travel.
    """
    heads = model.heads if model.latent is not None else model.kv_heads
    return heads * (model.key_size + model.value_size)


def expert_comm_time(
    tokens: float, model: Architecture, strategy: LayerStrategy, span: Span, fabric: Fabric, runtime: Framework
) -> LayerCommTime:
    """Time of one mixture layer: tokens to their experts and back. The return is in 16 bits.

    A rank sends `per_token` rows for each of its tokens, one to each expert, also if several of them are on one node.
    Libraries with a two-step exchange send one row to each node, and forward it there (DeepSeek-V3, arXiv 2412.19437,
    section 3.2.2).
    """
    moe = model.mixture
    if strategy.expert == 1 or moe is None:
        return NO_COMM
    tokens_here = tokens / (strategy.tensor if strategy.sequence_parallel else 1)
    sent = matmul_bytes(strategy) if runtime.fp8_dispatch else strategy.precision.bytes

    def one_way(element: float) -> float:
        each = tokens_here * model.hidden_size * element
        if not runtime.sends_once_per_node or span.top == 0:
            return all_to_all(each * moe.per_token, span, fabric)
        inside = Span((span.inner,) * len(span.members))
        between = all_to_all(each * nodes_per_token(moe, span.size / span.inner), span, fabric)
        return max(between, all_to_all(each * moe.per_token, inside, fabric))

    exposed = (one_way(sent) + one_way(strategy.precision.bytes)) * (1.0 - runtime.overlap_experts)
    return LayerCommTime(exposed, exposed, 2, 2)


def nodes_per_token(moe: MixtureSpec, nodes: float) -> float:
    """Expected number of nodes with an expert of one token, if experts are spread over `nodes`.

    A router that is limited to groups of experts reaches only the nodes of these groups. The experts of a token are
    different ones, so a node is missed with the probability that all of them are among the experts elsewhere.
    """
    reached, experts = nodes, float(moe.experts)
    if moe.groups > 1:
        reached = min(nodes, max(1.0, moe.groups_per_token * max(1.0, nodes / moe.groups)))
        experts *= moe.groups_per_token / moe.groups
    elsewhere = experts * (1.0 - 1.0 / reached)
    missed = prod(max(0.0, elsewhere - i) / (experts - i) for i in range(moe.per_token))
    return reached * (1.0 - missed)


def stage_send_seconds(
    tokens: float, model: Architecture, strategy: Strategy, groups: GroupSpans, fabric: Fabric, runtime: Framework
) -> float:
    """Seconds to send one micro-batch to the next stage.

    Without sequence parallelism every tensor-parallel rank has the full micro-batch. If the framework sends slices, the
    receiving group gathers them again (arXiv 2104.04473, section 4.1).
    """
    if strategy.pipeline == 1:
        return 0.0
    size = tokens * model.hidden_size * strategy.precision.bytes
    sent = send(_sent_bytes(size, strategy, runtime), groups.pipeline_level, fabric)
    if runtime.sliced_sends and not strategy.sequence_parallel:
        return sent + all_gather(size, groups.tensor, fabric)
    return sent


def stage_send_bytes(work: Workload, strategy: Strategy, runtime: Framework) -> float:
    """Bytes that one rank sends to pass one micro-batch to the next stage."""
    tokens = -(-work.sequence_length * strategy.micro_batch_size // strategy.context)
    return _sent_bytes(tokens * work.model.hidden_size * strategy.precision.bytes, strategy, runtime)


def _sent_bytes(size: float, strategy: Strategy, runtime: Framework) -> float:
    """One rank's part of a micro-batch of `size` bytes: a slice with sequence parallelism or sliced sends."""
    return size / strategy.tensor if strategy.sequence_parallel or runtime.sliced_sends else size


def recomputed_part(how: ActivationCheckpointing, runtime: Framework) -> float:
    """Fraction of the forward pass's collectives that runs again.

    If recomputation stores the outputs of products, it repeats what is between them, and so the exchanges.
    """
    if how is ActivationCheckpointing.NONE:
        return 0.0
    return 1.0 if how is not ActivationCheckpointing.SELECTIVE or runtime.selects_products else 0.0


def recomputed_tensor_part(how: ActivationCheckpointing, runtime: Framework, sequence_parallel: bool) -> float:
    """The same for the collectives of tensor parallelism.

    Recomputation of a layer that stops at the last operator whose output is needed leaves out the last collective: one
    of four with sequence parallelism, else one of two.
    """
    stops = runtime.selects_products and how in (ActivationCheckpointing.SELECTIVE, ActivationCheckpointing.FULL)
    return (0.75 if sequence_parallel else 0.5) if stops else recomputed_part(how, runtime)
