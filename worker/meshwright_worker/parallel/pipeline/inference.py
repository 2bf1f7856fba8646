"""Runs tokens forward through the stages of a replica, one stage after the other and without micro-batches."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright_worker.data.batch import TokenMetadata
from meshwright_worker.distributed.mesh import PIPELINE, Mesh
from meshwright_worker.models.decoder import DecoderStage


@torch.no_grad()
def forward_stages(
    stage: DecoderStage, tokens: torch.Tensor, token_metadata: TokenMetadata, hidden: int, mesh: Mesh | None
) -> torch.Tensor | None:
    """Run the replica's stages on tokens, int64 [batch, length], the same on every rank of the replica.

    Args:
        stage: this rank's one stage, without sequence parallelism.
        tokens: see above.
        token_metadata: positions and documents of the tokens.
        hidden: the model's width.
        mesh: None in one process.

    Returns:
        Logits [batch, length, this rank's part of the vocabulary] on the ranks of the last stage; None on others.
    """
    if mesh is None or mesh.layout.pipeline == 1:
        whole: torch.Tensor = stage(tokens, token_metadata=token_metadata)
        return whole
    group, place = mesh.group(PIPELINE), mesh.coordinates.pipeline
    x = tokens
    if not stage.is_first:
        x = torch.empty(*tokens.shape, hidden, dtype=stage.compute, device=tokens.device)
        dist.recv(x, dist.get_global_rank(group, place - 1), group=group)
    result: torch.Tensor = stage(x, token_metadata=token_metadata)
    if stage.is_last:
        return result
    dist.send(result.contiguous(), dist.get_global_rank(group, place + 1), group=group)
    return None
