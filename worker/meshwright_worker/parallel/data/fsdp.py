"""Sharding over replicas, layer by layer: ZeRO stages 2 and 3 (arXiv 1910.02054) by FSDP2, with HSDP and hpZ.

FSDP1's strategies correspond to these: FULL_SHARD is stage 3, SHARD_GRAD_OP is stage 2. In their HYBRID forms a set of
shards has `shardSize` replicas.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, OffloadPolicy, fully_shard

from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.precision import Precision
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.precision.dtypes import sharding_policy


def apply_fsdp(
    stage: DecoderStage,
    replicas: DeviceMesh,
    parallelism: ParallelismSpec,
    precision: Precision,
    offload: OffloadPolicy,
) -> None:
    """Shard every parameter of a stage, layer by layer, in place.

    Stage 2 keeps a layer's gathered parameters from its forward to its backward pass. Stage 3 frees them in between and
    gathers twice, the second time only from `reshard_size` neighbors if that is set. Gradients are summed over replicas
    once per step, after the last micro-batch.

    Args:
        stage: built on the meta device.
        replicas: one dimension, or two: the copies of a set of shards, and the ranks that share one (HSDP).
        parallelism: the ZeRO stage and its options.
        precision: determines FSDP's casts.
        offload: where shards are stored.
    """
    policy = sharding_policy(precision)
    free: bool | int = parallelism.zero_stage == 3 and (parallelism.data_parallel.reshard_size or True)
    for module in [*stage.layers.values(), stage]:
        unit = fully_shard(module, mesh=replicas, reshard_after_forward=free, mp_policy=policy, offload_policy=offload)
        # Losses are already divided by the tokens of all replicas, and gloo supports no other reduction than a plain
        # sum.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def preallocate_fsdp_storage(stage: nn.Module) -> None:
    """Make FSDP allocate its final storage, before other code keeps references to the local shards.

    When FSDP first gathers a parameter that does not divide evenly, it moves the shard into a padded one.
    """
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()
