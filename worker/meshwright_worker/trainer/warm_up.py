"""Uses each kernel and each communicator once before the first step of a mesh generation on GPUs.

The first launch of a kernel, and the first collective of a group, wait for everything on the device. In the first step
a rank would so wait for its peers again and again.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.models.architecture import Architecture
from meshwright.protocol.run_config import NativeRun
from meshwright.sequence_sharding import SequenceSharding
from meshwright_worker.data.batch import TokenMetadata
from meshwright_worker.distributed.mesh import Mesh, own_groups
from meshwright_worker.dtypes import compute_dtype, stored_dtype
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.parallel.context.context_parallel import ContextGroups, install_context_attention

_POSITIONS, _WIDTH = 128, 256
_DOCUMENTS = 4
"""Of the row, if the run packs documents."""
_OF_MESH = "mesh_"
"""Begins torch's description of a group of a `DeviceMesh`, before the name of the dimension."""


def warm_up(run: NativeRun, mesh: Mesh) -> None:
    """Run a small model without communication, then a small collective in every group of this rank. Collective.

    Does nothing on CPUs.
    """
    if mesh.device.type != "cuda":
        return
    warm_up_kernels(run, mesh.device)
    warm_up_groups(mesh.device)
    torch.cuda.synchronize(mesh.device)


def warm_up_kernels(run: NativeRun, device: torch.device) -> None:
    """Run forward and backward pass of one narrow layer, with the heads and number formats of the run's model."""
    model = narrow(run.architecture)
    if run.uses_sliding_window:
        model = model.model_copy(update={"sliding_window": _POSITIONS // 2})
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        stage = DecoderStage(model, compute_dtype(run.training.precision)).to(stored_dtype(run))
        for parameter in stage.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        length = min(_POSITIONS, model.positions or _POSITIONS)
        tokens = torch.randint(0, model.vocab_size, (1, length))
        token_metadata = None
        if run.packs_documents or run.uses_sliding_window:
            varlen = bool(run.training.varlen_attention)
            install_context_attention(stage, SequenceSharding(), ContextGroups(None, None), varlen=varlen)
        if run.packs_documents:
            token_metadata = _packed(length, device)
        stage(tokens, tokens, token_metadata).backward()


def _packed(length: int, device: torch.device) -> TokenMetadata:
    """Return the metadata of a row of `length` tokens with `_DOCUMENTS` documents."""
    index = torch.arange(length, device="cpu").unsqueeze(0)
    documents = index * _DOCUMENTS // length
    first = torch.searchsorted(documents, documents)
    return TokenMetadata((index - first).to(device), documents.to(device), row_documents=documents)


def narrow(model: Architecture) -> Architecture:
    """Return a model of one layer that uses the same attention, with one group of heads and a small vocabulary."""
    changes = {
        "name": "",
        "layers": 1,
        "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH,
        "heads": model.heads // model.kv_heads,
        "kv_heads": 1,
        "vocab_size": _WIDTH,
        "mixture": None,
    }
    return model.model_copy(update=changes)


def warm_up_groups(device: torch.device) -> None:
    """Create the communicator of every group that steps use, on the backend of the device. Collective.

    All ranks have their common groups in the same order, so that no two of them wait for each other.
    """
    for group in groups_of_steps():
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def groups_of_steps() -> list[dist.ProcessGroup]:
    """Return the groups of several ranks on the backend of the device that steps use.

    A communicator takes memory of the device. Every mesh has a group for each of its dimensions. If another mesh before
    has a dimension of the same name with the same ranks, its group is used, and the second one is not.
    """
    backend, seen, found = dist.get_backend(), set(), []
    for group in own_groups():
        ranks = tuple(dist.get_process_group_ranks(group))
        key = (group.group_desc, ranks)
        if dist.get_backend(group) != backend or len(ranks) == 1 or key in seen:
            continue
        if group.group_desc.startswith(_OF_MESH):
            seen.add(key)
        found.append(group)
    return found
