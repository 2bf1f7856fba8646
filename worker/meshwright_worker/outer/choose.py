"""The way of `training.outer`."""

from __future__ import annotations

from meshwright.api.training import OuterMethod, OuterSpec, TrainingSpec
from meshwright_worker.mesh import Mesh
from meshwright_worker.optimizer import Optimizer
from meshwright_worker.outer.asynchronous import AsynchronousSGD
from meshwright_worker.outer.averaging import Averaging
from meshwright_worker.outer.diloco import DiLoCo
from meshwright_worker.outer.outer import Outer
from meshwright_worker.parallel.replicas import Replicas


def outer_of(
    spec: OuterSpec, training: TrainingSpec, replicas: Replicas, optimizer: Optimizer, mesh: Mesh, samples: int
) -> Outer:
    """How the islands of `mesh` come together. Collective.

    Args:
        spec: the method.
        training: whose optimizer an asynchronous server has.
        replicas: this rank's shards.
        optimizer: of this island.
        mesh: with islands.
        samples: of this island's own text, for `FedAvg`.
    """
    match spec.method:
        case OuterMethod.LOCAL_SGD:
            return Averaging(replicas.shards, optimizer, mesh)
        case OuterMethod.FED_AVG:
            return Averaging(replicas.shards, optimizer, mesh, samples)
        case OuterMethod.DILOCO:
            return DiLoCo(replicas.shards, optimizer, mesh, spec)
        case OuterMethod.ASYNC_SGD:
            return AsynchronousSGD(replicas.shards, training.optimizer, mesh, spec.staleness, replicas.publish)
