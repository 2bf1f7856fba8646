"""Silent corruption: a step's gradients are computed again on another replica, and compared bit by bit.

A GPU or memory that computes wrongly without an error spoils every rank with the next sum of gradients, and a loss
shows it late or never (Llama 3, arXiv 2407.21783, table 5, counts silent corruption among the causes of interruptions).
Here the samples of one replica go through the passes and the reduction of a step on that replica alone, and then on its
neighbor alone: meanwhile the other replicas compute the same samples without targets, and add exact zeros. So both sums
have one addend that is not zero, and are equal bit by bit in every layout and order of reduction, unless something on
one of the two replicas is wrong. A third replica decides which. No parameter changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from meshwright.api.training import TrainingSpec
from meshwright_worker.data.batch import IGNORED, Batch
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.rank.failures import NodeFaultError
from meshwright_worker.trainer.trainer import Trainer

_DECIDING = 3
"""Replicas with which a difference shows which one is wrong."""


class CorruptionError(ArithmeticError):
    """The same samples gave different gradients on two replicas, and it is not known whose node is at fault."""


class RepeatedSteps:
    """Repeats a step every `training.anomalies.repeatEverySteps` steps, on neighbors that change from time to time.

    Args:
        training: the run's; its field may be missing.
        trainer: this rank's.
        mesh: this rank's.
        ranks_per_worker: how many ranks share a node. A replica of more than one worker has several nodes.
    """

    def __init__(self, training: TrainingSpec, trainer: Trainer, mesh: Mesh, ranks_per_worker: int) -> None:
        self._every = training.anomalies.repeat_every_steps if training.anomalies is not None else None
        self._trainer, self._mesh = trainer, mesh
        self._replicas = mesh.layout.data
        self._has_one_node = mesh.layout.world_size // self._replicas <= ranks_per_worker
        self._last_equal = 0

    def due(self, step: int) -> bool:
        """Return whether to repeat this step's gradients before it."""
        return self._every is not None and step % self._every == 0 and self._replicas > 1

    def check(self, step: int, samples_of: Callable[[int], Batch]) -> None:
        """Compute the gradients of one replica's samples on several replicas. Collective.

        `samples_of` reads the samples that a replica takes in this step.

        Raises:
            NodeFaultError: they differ on this replica, which has one node.
            CorruptionError: they differ, and the node at fault is not known.
            ConnectionError: they differ on another replica.
        """
        assert self._every is not None
        turn = step // self._every
        tried = [(turn + index) % self._replicas for index in range(min(_DECIDING, self._replicas))]
        batch = samples_of(tried[0])
        first, second = (self._digests(batch, replica) for replica in tried[:2])
        if not self._differ(first, second):
            self._last_equal = step
            return
        known = f"step {step}: the gradients of the same samples differ between replicas {tried[0]} and {tried[1]}"
        since = f"; checkpoints after step {self._last_equal} may be wrong"
        if len(tried) < _DECIDING:
            raise CorruptionError(f"{known}{since}")
        third = self._digests(batch, tried[2])
        wrong = [self._differ(first, third), self._differ(second, third)]
        if wrong[0] == wrong[1]:
            raise CorruptionError(
                f"{known}, and replica {tried[2]} agrees with {'neither' if wrong[0] else 'both'}{since}"
            )
        culprit = tried[wrong.index(True)]
        text = f"{known}, and replica {tried[2]} agrees with {tried[wrong.index(False)]}{since}"
        if self._mesh.coordinates.data != culprit:
            raise ConnectionError(f"connection closed: {text}")
        raise NodeFaultError(text) if self._has_one_node else CorruptionError(text)

    def _digests(self, batch: Batch, replica: int) -> torch.Tensor:
        """Digests of the gradients of a batch, computed on one replica."""
        if self._mesh.coordinates.data != replica:
            batch = replace(batch, targets=torch.full_like(batch.targets, IGNORED))
        return self._trainer.gradient_digests(batch)

    def _differ(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether digests differ on any rank. Collective."""
        found = (one != other).any().to(self._mesh.device, torch.int32)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._mesh.island_group)
        return bool(found)
