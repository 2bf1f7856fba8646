"""What a checkpoint of islands holds.

Checkpoints are taken when islands have met, so parameters are equal everywhere and stand under their usual names. The
optimizer's state is each island's own: that of island 0 has the usual names, so that a run without islands can go on
from it; that of others, and the state of outer steps, have names of their own.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from meshwright_worker.checkpoint.tensors import MODEL, OPTIMIZER, as_whole
from meshwright_worker.outer.outer import Outer
from meshwright_worker.parallel.shards import Shard


def outer_tensors(
    shards: Sequence[Shard], outer: Outer, island: int, known: Container[str] | None = None
) -> dict[str, torch.Tensor]:
    """Every tensor to save or load of this rank, by name.

    Args:
        shards: what this rank updates.
        outer: of the run.
        island: this rank's.
        known: names in the checkpoint to load; an island that it does not know begins with the state of island 0, and
            an outer state that it lacks stays as it is.
    """
    tensors = {f"{MODEL}.{shard.name}": as_whole(shard, shard.local) for shard in shards}
    updated = outer.updated()
    if updated is not None:
        own, optimizer = updated
        for shard in own:
            for moment, local in optimizer.moments(shard).items():
                usual = f"{OPTIMIZER}.{shard.name}.{moment}"
                name = usual if island == 0 else f"island-{island}.{usual}"
                tensors[name if known is None or name in known else usual] = as_whole(shard, local)
    whole = {shard.name: shard for shard in shards}
    for (parameter, kind), local in outer.tensors().items():
        name = f"outer.{parameter}.{kind}"
        if known is None or name in known:
            tensors[name] = as_whole(whole[parameter], local)
    return tensors
