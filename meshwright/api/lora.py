"""`spec.training.lora`: low-rank adapters."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel


class LoraTarget(StrEnum):
    """A matrix of a layer that gets an adapter."""

    QUERY = "Query"
    KEY = "Key"
    VALUE = "Value"
    OUTPUT = "Output"
    GATE = "Gate"
    UP = "Up"
    DOWN = "Down"


class LoraSpec(ApiModel):
    """Low-rank adaptation (LoRA, arXiv 2106.09685): the model's weights are frozen, and two narrow matrices are trained
    for some of them.
    """

    rank: Annotated[int, Field(ge=1, le=65536)] = 8
    """Width of the adapters."""
    alpha: Annotated[float, Field(gt=0, le=1000000)] = 16.0
    """An adapter's output is scaled by `alpha / rank`."""
    targets: Annotated[list[LoraTarget], Field(min_length=1, max_length=7)] = [LoraTarget.QUERY, LoraTarget.VALUE]
    """The matrices that get an adapter, in every layer that has them."""
    # Left out of manifests if it is not set, as versions that do not know it write them.
    initial_adapter: Annotated[str, Field(min_length=2, max_length=1024, pattern="^/")] | None = Field(
        None, exclude_if=lambda path: path is None
    )
    """Experimental. Directory of an adapter of `initialWeights` in the format of PEFT, to begin with. By default the
    adapter is new."""
