"""Context parallelism: the ranks of a group share the tokens of each row, and attention spans all of them.

All layers except attention process tokens independently, so each rank trains on its slice of a row as if it were the
row. `context_slice` takes the slice from the replica's batch, and `install_context_attention` installs an attention
method in the model. Losses and gradients are sums over tokens, which the reduction over replicas (data x context)
completes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.api.parallelism import ContextMethod
from meshwright.sequence_sharding import SequenceSharding, TokenSlice, size
from meshwright_worker.data.batch import Batch, TokenMetadata
from meshwright_worker.distributed.mesh import CONTEXT, Mesh
from meshwright_worker.models.attention import AttentionCore
from meshwright_worker.parallel.context.all_gather_attention import AllGatherPlan, gathered_attention
from meshwright_worker.parallel.context.attention_blocks import AttentionBlock, blocks_of
from meshwright_worker.parallel.context.ring_attention import RingPlan, ring_attention
from meshwright_worker.parallel.context.ulysses import exchange_heads, return_tokens
from meshwright_worker.parallel.context.varlen_attention import VARLEN_KERNELS, varlen_attention
from meshwright_worker.parallel.context.varlen_kernels import VarlenCall
from meshwright_worker.parallel.context.varlen_segments import varlen_blocks


def context_slice(batch: Batch, deal: SequenceSharding, rank: int) -> Batch:
    """Return the part of the replica's full batch, on the CPU, for rank `rank` of a context group. A slice is returned
    as is.
    """
    if batch.row_length is not None:
        return batch
    if deal.ranks == 1:
        return replace(batch, row_documents=batch.documents)
    length = batch.tokens.shape[1]
    columns = torch.cat([torch.arange(part.start, part.stop) for part in deal.slices(length)[rank]])
    part_of_rank = batch.each(lambda tensor: tensor[:, columns])
    positions = columns.expand(len(batch.tokens), -1) if part_of_rank.positions is None else part_of_rank.positions
    return replace(part_of_rank, positions=positions, row_length=length, row_documents=batch.documents)


def install_context_attention(
    model: nn.Module, deal: SequenceSharding, groups: ContextGroups, *, varlen: bool = False
) -> None:
    """Make every attention layer of a model work over the ranks of the context group.

    A single rank gets attention that skips scores between documents of a row, and of keys before a sliding window. With
    `varlen`, all documents of a micro-batch are computed in one call.
    """
    cores = {name: module for name, module in model.named_modules() if isinstance(module, AttentionCore)}
    # Layers with equal attention share a core, which computes a micro-batch's blocks once for all of them.
    shared: dict[tuple[bool, float | None, int], AttentionCore] = {}
    for name, core in cores.items():
        kind = (core.causal, core.scale, core.window)
        if kind not in shared:
            shared[kind] = _build_core(deal, groups, core, varlen=varlen)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, shared[kind])


@dataclass(frozen=True)
class ContextGroups:
    """The process groups of attention; None for those that the method does not use."""

    heads: dist.ProcessGroup | None
    """Ranks that exchange heads for tokens."""
    tokens: dist.ProcessGroup | None
    """Ranks that pass keys and values around or gather them."""


def build_context_groups(deal: SequenceSharding, mesh: Mesh) -> ContextGroups:
    """Create the groups that a method needs. Collective over all ranks."""
    if deal.ranks == 1:
        return ContextGroups(None, None)
    if deal.method is ContextMethod.ULYSSES:
        return ContextGroups(mesh.group(CONTEXT), None)
    if deal.method is not ContextMethod.RING_ULYSSES:
        return ContextGroups(None, mesh.group(CONTEXT))
    # Heads are exchanged between consecutive ranks: this traffic needs the fastest links (arXiv 2405.07719).
    layout = mesh.layout
    ranks = torch.arange(layout.world_size)
    shape = (layout.data, layout.pipeline, deal.ranks // deal.inner, deal.inner, layout.tensor)
    names = ("data", "pipeline", "ring", "heads", "tensor")
    both = DeviceMesh(mesh.device.type, ranks.view(shape), mesh_dim_names=names)
    return ContextGroups(both.get_group("heads"), both.get_group("ring"))


def _build_core(
    deal: SequenceSharding, groups: ContextGroups, template: AttentionCore, *, varlen: bool
) -> AttentionCore:
    if deal.ranks == 1 or deal.method is ContextMethod.ALL_GATHER:
        return AllGatherAttentionCore(deal, groups.tokens, template, varlen=varlen)
    if deal.method is ContextMethod.ULYSSES:
        assert groups.heads is not None
        inner = AllGatherAttentionCore(SequenceSharding(), None, template, varlen=varlen)
        return UlyssesAttentionCore(inner, deal, groups.heads)
    assert groups.tokens is not None
    ring = RingAttentionCore(deal, groups.tokens, template, varlen=varlen)
    return ring if groups.heads is None else UlyssesAttentionCore(ring, deal, groups.heads)


class _UncompiledCore(AttentionCore):
    """Attention that no graph contains: its blocks follow from the documents of each batch."""

    def exclude_from_graphs(self) -> None:
        """Prepare for torch.compile."""
        core: Any = self
        core.forward = MethodType(_outside_graph(type(self).forward), self)


@cache
def _outside_graph(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return one function for all cores of a class, so that layers stay identical. Created at the first call: it
    imports the compiler.
    """
    disable_compile: Any = torch.compiler.disable
    uncompiled: Callable[..., torch.Tensor] = disable_compile(forward)
    return uncompiled


