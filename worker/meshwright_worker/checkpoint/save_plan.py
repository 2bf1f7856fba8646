"""Which rank writes which box of a checkpoint: planned once for a layout, and reused by the saves that follow.

torch plans. A rank describes its parts of all tensors, rank 0 drops the copies of what several ranks have, and each
rank is sent the positions of what it writes. Where each box begins in its file follows from the plan. So rank 0 encodes
the index of the tensors when it plans, not at each save.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from meshwright_worker.checkpoint.dcp_storage import encoded_index, file_of_rank
from meshwright_worker.checkpoint.safetensors_format import TensorHeader, header_of
from meshwright_worker.checkpoint.tensor_index import StoredChunk, index_of

Layout = tuple[object, ...]
"""See `layout_of`."""


@dataclass(frozen=True, slots=True)
class GlobalPlan:
    """What rank 0 plans for all ranks."""

    kept: list[list[int]]
    """By rank, which boxes of its local plan it writes."""
    index_name: str
    """Name of the file with the index."""
    index: bytes
    """Its content."""


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """What the plan of these tensors depends on; equal for two saves that can have the same plan."""
    return tuple(
        (name, tensor.dtype, tensor.shape, tensor._local_tensor.shape, tensor.placements)
        if isinstance(tensor, DTensor)
        else (name, tensor.dtype, tensor.shape)
        for name, tensor in tensors.items()
    )


def local_plan(tensors: Mapping[str, torch.Tensor], *, is_coordinator: bool) -> list[WriteItem]:
    """Every box that this rank has.

    Raises:
        ValueError: an object is not a tensor.
    """
    planner = _planner()
    planner.set_up_planner(dict(tensors), is_coordinator=is_coordinator)
    items: list[WriteItem] = planner.create_local_plan().items
    for item in items:
        if item.tensor_data is None:
            raise ValueError(f"{item.index.fqn} is not a tensor: a checkpoint contains only tensors")
    return items


def encode_plan(items: Sequence[WriteItem]) -> bytes:
    """A local plan for `global_plan`. Opaque to the ranks that pass it on."""
    return pickle.dumps(list(items))


def global_plan(local_plans: Sequence[bytes]) -> GlobalPlan:
    """Plan a checkpoint from the encoded local plans of all ranks, in rank order."""
    local = [pickle.loads(plan) for plan in local_plans]  # noqa: S301 - of ranks of this job, over its own groups
    plans, metadata = _planner().create_global_plan([SavePlan(items) for items in local])
    stored: dict[MetadataIndex, StoredChunk] = {}
    kept = []
    for rank, (items, plan) in enumerate(zip(local, plans, strict=True)):
        indices = {item.index for item in plan.items}
        kept.append([position for position, item in enumerate(items) if item.index in indices])
        written = [items[position] for position in kept[-1]]
        _, starts = header_of([_header(item) for item in written])
        for item, start in zip(written, starts, strict=True):
            stored[item.index] = StoredChunk(file_of_rank(rank), start)
    return GlobalPlan(kept, *encoded_index(index_of(metadata, stored)))


def tensors_to_write(items: Sequence[WriteItem], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The content of this rank's file: the boxes that the plan assigns to it, in the memory of `tensors`."""
    return {_box_name(item): find_state_dict_object(dict(tensors), item.index) for item in items}


def _planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _header(item: WriteItem) -> TensorHeader:
    assert item.tensor_data is not None
    return TensorHeader(_box_name(item), item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes)


def _box_name(item: WriteItem) -> str:
    # A tensor that was not split keeps its plain name, so that other tools find it.
    data = item.tensor_data
    assert data is not None
    if data.chunk.sizes == data.size:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(str(offset) for offset in data.chunk.offsets)}"
