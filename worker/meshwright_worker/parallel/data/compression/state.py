"""Compression state in checkpoints, so that a run resumes bit by bit.

Every rank has its own state. Its names contain the rank and a digest of everything that defines its meaning: the
layout, the compression method, and the parameters of each bucket. A run in another layout finds none of its names, and
starts with empty residuals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from meshwright.api.data_parallel import DataParallelSpec
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.parallel.data.compression.compressor import Compressor
from meshwright_worker.parallel.shards import ParameterShard

_NAME = "compression"


class CompressionState:
    """The state of one rank's compressors.

    Args:
        compressors: one per bucket.
        buckets: their contents.
        spec: the compression method.
        mesh: provides the layout and the rank.
    """

    def __init__(
        self,
        compressors: Sequence[Compressor],
        buckets: Sequence[Sequence[ParameterShard]],
        spec: DataParallelSpec,
        mesh: Mesh,
    ) -> None:
        self._compressors = compressors
        meaning = [
            str(mesh.layout),
            f"{spec.compression.value}/{spec.compression_rank}/{spec.compression_density!r}",
            *(
                " ".join(f"{shard.name}:{tuple(shard.local.shape)}:{shard.local.dtype}" for shard in bucket)
                for bucket in buckets
            ),
        ]
        digest = hashlib.sha256("\n".join(meaning).encode()).hexdigest()[:16]
        self._prefix = f"{_NAME}.{digest}.{mesh.rank}."
        self._device = mesh.device

    def owns(self, name: str) -> bool:
        """Return whether a checkpoint's tensor of that name is a part of this state."""
        return name.startswith(self._prefix)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the current state, by names for a checkpoint; empty before the first step."""
        return {
            f"{self._prefix}{bucket}.{key}": tensor
            for bucket, compressor in enumerate(self._compressors)
            for key, tensor in compressor.state_dict().items()
        }

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply the state by a number, or fp64 [] on the device. `tensors` returned before stay as they are."""
        self.load_state_dict({name: tensor * factor for name, tensor in self.tensors().items()})

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore what `tensors` returned."""
        for bucket, compressor in enumerate(self._compressors):
            own = f"{self._prefix}{bucket}."
            compressor.load_state_dict(
                {name.removeprefix(own): t.to(self._device) for name, t in tensors.items() if name.startswith(own)}
            )