def exclude_attention_from_graphs(model: nn.Module) -> None:
    """Keep what `install_context_attention` has installed out of the graphs of torch.compile."""
    for module in model.modules():
        if isinstance(module, _UncompiledCore):
            module.exclude_from_graphs()


class AllGatherAttentionCore(_UncompiledCore):
    """Attention of a rank's tokens to full rows, gathered over a group or already on this rank."""

    def __init__(
        self,
        deal: SequenceSharding,
        group: dist.ProcessGroup | None,
        template: AttentionCore,
        *,
        varlen: bool = False,
    ) -> None:
        super().__init__(causal=template.causal, scale=template.scale, window=template.window)
        self._deal = deal
        self._group = group
        self._varlen = varlen
        self._blocks = _BlockCache()

    def prepare(self, token_metadata: TokenMetadata, device: torch.device) -> None:
        """See `AttentionCore.prepare`."""
        documents = token_metadata.row_documents
        length = token_metadata.row_length or (None if documents is None else documents.shape[1])
        if length is None:
            return
        slices = self._deal.slices(length)
        if self._group is not None:
            AllGatherPlan(self._group, slices, (), 1.0).prepare(device)
        elif documents is None and not self.window_in(length):
            return
        own = slices[self._group.rank() if self._group else 0]
        self._blocks.of(self, length, own, [(range(length),)], documents)
        if self._varlen and documents is not None:
            self._blocks.calls(device)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, token_metadata: TokenMetadata
    ) -> torch.Tensor:
        """See `AttentionCore.forward`."""
        length = token_metadata.row_length or key.shape[1]
        if self._group is None and token_metadata.row_documents is None and not self.window_in(length):
            return super().forward(query, key, value, token_metadata)
        slices = self._deal.slices(length)
        own = slices[self._group.rank() if self._group else 0]
        _check(query, own)
        scale = self.scale or query.shape[-1] ** -0.5
        (blocks,) = self._blocks.of(self, length, own, [(range(length),)], token_metadata.row_documents)
        if self._varlen and token_metadata.row_documents is not None:
            (calls,) = self._blocks.calls(query.device)
            if self._group is None and len(calls) == 1:
                return varlen_attention(query, key, value, calls[0], scale)
            plan = AllGatherPlan(self._group, slices, calls, scale, VARLEN_KERNELS)
            return gathered_attention(query, key, value, plan)
        plan = AllGatherPlan(self._group, slices, blocks, scale)
        attended = gathered_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), plan)
        return attended.transpose(1, 2)


