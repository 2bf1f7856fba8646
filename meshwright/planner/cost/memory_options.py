"""What a job's spec fixes beside its layout, as far as a rank's memory depends on it. The defaults are the API's.

A search varies none of it. It counts for this repository's worker alone (`Runtime.stores_masters`); published runs of
other frameworks are described by their `Runtime`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """The fields of `training` and `parallelism` that hold memory or save it."""

    master_weights: bool = True
    """Whether parameters are fp32 where compute is not."""
    muon: bool = False
    """Whether matrices of layers have one moment (Muon) instead of AdamW's two."""
    flat: bool = False
    """Whether ZeRO stage 2 is on flat shards (`dataParallel.strategy: ZeRO`), not FSDP's."""
    shard_size: int | None = None
    """Replicas that share one set of shards; all of them where left out (HSDP)."""
    reshard_size: int | None = None
    """Ranks that keep a gathered copy between forward and backward (hpZ)."""
    bucket: int = 16777216
    """Gradients that one collective sums."""
    feedback: int = 0
    """Copies of what compression left out of a gradient that are kept for the next step."""
    islands: int = 1
    """Groups of replicas that train apart: ZeRO shards within one."""
    outer: float = 0.0
    """Numbers that the outer optimizer keeps for each parameter that a rank updates."""
    loss_chunk: int | None = None
    """Tokens whose logits exist at a time; those of a micro-batch where left out."""
    rematerialize: bool = False
    """Whether only a stage's input is kept, and the stage computed again."""
    activation_limit: int | None = None
    """Micro-batches that a rank may hold with an automatic schedule; the pipeline's ranks where left out."""
    parameter_offload: bool = False
    """Whether shards of parameters, gradients and optimizer state are in main memory."""
    adapters: tuple[int, int] | None = None
    """Parameters of the low-rank adapters of a dense layer and of a mixture, which are then trained alone; None where
    everything is trained.
    """

    def adapters_of(self, dense: int, mixtures: int) -> int:
        """Parameters of the adapters of so many layers of either kind; 0 where everything is trained."""
        if self.adapters is None:
            return 0
        return dense * self.adapters[0] + mixtures * self.adapters[1]


DEFAULT = MemoryOptions()
