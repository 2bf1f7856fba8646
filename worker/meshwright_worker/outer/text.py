"""Whose text an island trains on: all of it, or with FedAvg files of its own that no other island reads."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.api.training import OuterMethod, TrainingSpec
from meshwright.protocol import RunConfig
from meshwright_worker.mesh import Mesh, same_everywhere


def is_federated(training: TrainingSpec) -> bool:
    """Whether each island has text of its own."""
    return training.outer is not None and training.outer.method is OuterMethod.FED_AVG


def own_data_dir(run: RunConfig, data_dir: str | None, rank: int) -> str | None:
    """The folder of a rank's text below the data volume's. Rank and layout tell it: no group has formed yet."""
    if data_dir is None or run.training is None or not is_federated(run.training):
        return data_dir
    # Replicas are the outermost dimension, so an island has consecutive ranks.
    return str(Path(data_dir) / f"island-{rank // (run.layout.world_size // run.islands)}")


def joint_identity(training: TrainingSpec, identity: str, mesh: Mesh) -> str | None:
    """What names the text of all islands; None when ranks that must have the same have not. Collective."""
    if not is_federated(training):
        return identity if same_everywhere(identity, mesh) else None
    size = mesh.layout.world_size // (mesh.islands.size() if mesh.islands is not None else 1)
    own = torch.frombuffer(bytearray(hashlib.blake2b(identity.encode(), digest_size=16).digest()), dtype=torch.uint8)
    everyones = [torch.empty_like(own) for _ in range(mesh.layout.world_size)]
    dist.all_gather(everyones, own, group=mesh.checkpoint_group)
    texts = [bytes(one.tolist()).hex() for one in everyones]
    islands = [texts[first : first + size] for first in range(0, len(texts), size)]
    return "/".join(island[0] for island in islands) if all(len(set(island)) == 1 for island in islands) else None


def first_sample(training: TrainingSpec, consumed: int, share: int, mesh: Mesh) -> int:
    """The number of the first of `share` samples that this replica takes, after `consumed` by all islands."""
    data = mesh.coordinates.data
    if not is_federated(training) or mesh.islands is None:
        return consumed + data * share
    replicas = mesh.layout.data // mesh.islands.size()
    return consumed // mesh.islands.size() + data % replicas * share
