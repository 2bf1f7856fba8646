"""What compressors left out, in checkpoints, so that a run goes on to the bit where it stopped.

Every rank has its own, under names that hold its number and a digest of all that gives it its meaning: the layout, the
way of compression, and which parameters are in which bucket. A run in another layout finds none of its names, and
begins with nothing left out.
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
    """The memories of one rank's compressors.

    Args:
        compressors: one for each bucket.
        buckets: what is in them.
        spec: the way of compression.
        mesh: whose layout and rank they belong to.
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
        """Whether a checkpoint's tensor of that name is a part of this memory."""
        return name.startswith(self._prefix)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is remembered now, by names for a checkpoint; nothing before the first step."""
        return {
            f"{self._prefix}{bucket}.{key}": tensor
            for bucket, compressor in enumerate(self._compressors)
            for key, tensor in compressor.state_dict().items()
        }

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on with what `tensors` said."""
        for bucket, compressor in enumerate(self._compressors):
            own = f"{self._prefix}{bucket}."
            compressor.load_state_dict(
                {name.removeprefix(own): t.to(self._device) for name, t in tensors.items() if name.startswith(own)}
            )
