"""A row of the parity matrix: a technique in a layout, compared with one process with the same seed and samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

from meshwright.api.precision import Precision
from meshwright.api.training import OuterMethod
from meshwright.protocol.run_config import NativeRun
from meshwright.schedules.registry import kind_of
from tests.distributed.configs import small_run
from tests.distributed.mesh_cache import can_be_kept


@dataclass(frozen=True)
class Case:
    """`layout` and `common` are arguments of `small_run`; one process runs `common` alone.

    A case with `refused` is an illegal combination: `validate` must raise an error that holds this text.
    """

    technique: str
    """What the row is about, as a reader would look it up: `ring attention (zig-zag)`."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None
    smoke: bool = False
    """Whether the case is in the part that every test run has."""
    exact: bool = True
    """Whether one process computes the same numbers but for rounding; False for techniques that round on purpose
    (bf16, fp8, compressed gradients), which are then held to `tolerance`."""
    tolerance: float = 1e-5
    """Largest error of loss and of any gradient tensor, relative to the tensor's largest element, in fp32."""
    vanishing: str = "-"
    """End of the names of parameters whose gradient is 0 but for rounding, such as the bias of keys (softmax does not
    change when every score of a query does). Adam makes steps of full size of that rounding, so only the gradient's
    size is held, against the largest of all."""

    together: tuple[str, ...] = ()
    """The techniques of a row of pairs."""

    @property
    def formats(self) -> tuple[Precision, ...]:
        """The number formats that it is measured in."""
        exact = (Precision.FP32, Precision.FP64)
        return exact if self.exact else (self.common.get("precision", Precision.FP32),)

    @property
    def defined_by_layout(self) -> bool:
        """Whether the layout decides what one process has to compute, as where weights are stale or islands apart."""
        return kind_of(self.run().parallelism.order).asynchronous or "outer" in self.layout

    @property
    def asynchronous(self) -> bool:
        """Whether it depends on the clock as well, so that one process has to follow what the ranks did."""
        return self.layout.get("outer", {}).get("method") == OuterMethod.ASYNC_SGD

    @property
    def name(self) -> str:
        """Unique among the cases."""
        options = {**self.common, **self.layout}
        return " ".join([self.technique, *(f"{key}={value}" for key, value in options.items())])

    def run(self, **more: Any) -> NativeRun:
        """The run of the case in its layout."""
        return small_run(**{**self.common, **self.layout, **more})

    def reference(self, **more: Any) -> NativeRun:
        """The run in one process; of islands, that of one of them."""
        run = small_run(**{**self.common, **more})
        islands = self.run().islands
        if islands == 1:
            return run
        share = run.training.model_copy(update={"global_batch_size": run.training.global_batch_size // islands})
        return run.model_copy(update={"training": share})


def meshes_of(case: Case) -> tuple[int, ...]:
    """The same for cases that can use each other's meshes, so that sorted by it they come one after the other."""
    if case.refused is not None:
        return (0,)
    run = case.run()
    shards = run.parallelism.data_parallel.shard_size or 0
    return (run.layout.world_size, int(can_be_kept(run)), *astuple(run.layout), shards)
