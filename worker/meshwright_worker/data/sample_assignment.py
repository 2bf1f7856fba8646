"""Determines the corpus of an island: the entire corpus, or with FedAvg separate files that no other island reads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist

from meshwright.api.training import OuterMethod, TrainingSpec
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.data.length_balance import assign_rows
from meshwright_worker.distributed.mesh import Mesh, is_same_on_all_ranks


def is_federated(training: TrainingSpec) -> bool:
    """Return whether each island has a separate corpus."""
    return training.outer is not None and training.outer.method is OuterMethod.FED_AVG


def island_data_dir(run: NativeRun, data_dir: str | None, rank: int) -> str | None:
    """Return the directory of a rank's corpus on the data volume. Uses rank and layout, since no group exists yet."""
    if data_dir is None or not is_federated(run.training):
        return data_dir
    # Replicas are the outermost dimension, so an island has consecutive ranks.
    return str(Path(data_dir) / f"island-{rank // (run.layout.world_size // run.islands)}")


def combined_identity(training: TrainingSpec, identity: str, mesh: Mesh) -> str | None:
    """Return the identity of all islands' corpora; None if ranks that need the same corpus differ. Collective."""
    if not is_federated(training):
        return identity if is_same_on_all_ranks(identity, mesh) else None
    size = mesh.layout.world_size // (mesh.islands.size() if mesh.islands is not None else 1)
    own = torch.frombuffer(bytearray(hashlib.blake2b(identity.encode(), digest_size=16).digest()), dtype=torch.uint8)
    digests = [torch.empty_like(own) for _ in range(mesh.layout.world_size)]
    dist.all_gather(digests, own, group=mesh.checkpoint_group)
    texts = [bytes(one.tolist()).hex() for one in digests]
    islands = [texts[first : first + size] for first in range(0, len(texts), size)]
    return "/".join(island[0] for island in islands) if all(len(set(island)) == 1 for island in islands) else None


@dataclass(frozen=True, slots=True)
class SampleAssignment:
    """The samples that a replica takes: its part of its island's part of a step."""

    island: int = 0
    islands: int = 1
    replica: int = 0
    """Index of the replica in its island."""
    replicas: int = 1
    separate_data: bool = False
    """Whether each island numbers the samples of a separate corpus, or all share one numbering."""

    @classmethod
    def of(cls, training: TrainingSpec, mesh: Mesh) -> Self:
        """Return this rank's assignment."""
        islands = mesh.islands.size() if mesh.islands is not None else 1
        replicas = mesh.layout.data // islands
        return cls(mesh.island, islands, mesh.coordinates.data % replicas, replicas, is_federated(training))

    def island_samples(self, step: range) -> range:
        """Return the numbers of the samples that the island takes, of a step's samples over all islands.

        Islands with separate corpora take equally many samples each, so an island's numbers are its share of the count.
        """
        share = len(step) // self.islands
        first = step.start // self.islands if self.separate_data else step.start + self.island * share
        return range(first, first + share)

    def end_of_first(self, count: int) -> int:
        """Return the end of the numbers that the first `count` samples over all islands have in this island's corpus.

        Islands with separate corpora take equally many of them, up to one.
        """
        return -(-(count - self.island) // self.islands) if self.separate_data else count

    def replica_samples(self, step: range) -> range:
        """Return the numbers of the samples that this replica takes."""
        own = self.island_samples(step)
        share = len(own) // self.replicas
        return own[self.replica * share : (self.replica + 1) * share]

    def balanced_samples(self, step: range, cost: Callable[[int], int], micro_batches: int) -> list[int]:
        """Return `replica_samples`, with the island's samples balanced over its replicas by cost.

        The island's samples stay the same: balancing only changes which replica computes which.
        """
        own = self.island_samples(step)
        assigned = assign_rows([cost(sample) for sample in own], self.replicas, micro_batches)
        return [own[row] for row in assigned[self.replica]]
