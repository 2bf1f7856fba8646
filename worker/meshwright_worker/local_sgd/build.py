"""Builds the outer optimizer of `training.outer`."""

from __future__ import annotations

from meshwright.api.training import OuterMethod, OuterSpec, TrainingSpec
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.local_sgd.async_sgd import AsynchronousSGD
from meshwright_worker.local_sgd.diloco import DiLoCo
from meshwright_worker.local_sgd.outer_optimizer import OuterOptimizer
from meshwright_worker.local_sgd.parameter_averaging import ParameterAveraging
from meshwright_worker.optimizers.optimizer import Optimizer
from meshwright_worker.parallel.data.data_parallel import DataParallel


def build_outer_optimizer(
    spec: OuterSpec, training: TrainingSpec, data_parallel: DataParallel, optimizer: Optimizer, mesh: Mesh, samples: int
) -> OuterOptimizer:
    """Build the method that synchronizes the islands of `mesh`. Collective.

    Args:
        spec: the method.
        training: settings of an asynchronous server's optimizer.
        data_parallel: has this rank's shards.
        optimizer: of this island.
        mesh: with islands.
        samples: number of samples in this island's corpus, for `FedAvg`.
    """
    match spec.method:
        case OuterMethod.LOCAL_SGD:
            return ParameterAveraging(data_parallel.shards, optimizer, mesh)
        case OuterMethod.FED_AVG:
            return ParameterAveraging(data_parallel.shards, optimizer, mesh, samples)
        case OuterMethod.DILOCO:
            return DiLoCo(data_parallel.shards, optimizer, mesh, spec)
        case OuterMethod.ASYNC_SGD:
            return AsynchronousSGD(
                data_parallel.shards, training.optimizer, mesh, spec.staleness, data_parallel.sync_parameters
            )
