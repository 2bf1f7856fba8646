"""Number formats of `spec.training`: compute, loss scaling and fp8."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel


class Precision(StrEnum):
    """The number format of compute; parameters, gradients' reduction and optimizer state are fp32, or all fp64."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP64 = "fp64"

    @property
    def bytes(self) -> float:
        """Bytes of one number."""
        return 8.0 if self is Precision.FP64 else 4.0 if self is Precision.FP32 else 2.0


class GradientFormat(StrEnum):
    """The number format in which gradients are summed."""

    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def bytes(self) -> float:
        """Bytes of one number."""
        return 2.0 if self is GradientFormat.BF16 else 4.0


class ShardedMastersSpec(ApiModel):
    """Whole parameters in bf16, and fp32 master weights only for the rows that a rank updates (arXiv 1910.02054)."""

    gradients: GradientFormat = GradientFormat.BF16
    """Format of gradients, over micro-batches and over replicas."""


class LossScaleSpec(ApiModel):
    """Dynamic loss scaling of `precision: fp16` (arXiv 1710.03740)."""

    initial: Annotated[int, Field(ge=1, le=4294967296)] = 65536
    """Initial loss scale. A step whose gradients overflow is skipped and halves it."""
    growth_interval: Annotated[int, Field(ge=1, le=1000000000)] = 2000
    """Steps without an overflow after which the scale doubles."""


class Fp8Scaling(StrEnum):
    """What shares a scale in fp8."""

    TENSORWISE = "Tensorwise"
    ROWWISE = "Rowwise"


class Fp8Update(StrEnum):
    """Where a scale in fp8 comes from."""

    DYNAMIC = "Dynamic"
    DELAYED = "Delayed"
    STATIC = "Static"


class Fp8Spec(ApiModel):
    """Matrix products of the layers in fp8 (arXiv 2209.05433): e4m3 for inputs and weights, e5m2 for gradients."""

    scaling: Fp8Scaling = Fp8Scaling.TENSORWISE
    """`Tensorwise`: one scale per tensor. `Rowwise`: one scale per row of both factors; needs `update: Dynamic`."""
    update: Fp8Update = Fp8Update.DYNAMIC
    """Where scales come from. `Dynamic`: the current micro-batch. `Delayed`: the largest values of the last `history`
    steps. `Static`: `inputAmax`, `weightAmax` and `gradientAmax`; larger values are clamped."""
    history: Annotated[int, Field(ge=1, le=1024)] = 16
    """Number of steps for the maxima of `update: Delayed`."""
    input_amax: Annotated[float, Field(gt=0, le=1000000000000)] = 16.0
    """Largest input that `update: Static` represents."""
    weight_amax: Annotated[float, Field(gt=0, le=1000000000000)] = 4.0
    """Largest weight that `update: Static` represents."""
    gradient_amax: Annotated[float, Field(gt=0, le=1000000000000)] = 1.0
    """Largest gradient of an output that `update: Static` represents."""
    all_gather: bool | None = None
    """Experimental: FSDP gathers the weights of these products in fp8: half of bf16's bytes, the same numbers."""
