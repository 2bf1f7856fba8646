"""A checkpoint's model for generation, in one process or split over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.precision import Precision
from meshwright.api.training import TrainingSpec
from meshwright.layout import Layout
from meshwright.models.architecture import Architecture
from meshwright.rules.nearest import nearest
from meshwright_worker.checkpoint.files import CheckpointPath
from meshwright_worker.checkpoint.loader import load_tensors
from meshwright_worker.checkpoint.manifest import Manifest
from meshwright_worker.checkpoint.state_dict import MODEL, model_tensors
from meshwright_worker.data.batch import TokenMetadata
from meshwright_worker.distributed.device import default_device
from meshwright_worker.distributed.mesh import PIPELINE, TENSOR, Mesh
from meshwright_worker.dtypes import compute_dtype, parameter_dtype
from meshwright_worker.models.attention import AttentionCore
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.init_weights import init_weights
from meshwright_worker.models.lora import apply_lora, is_adapter
from meshwright_worker.parallel.parallelize import build_stages
from meshwright_worker.parallel.shards import ParameterShard
from meshwright_worker.parallel.stage_shards import parameter_shards, stage_buffers
from meshwright_worker.pretrained.load import load_pretrained
from meshwright_worker.rank.failures import InvalidRunError
from meshwright_worker.rank.task import InferenceRun


class KVCacheAttention(AttentionCore):
    """Attention of new tokens to themselves and to all earlier tokens, whose keys and values it caches.

    A rank of a tensor group caches its own heads, a stage of a pipeline its own layers.
    """

    def __init__(self, capacity: int, *, scale: float | None = None, window: int = 0) -> None:
        super().__init__(scale=scale, window=window)
        self._capacity = capacity
        self._length = 0
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def clear(self) -> None:
        """Drop all tokens; keeps the memory."""
        self._length = 0

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, token_metadata: TokenMetadata
    ) -> torch.Tensor:
        """See `AttentionCore.forward`; the tokens follow those of the last call.

        Raises:
            ValueError: more tokens than the cache can store, or several documents in a row.
        """
        if token_metadata.documents is not None:
            raise ValueError("generation takes one document a row")
        cached_length, length = self._length, self._length + query.shape[1]
        if length > self._capacity:
            raise ValueError(f"{length} tokens do not fit a cache of {self._capacity}")
        keys, values = self._cache_tensors(key, value)
        keys[:, cached_length:length], values[:, cached_length:length] = key, value
        self._length = length
        mask = torch.ones(length - cached_length, length, dtype=torch.bool, device=query.device).tril(cached_length)
        if window := self.window_in(length):
            mask = mask.triu(cached_length + 1 - window)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys[:, :length].transpose(1, 2),
            values[:, :length].transpose(1, 2),
            attn_mask=mask,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return attended.transpose(1, 2)

    def _cache_tensors(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = key.shape[0]
        if self._keys is None or self._values is None or self._keys.shape[0] != rows:
            self._keys = key.new_empty(rows, self._capacity, *key.shape[2:])
            self._values = value.new_empty(rows, self._capacity, *value.shape[2:])
        return self._keys, self._values


def install_kv_caches(stage: nn.Module, capacity: int) -> list[KVCacheAttention]:
    """Make every attention of a stage cache up to `capacity` tokens; return the empty caches."""
    caches = []
    for module in list(stage.modules()):
        core = getattr(module, "core", None)
        if isinstance(core, AttentionCore):
            cache = KVCacheAttention(capacity, scale=core.scale, window=core.window)
            module.core = cache
            caches.append(cache)
    return caches


class CachedModel:
    """A model with a cache of the tokens so far. On a mesh every call is collective.

    Args:
        stage: this rank's part of the model.
        model: the architecture.
        capacity: maximum number of cached tokens.
        mesh: None in one process.
    """

    def __init__(self, stage: DecoderStage, model: Architecture, capacity: int, mesh: Mesh | None = None) -> None:
        self.capacity = capacity
        self._stage = stage.eval()
        self._model = model
        self._mesh = mesh
        self._device = mesh.device if mesh is not None else next(stage.parameters()).device
        self._caches = install_kv_caches(stage, capacity)
        self._length = 0

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return self._length

    def clear(self) -> None:
        """Drop every cached token."""
        self._length = 0
        for cache in self._caches:
            cache.clear()

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each next token, fp32 [batch, length, vocabulary], on every rank.

        Args:
            tokens: int64 [batch, length], which follow those of earlier calls.

        Raises:
            ValueError: more tokens than the cache can store.
        """
        batch, length = tokens.shape
        positions = torch.arange(self._length, self._length + length, device=self._device).expand(batch, -1)
        hidden, token_metadata = self._model.hidden_size, TokenMetadata(positions=positions)
        logits = forward_stages(self._stage, tokens.to(self._device), token_metadata, hidden, self._mesh)
        self._length += length
        return self._gather_logits(logits, batch, length)

    def broadcast_token(self, token: int) -> int:
        """Return rank 0's token on every rank. Collective.

        With distributed experts, each rank computes the dense layers itself, and logits may differ in the last bits. If
        one rank then chose another token, or ended the document, the others would wait for it forever.
        """
        if self._mesh is None:
            return token
        chosen = torch.tensor([token], device=self._device)
        dist.broadcast(chosen, 0)
        return int(chosen)

    def _gather_logits(self, logits: torch.Tensor | None, batch: int, length: int) -> torch.Tensor:
        mesh = self._mesh
        if mesh is None:
            if logits is None:
                raise RuntimeError("a model of one stage returned no logits")
            return logits.float()
        ranks, vocabulary = mesh.layout.tensor, self._model.vocab_size
        whole = torch.empty(batch, length, vocabulary, device=self._device)
        if logits is not None:
            # If the vocabulary does not divide evenly, the last parts are smaller; they are padded to be gathered.
            part = logits.new_zeros(batch, length, -(-vocabulary // ranks), dtype=torch.float32)
            part[..., : logits.shape[-1]] = logits
            parts = [torch.empty_like(part) for _ in range(ranks)]
            dist.all_gather(parts, part, group=mesh.group(TENSOR))
            whole = torch.cat(parts, dim=-1)[..., :vocabulary].contiguous()
        if mesh.layout.pipeline > 1:
            group = mesh.group(PIPELINE)
            dist.broadcast(whole, dist.get_global_rank(group, mesh.layout.pipeline - 1), group=group)
        return whole


def inference_run(manifest: Manifest, layout: Layout, precision: Precision) -> InferenceRun:
    """The run that builds a checkpoint's model for generation in a layout.

    Raises:
        InvalidRunError: the layout does not fit the model.
    """
    model = _dropless(manifest.architecture)
    check_layout(layout, model)
    return InferenceRun(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        data_parallel=layout.data,
        context=layout.context,
        expert=layout.expert,
        micro_batches=layout.pipeline,
        parallelism=ParallelismSpec(sequence=False),
        architecture=model,
        training=TrainingSpec(
            steps=1,
            global_batch_size=layout.pipeline,
            sequence_length=manifest.sequence_length,
            seed=manifest.seed,
            precision=precision,
            lora=manifest.lora,
            initial_weights=manifest.initial_weights,
        ),
    )


def _dropless(model: Architecture) -> Architecture:
    """Return the model with experts that accept every token: a capacity is a share of a full sequence, which is not
    known yet.

    With a capacity, the result for a token would depend on how many tokens are processed at a time.
    """
    if model.mixture is None:
        return model
    return model.model_copy(update={"mixture": model.mixture.model_copy(update={"capacity_factor": None})})


def load_sharded_model(
    checkpoint: CheckpointPath, manifest: Manifest, run: InferenceRun, mesh: Mesh, capacity: int
) -> CachedModel:
    """Load the model split over a mesh: each rank reads only its own part. Collective.

    Raises:
        CheckpointMismatchError: the checkpoint belongs to another model.
        PretrainedError: the model that adapters belong to cannot be read.
    """
    (built,) = build_stages(run, mesh)
    shards = parameter_shards(built.module, built.distributed, run, mesh)
    _fill(shards, stage_buffers(built.module), checkpoint, manifest, mesh.checkpoint_group)
    return CachedModel(built.module, manifest.architecture, capacity, mesh)


def load_full_model(
    checkpoint: CheckpointPath,
    manifest: Manifest,
    precision: Precision,
    capacity: int,
    device: torch.device | None = None,
) -> CachedModel:
    """Load the full model in this process, on `device`; if None, on a GPU if there is one.

    Raises:
        CheckpointMismatchError: the checkpoint belongs to another model.
        PretrainedError: the model that adapters belong to cannot be read.
    """
    model = _dropless(manifest.architecture)
    with torch.device("meta"):
        stage = DecoderStage(model, compute_dtype(precision)).to(parameter_dtype(precision))
    if manifest.lora is not None:
        apply_lora(stage, manifest.lora)
    init_weights(stage, model, manifest.seed, device or default_device(), tiled=manifest.weights_in_tiles)
    shards = [ParameterShard(n, p, p.detach(), None, True, False, False) for n, p in stage.named_parameters()]
    _fill(shards, stage_buffers(stage), checkpoint, manifest, None)
    return CachedModel(stage, model, capacity)


def _fill(
    shards: list[ParameterShard],
    buffers: dict[str, torch.Tensor],
    checkpoint: CheckpointPath,
    manifest: Manifest,
    group: dist.ProcessGroup | None,
) -> None:
    stored = shards
    if manifest.lora is not None:
        stored = [shard for shard in shards if is_adapter(shard.name)]
        if manifest.initial_weights is not None:
            base_shards = [shard for shard in shards if not is_adapter(shard.name)]
            load_pretrained(base_shards, manifest.architecture, Path(manifest.initial_weights))
    buffer_tensors = {f"{MODEL}.{name}": buffer for name, buffer in buffers.items()}
    load_tensors({**model_tensors(stored), **buffer_tensors}, checkpoint, group)


@torch.no_grad()
def forward_stages(
    stage: DecoderStage, tokens: torch.Tensor, token_metadata: TokenMetadata, hidden: int, mesh: Mesh | None
) -> torch.Tensor | None:
    """Run the replica's stages, one after the other and without micro-batches, on tokens, int64 [batch, length].

    Args:
        stage: this rank's one stage, without sequence parallelism.
        tokens: the same on every rank of the replica.
        token_metadata: positions and documents of the tokens.
        hidden: the model's width.
        mesh: None in one process.

    Returns:
        Logits [batch, length, this rank's part of the vocabulary] on the ranks of the last stage; None on others.
    """
    if mesh is None or mesh.layout.pipeline == 1:
        whole: torch.Tensor = stage(tokens, token_metadata=token_metadata)
        return whole
    group, place = mesh.group(PIPELINE), mesh.coordinates.pipeline
    x = tokens
    if not stage.is_first:
        x = torch.empty(*tokens.shape, hidden, dtype=stage.compute, device=tokens.device)
        dist.recv(x, dist.get_global_rank(group, place - 1), group=group)
    result: torch.Tensor = stage(x, token_metadata=token_metadata)
    if stage.is_last:
        return result
    dist.send(result.contiguous(), dist.get_global_rank(group, place + 1), group=group)
    return None


def check_layout(layout: Layout, model: Architecture) -> None:
    """Reject a layout that does not fit, before any process group is created.

    Raises:
        InvalidRunError: lists every problem, by the options of `meshwright_worker.generate`, with values that fit.
    """
    problems = [*_tensor_problems(layout.tensor, model), *_expert_problems(layout.expert, model)]
    if layout.pipeline > model.layers:
        problems.append(f"`--pipeline {layout.pipeline}` needs a layer a stage; at most {model.layers}")
    if problems:
        raise InvalidRunError("; ".join(problems))


def _tensor_problems(tensor: int, model: Architecture) -> Iterator[str]:
    split = {"heads": model.heads, "kvHeads": model.kv_heads, "intermediateSize": model.intermediate_size}
    if model.mixture is not None:
        split["mixture.intermediateSize"] = model.mixture.intermediate_size
        split["mixture.sharedIntermediateSize"] = model.mixture.shared_intermediate_size
    fits = nearest(tensor, lambda n: not any(value % n for value in split.values()), model.heads)
    for name, value in split.items():
        if value % tensor:
            yield f"`--tensor {tensor}` must divide the model's `{name}: {value}`; nearest that fit: {fits}"


def _expert_problems(expert: int, model: Architecture) -> Iterator[str]:
    if expert == 1:
        return
    if model.mixture is None:
        yield f"`--expert {expert}` needs a model with a mixture of experts; for this one only 1 fits"
        return
    experts = model.mixture.experts
    if experts % expert:
        fits = nearest(expert, lambda n: experts % n == 0, experts)
        yield f"`--expert {expert}` must divide the model's `mixture.experts: {experts}`; nearest that fit: {fits}"
