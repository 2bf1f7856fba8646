"""A batch forward through the stages of a replica, one stage after the other and without micro-batches."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright_worker.data.batch import Places
from meshwright_worker.mesh import PIPELINE, Mesh
from meshwright_worker.models.llama import DecoderStage


@torch.no_grad()
def forward_through(
    stage: DecoderStage,
    tokens: torch.Tensor,
    places: Places,
    targets: torch.Tensor | None,
    hidden: int,
    mesh: Mesh | None,
    *,
    sequence: bool = False,
) -> torch.Tensor | None:
    """Run the replica's stages on tokens, int64 [batch, length], that every rank of it has.

    Args:
        stage: this rank's.
        tokens: see above.
        places: where the tokens stand.
        targets: as for `DecoderStage.forward`.
        hidden: the model's width.
        mesh: None in one process.
        sequence: whether the residual stream is split along the positions over the tensor group.

    Returns:
        What the last stage returns, on its ranks; None on others.
    """
    if mesh is None or mesh.layout.pipeline == 1:
        result: torch.Tensor = stage(tokens, targets, places)
        _reshard(stage)
        return result
    group, place = mesh.group(PIPELINE), mesh.coordinates.pipeline
    x = tokens
    if not stage.is_first:
        length = tokens.shape[1] // (mesh.layout.tensor if sequence else 1)
        x = torch.empty(tokens.shape[0], length, hidden, dtype=stage.compute, device=tokens.device)
        dist.recv(x, dist.get_global_rank(group, place - 1), group=group)
    result = stage(x, targets if stage.is_last else None, places)
    _reshard(stage)
    if stage.is_last:
        return result
    dist.send(result.contiguous(), dist.get_global_rank(group, place + 1), group=group)
    return None


def _reshard(stage: nn.Module) -> None:
    # No backward pass follows that would free what FSDP gathered; an update of the shards would go unseen.
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