class RingAttentionCore(_UncompiledCore):
    """Attention of a rank's tokens to keys and values that are passed around a group."""

    def __init__(
        self, deal: SequenceSharding, group: dist.ProcessGroup, template: AttentionCore, *, varlen: bool = False
    ) -> None:
        super().__init__(causal=template.causal, scale=template.scale, window=template.window)
        self._deal = deal
        self._group = group
        self._varlen = varlen
        self._blocks = _BlockCache()

    def prepare(self, token_metadata: TokenMetadata, device: torch.device) -> None:
        """See `AttentionCore.prepare`."""
        if token_metadata.row_length is None:
            return
        length, documents = token_metadata.row_length, token_metadata.row_documents
        slices = self._deal.ring(length)
        self._blocks.of(self, length, slices[self._group.rank()], slices, documents)
        if self._varlen and documents is not None:
            self._blocks.calls(device)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, token_metadata: TokenMetadata
    ) -> torch.Tensor:
        """See `AttentionCore.forward`."""
        length = _row_length(token_metadata)
        slices = self._deal.ring(length)
        own = slices[self._group.rank()]
        _check(query, own)
        lengths, scale = [size(part) for part in slices], self.scale or query.shape[-1] ** -0.5
        blocks = self._blocks.of(self, length, own, slices, token_metadata.row_documents)
        if self._varlen and token_metadata.row_documents is not None:
            calls = self._blocks.calls(query.device)
            return ring_attention(query, key, value, RingPlan(self._group, calls, lengths, scale, VARLEN_KERNELS))
        ring = RingPlan(self._group, blocks, lengths, scale)
        attended = ring_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), ring)
        return attended.transpose(1, 2)

    @property
    def place(self) -> int:
        """This rank's index in the ring."""
        return self._group.rank()


class UlyssesAttentionCore(_UncompiledCore):
    """Wraps another core: it computes the tokens of the entire group for a share of the heads."""

    def __init__(self, inner: AttentionCore, deal: SequenceSharding, group: dist.ProcessGroup) -> None:
        super().__init__(causal=inner.causal, scale=inner.scale, window=inner.window)
        self.inner = inner
        self._deal = deal
        self._group = group

    def prepare(self, token_metadata: TokenMetadata, device: torch.device) -> None:
        """See `AttentionCore.prepare`."""
        self.inner.prepare(token_metadata, device)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, token_metadata: TokenMetadata
    ) -> torch.Tensor:
        """See `AttentionCore.forward`."""
        slices = self._deal.slices(_row_length(token_metadata))
        ranks = self._group.size()
        first = self._first(len(slices), ranks)
        lengths = [size(part) for part in slices[first : first + ranks]]
        _check(query, slices[first + self._group.rank()])
        exchanged = exchange_heads(query, key, value, self._group, lengths)
        return return_tokens(self.inner(*exchanged, token_metadata), self._group, lengths)

    def _first(self, ranks: int, own: int) -> int:
        """Return the index in the context group of the first rank that heads are exchanged with."""
        if ranks == own:
            return 0
        assert isinstance(self.inner, RingAttentionCore)
        return self.inner.place * own


def _row_length(token_metadata: TokenMetadata) -> int:
    if token_metadata.row_length is None:
        raise ValueError("the batch is not sliced over the context group: call `context_slice` first")
    return token_metadata.row_length


def _check(query: torch.Tensor, own: TokenSlice) -> None:
    if query.shape[1] != size(own):
        raise ValueError(f"attention got {query.shape[1]} tokens of a row, but this rank's slice has {size(own)}")


class _BlockCache:
    """Caches the blocks of the last micro-batch: every layer needs the same."""

    def __init__(self) -> None:
        self._key: tuple[TokenSlice, Sequence[TokenSlice]] = ((), ())
        self._documents: torch.Tensor | None = None
        self._blocks: list[list[AttentionBlock]] = []
        self._calls: list[list[VarlenCall]] = []

    def of(
        self,
        core: AttentionCore,
        length: int,
        own: TokenSlice,
        others: Sequence[TokenSlice],
        row_documents: torch.Tensor | None,
    ) -> list[list[AttentionBlock]]:
        """Return the blocks of this rank's queries against each of `others`, in rows of `length` tokens."""
        key = (own, tuple(others))
        if key != self._key or row_documents is not self._documents or not self._blocks:
            documents = None if row_documents is None else row_documents.numpy()
            window = core.window_in(length)
            self._blocks = [
                blocks_of(own, part, causal=core.causal, documents=documents, window=window) for part in others
            ]
            self._key, self._documents, self._calls = key, row_documents, []
        return self._blocks

    def calls(self, device: torch.device) -> list[list[VarlenCall]]:
        """Return the calls of a varlen kernel that compute what `of` returned last, on a device."""
        if not self._calls:
            own, others = self._key
            self._calls = [
                [VarlenCall.of(part, device) for part in varlen_blocks(blocks, size(own), size(other))]
                for blocks, other in zip(self._blocks, others, strict=True)
            ]
        return self._calls
