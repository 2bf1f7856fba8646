"""Expert parallelism: a mixture's experts are distributed over the ranks that have the same dense parameters.

Each rank of the expert group has experts / group of them; rows are sent there and back (`parallel/expert/dispatch`).
Experts with the same index on other ranks are copies of each other: their gradients are summed over `EXPERT_REPLICA`.

Tensor parallelism splits the experts' widths (DeepSpeed-TED, arXiv 2303.06318). Either every rank of a tensor group
routes all of its tokens and adds its part of their experts' outputs, between the same collectives as a dense layer. Or,
with sequence parallelism and distributed experts, each routes its own positions and the parts are gathered at the
experts. Or the widths are not split: each rank of a tensor group routes its own positions to experts that are
replicated in the group, and sums their gradients as it does those of norms.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright.api.parallelism import ExpertDispatch, ParallelismSpec
from meshwright.api.precision import Precision
from meshwright_worker.distributed.collectives import all_gather
from meshwright_worker.distributed.mesh import (
    CONTEXT,
    EXPERT,
    EXPERT_LOCAL,
    EXPERT_NODE,
    EXPERT_REPLICA,
    TENSOR,
    Mesh,
    split_experts_by_node,
)
from meshwright_worker.dtypes import sharding_policy
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.load_balancing import SequencePartition
from meshwright_worker.models.moe import Experts, MixtureOfExperts, iter_moe_layers
from meshwright_worker.parallel.expert.dispatch import AllToAllDispatcher
from meshwright_worker.parallel.expert.node_exchange import NodeExchange

_WIDTH_DIMENSION = {"gate": 1, "up": 1, "down": 2}
"""The width dimension of each of the experts' tensors."""


class SplitSequencePartition(SequencePartition):
    """Each sequence is shared by the ranks of these groups, outermost first."""

    def __init__(self, groups: list[dist.ProcessGroup]) -> None:
        self._groups = groups
        self.parts = 1
        for group in groups:
            self.parts *= group.size()

    def total(self, counts: torch.Tensor) -> torch.Tensor:
        """See `SequencePartition`. Collective."""
        counts = counts.clone()
        for group in self._groups:
            dist.all_reduce(counts, group=group)
        return counts

    def before(self, counts: torch.Tensor) -> torch.Tensor:
        """See `SequencePartition`. Collective; the ranks of the innermost group have consecutive positions.

        Raises:
            ValueError: several groups share the sequences.
        """
        if len(self._groups) > 1:
            raise ValueError("`model.mixture.capacityFactor` needs `parallelism.context: 1`")
        (group,) = self._groups
        parts = counts.new_empty(group.size(), *counts.shape)
        all_gather(parts.flatten(0, 1), counts.contiguous(), group=group)
        return parts[: group.rank()].sum(0)


def expert_nodes(parallelism: ParallelismSpec, mesh: Mesh) -> DeviceMesh | None:
    """Return the expert group by node, if tokens are sent once per node and the group is on several. Collective."""
    once = parallelism.expert_dispatch is ExpertDispatch.ONCE_PER_NODE and mesh.layout.expert > 1
    return split_experts_by_node(mesh) if once else None


def apply_expert_parallel(
    stage: DecoderStage, mesh: Mesh, parallelism: ParallelismSpec, nodes: DeviceMesh | None = None
) -> None:
    """Split every mixture's experts over the expert group and, with `expertTensor`, over the tensor group, in place.

    For `nodes` see `expert_nodes`.
    """
    layout, tensor = mesh.layout, parallelism.expert_tensor
    splits = layout.tensor > 1 and tensor
    slices = layout.tensor > 1 and parallelism.sequence and (layout.expert > 1 or not tensor)
    for _, mixture in iter_moe_layers(stage):
        _split(mixture.experts, mesh, tensor=splits)
        if layout.expert > 1:
            gathers = mesh.group(TENSOR) if slices and splits else None
            local_experts = mixture.mixture.experts // layout.expert
            group = mesh.group(EXPERT) if nodes is None else nodes.get_group(EXPERT_LOCAL)
            mixture.dispatcher = AllToAllDispatcher(group, gathers, local_experts)
            if nodes is not None:
                mixture.node_exchange = NodeExchange(nodes.get_group(EXPERT_NODE), local_experts * group.size())
        mixture.padded = parallelism.expert_dispatch is ExpertDispatch.PADDED
        mixture.whole = not splits
        mixture.slices = layout.tensor if slices else 1
        mixture.routing_replicas = 1 if slices else layout.tensor
        shared = [(CONTEXT, layout.context > 1), (TENSOR, slices)]
        groups = [mesh.group(name) for name, splits in shared if splits]
        if groups:
            mixture.load_balancer.sequence_partition = SplitSequencePartition(groups)


