"""The shards of a stage's parameters, and its buffers."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from meshwright.protocol.run_config import Run
from meshwright_worker.distributed.mesh import SHARD_REPLICA, Mesh
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.init_weights import local_part
from meshwright_worker.parallel.data.fsdp import uses_fsdp
from meshwright_worker.parallel.expert.expert_parallel import expert_parameters
from meshwright_worker.parallel.shards import ParameterShard, is_split_over_tensor
from meshwright_worker.parallel.tensor.tensor_parallel import partial_parameters


def parameter_shards(
    stage: DecoderStage, distributed: dict[str, DTensor], run: Run, mesh: Mesh
) -> list[ParameterShard]:
    """Return the shards of every parameter of a stage from `build_stages`, in the order of its parameters."""
    sharded = uses_fsdp(run)
    layout, tensor, replica = mesh.layout, mesh.coordinates.tensor, mesh.replicas.get_local_rank()
    copies = mesh.hsdp_mesh is not None and mesh.hsdp_mesh.get_local_rank(SHARD_REPLICA) > 0
    sequence = run.parallelism.sequence and mesh.layout.tensor > 1
    partial = {id(parameter) for parameter in partial_parameters(stage, sequence=sequence)}
    expert_parameter_ids = {id(parameter) for parameter in expert_parameters(stage)} if layout.expert > 1 else set()
    shards = []
    for name, parameter in stage.named_parameters():
        local, whole = local_part(parameter), distributed.get(name)
        expert = id(parameter) in expert_parameter_ids
        # Norms and routers are replicated on the ranks of a tensor group.
        owns_part = tensor == 0 or is_split_over_tensor(whole)
        first = replica // layout.expert == 0 if expert else replica == 0
        counted = owns_part and (not copies if sharded else first)
        shards.append(
            ParameterShard(name, parameter, local, whole, counted, id(parameter) in partial, not sharded, expert)
        )
    return shards


def stage_buffers(stage: DecoderStage) -> dict[str, torch.Tensor]:
    """Return a stage's learned buffers, full on every rank: the routers' balancing biases."""
    return dict(stage.named_buffers())
