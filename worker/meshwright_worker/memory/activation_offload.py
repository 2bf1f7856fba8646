"""Activation offload: tensors that a layer saves for its backward pass are moved to host memory.

A layer's saved tensors form a page. They are copied to the host on a separate stream while the next layer computes.
When the backward pass needs the first of them, that page and the previous one are copied back. With activation
checkpointing, the input of each group is saved, and so offloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_worker.data.batch import TokenMetadata
from meshwright_worker.memory.host_memory import CopyStreams
from meshwright_worker.models.decoder import Block, DecoderStage, LayerRunner
from meshwright_worker.precision.fp8.gathered_weight import GatheredWeight

_LEAST_BYTES = 1024
"""Smaller tensors stay on the device: a copy would cost more than it frees."""


@dataclass(eq=False)
class _OffloadedTensor:
    """One tensor of a page."""

    host: torch.Tensor
    device: torch.device
    back: torch.Tensor | None = None
    arrived: Any = None


@dataclass(eq=False)
class _Page:
    """The saved tensors of one layer, or group of layers, for one micro-batch."""

    before: _Page | None
    copies: HostCopier
    offloaded: list[_OffloadedTensor] = field(default_factory=list)
    sources: dict[tuple[object, ...], tuple[torch.Tensor, int]] = field(default_factory=dict)
    """Packed tensors by address. The reference prevents another tensor from taking the address, so that a tensor saved
    by several operators is copied once.
    """

    def pack(self, tensor: torch.Tensor) -> int:
        """Store a tensor; return its index for `unpack`."""
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        known = self.sources.get(place)
        if known is None:
            self.offloaded.append(_OffloadedTensor(self.copies.out(tensor), tensor.device))
            known = self.sources[place] = (tensor, len(self.offloaded) - 1)
        return known[1]

    def close(self) -> None:
        """Finish the layer: the memory of its tensors may be reused."""
        self.sources.clear()

    def fetch(self) -> None:
        """Start to copy all tensors back."""
        for offloaded in self.offloaded:
            if offloaded.back is None:
                offloaded.back, offloaded.arrived = self.copies.back(offloaded.host, offloaded.device)

    def unpack(self, number: int) -> torch.Tensor:
        """Return the tensor, on its device."""
        self.fetch()
        if self.before is not None:
            self.before.fetch()
        offloaded = self.offloaded[number]
        assert offloaded.back is not None
        self.copies.wait(offloaded.arrived, offloaded.back)
        return offloaded.back


class HostCopier:
    """Copies between a device and host memory: on CUDA pinned and on separate streams, elsewhere plain copies."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._streams = CopyStreams(device)

    def out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of `tensor` in host memory; the copy may still be in progress."""
        host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=self._cuda)
        if not self._cuda:
            return host.copy_(tensor)
        with self._streams.copying_out() as stream:
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        return host

    def back(self, host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Any]:
        """Return a copy of `host` on `device`, and the event after which it is complete."""
        outward, inward = self._streams.outward, self._streams.inward
        if outward is None or inward is None:
            return host, None
        inward.wait_stream(outward)
        with torch.cuda.stream(inward):
            back = host.to(device, non_blocking=True)
            return back, inward.record_event()

    def wait(self, event: Any, tensor: torch.Tensor) -> None:
        """Make the current stream wait for the result of `back`."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
            tensor.record_stream(torch.cuda.current_stream())


class OffloadedLayers:
    """Runs a stage's layers one by one with `inner`, each with its own page."""

    def __init__(self, inner: LayerRunner, group: int, copies: HostCopier) -> None:
        self._inner = inner
        self._group = group
        self._copies = copies

    def __call__(self, layers: Sequence[Block], x: torch.Tensor, token_metadata: TokenMetadata) -> torch.Tensor:
        """See `run_in_order`."""
        if not torch.is_grad_enabled():
            return self._inner(layers, x, token_metadata)
        page: _Page | None = None
        for first in range(0, len(layers), self._group):
            group = layers[first : first + self._group]
            page = _Page(page, self._copies)
            with torch.autograd.graph.saved_tensors_hooks(_packing(page, group), _unpack):
                x = self._inner(group, x, token_metadata)
            page.close()
        return x


def offload_activations(stage: DecoderStage, group: int, device: torch.device) -> None:
    """Make a stage offload its layers' activations to host memory. Call it after `checkpoint_activations`.

    Args:
        stage: the stage.
        group: layers per page, as many as are recomputed together.
        device: the stage's device.
    """
    stage.run_layers = OffloadedLayers(stage.run_layers, group, HostCopier(device))


def _packing(page: _Page, layers: Sequence[Block]) -> Callable[[torch.Tensor], Any]:
    parameter_storages: set[int] = set()

    def pack(tensor: torch.Tensor) -> Any:
        # Parameters are not offloaded; FSDP even frees and refills the memory of gathered ones meanwhile. They are
        # listed here, after a layer's hooks have gathered them: before, they are DTensors.
        if not parameter_storages:
            parameters = [p for layer in layers for p in layer.parameters() if not isinstance(p, DTensor)]
            stored = (p.fp8_values if isinstance(p, GatheredWeight) else p for p in parameters)
            parameter_storages.update(values.untyped_storage().data_ptr() for values in stored)
        if tensor.nbytes < _LEAST_BYTES or tensor.untyped_storage().data_ptr() in parameter_storages:
            return tensor
        return page, page.pack(tensor)

    return pack


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    page, number = packed
    tensor: torch.Tensor = page.unpack(number)
    return tensor