def routes_slices(mixture: MixtureOfExperts) -> bool:
    """Return whether each rank of a tensor group routes its own positions."""
    return mixture.slices > 1


def apply_fsdp_to_experts(
    stage: DecoderStage, mesh: Mesh, *, zero_stage: int, precision: Precision, offload: OffloadPolicy
) -> None:
    """Shard distributed experts over their replicas (ZeRO 2 and 3), before the layers that contain them are sharded.

    Experts that are not distributed have the same replicas as all parameters and are sharded with their layer.
    """
    if mesh.layout.expert == 1:
        return
    replicas = mesh.experts[EXPERT_REPLICA]
    for _, mixture in iter_moe_layers(stage):
        unit = fully_shard(
            mixture.experts,
            mesh=replicas,
            reshard_after_forward=zero_stage == 3,
            shard_placement_fn=_placement(mixture.experts, replicas.size()),
            mp_policy=sharding_policy(precision),
            offload_policy=offload,
        )
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def unsplit_expert_parameters(stage: DecoderStage) -> list[nn.Parameter]:
    """Return the experts that are replicated in a tensor group; each rank runs them on its own positions."""
    each = [mixture for _, mixture in iter_moe_layers(stage) if mixture.whole and mixture.slices > 1]
    return [parameter for mixture in each for parameter in mixture.experts.parameters()]


def router_parameters(stage: DecoderStage) -> list[nn.Parameter]:
    """Return the routers' matrices: replicated in a tensor group, where each rank has a part of their gradient."""
    return [mixture.router.weight for _, mixture in iter_moe_layers(stage)]


def expert_parameters(stage: DecoderStage) -> list[nn.Parameter]:
    """Return the parameters that expert parallelism distributes."""
    return [parameter for _, mixture in iter_moe_layers(stage) for parameter in mixture.experts.parameters()]


def _split(experts: Experts, mesh: Mesh, *, tensor: bool) -> None:
    layout = mesh.layout
    names = tuple(name for name, splits in ((EXPERT, layout.expert > 1), (TENSOR, tensor)) if splits)
    if not names:
        return
    # FSDP requires that its mesh and the one below it have the same root.
    device_mesh: DeviceMesh = mesh.experts[names] if layout.expert > 1 else mesh.device_mesh[TENSOR]
    for name, dimension in _WIDTH_DIMENSION.items():
        whole = experts.get_parameter(name)
        placements = [Shard(0) if part == EXPERT else Shard(dimension) for part in names]
        split = distribute_tensor(whole.detach(), device_mesh, placements, src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(split, requires_grad=whole.requires_grad))


def _placement(experts: Experts, replicas: int) -> Callable[[nn.Parameter], Shard | None]:
    """Return the sharding: by experts if their number divides evenly, else along the residual stream, which nothing
    else splits.
    """
    widths = {id(parameter): _WIDTH_DIMENSION[name] for name, parameter in experts.named_parameters()}

    def place(parameter: nn.Parameter) -> Shard | None:
        own = parameter.to_local().shape[0]  # type: ignore[attr-defined]
        if own % replicas == 0:
            return Shard(0)
        hidden = 3 - widths[id(parameter)]
        return Shard(hidden) if parameter.shape[hidden] % replicas == 0 else None

    return place
