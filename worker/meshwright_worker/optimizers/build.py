"""Builds the optimizer of a run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.api.precision import Precision
from meshwright.api.training import OptimizerName, OptimizerOffload
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.optimizers.adamw import AdamW
from meshwright_worker.optimizers.bf16_adamw import BF16AdamW
from meshwright_worker.optimizers.master_adamw import MasterAdamW
from meshwright_worker.optimizers.muon import Muon
from meshwright_worker.optimizers.offload_adamw import OffloadAdamW
from meshwright_worker.optimizers.offloaded_state import FileMomentState, HostMomentState
from meshwright_worker.optimizers.optimizer import Optimizer
from meshwright_worker.parallel.shards import ParameterShard

_ORTHOGONALIZES_IN = {Precision.FP64: torch.float64, Precision.FP32: torch.float32}


def build_optimizer(shards: Sequence[ParameterShard], run: NativeRun, mesh: Mesh) -> Optimizer:
    """Build the optimizer of this rank's shards. Validation has already rejected unsupported combinations."""
    training, spec = run.training, run.training.optimizer
    if spec.name is OptimizerName.MUON:
        return Muon(shards, spec, _ORTHOGONALIZES_IN.get(training.precision, torch.bfloat16), mesh.device)
    # On a CPU compiled kernels take as long, and their bits would change the digests of runs.
    compiles = training.compile and all(shard.local.is_cuda for shard in shards)
    if run.shards_masters:
        return MasterAdamW(shards, spec, compiles=compiles)
    if not training.master_weights:
        return BF16AdamW(shards, spec, training.seed, compiles=training.compile)
    if spec.offload is OptimizerOffload.NONE:
        # An outer optimizer reads gradients that are already scaled.
        return MasterAdamW(shards, spec, compiles=True) if compiles and training.outer is None else AdamW(shards, spec)
    locals_ = [shard.local for shard in shards]
    if spec.offload is OptimizerOffload.FILE:
        assert spec.offload_path is not None
        return OffloadAdamW(shards, spec, FileMomentState(locals_, spec.offload_path), mesh.device)
    return OffloadAdamW(shards, spec, HostMomentState(locals_, pinned=mesh.device.type == "cuda"), mesh.device)
