"""Which optimizer a run has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.api.precision import Precision
from meshwright.api.training import OptimizerName, OptimizerOffload, TrainingSpec
from meshwright_worker.mesh import Mesh
from meshwright_worker.optimizer import AdamW, Optimizer
from meshwright_worker.optimizers.muon import Muon
from meshwright_worker.optimizers.offloaded import OffloadedAdamW
from meshwright_worker.optimizers.rounded import RoundedAdamW
from meshwright_worker.optimizers.state import FileState, HostState
from meshwright_worker.parallel.shards import Shard

_ORTHOGONALISES_IN = {Precision.FP64: torch.float64, Precision.FP32: torch.float32}


def build_optimizer(shards: Sequence[Shard], training: TrainingSpec, mesh: Mesh) -> Optimizer:
    """The optimizer of this rank's shards. What does not go together `validate` has refused."""
    spec = training.optimizer
    if spec.name is OptimizerName.MUON:
        return Muon(shards, spec, _ORTHOGONALISES_IN.get(training.precision, torch.bfloat16), mesh.device)
    if not training.master_weights:
        return RoundedAdamW(shards, spec, training.seed, compiled=training.compile)
    if spec.offload is OptimizerOffload.NONE:
        return AdamW(shards, spec)
    locals_ = [shard.local for shard in shards]
    if spec.offload is OptimizerOffload.FILE:
        assert spec.offload_path is not None
        return OffloadedAdamW(shards, spec, FileState(locals_, spec.offload_path), mesh.device)
    return OffloadedAdamW(shards, spec, HostState(locals_, pinned=mesh.device.type == "cuda"), mesh.device)
