"""Maps each parameter of the runtime to rows of a published tensor.

The runtime rotates the two halves of a head, as published Llama, Mistral and Qwen weights require. DeepSeek's weights
rotate neighboring elements, so the rows of their rotary parts are reordered. GPT-2 stores matrices transposed, and
queries, keys and values as one, as Phi-3 does, which also stores the two matrices of SwiGLU as one. Gemma's norms are
stored as differences from 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from meshwright.api.mixture import Balancing
from meshwright.models.architecture import Architecture
from meshwright.models.huggingface.gpt2 import GPT2
from meshwright.models.huggingface.model_type import ExpertTensors, ModelType
from meshwright.models.huggingface.registry import model_type_of
from meshwright.models.mixture import is_mixture
from meshwright_worker.dtypes import upcast

_DENSE = {f"feed_forward.{name}.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


@dataclass(frozen=True)
class TensorSource:
    """A parameter as rows of a published tensor."""

    tensor: str
    """Name, without the prefix that some files use."""
    transposed: bool = False
    """Whether the file stores [inputs, outputs]."""
    first: int = 0
    """First row of the parameter, after the transposition."""
    parts: int = 1
    """Number of parameters in the published tensor, one after the other."""
    total: int | None = None
    """Rows of all of them together; None if they all have the same shape."""
    offset: float = 0.0
    """How much less the published numbers are than the parameter's."""
    order: torch.Tensor | None = None
    """int64 [rows]: which row of the published tensor each row is; None for `first`, `first + 1`, ..."""

    def rows(self, published: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop - 1` of the parameter."""
        view = published.T if self.transposed and published.ndim == 2 else published
        rows = view[self.first + start : self.first + stop] if self.order is None else view[self.order[start:stop]]
        return upcast(rows) + self.offset if self.offset else rows

    def published_rows(self, rows: int) -> int:
        """Return the rows of the published tensor, after the transposition, if the parameter has `rows`."""
        return rows * self.parts if self.total is None else self.total

    def write_into(self, parameter: torch.Tensor, published: torch.Tensor) -> None:
        """Write the full parameter into its rows: the reverse of reading it."""
        view = published.T if self.transposed and published.ndim == 2 else published
        parameter = (parameter - self.offset if self.offset else parameter).to(published.dtype)
        if self.order is None:
            view[self.first : self.first + len(parameter)] = parameter
        else:
            view[self.order] = parameter


@dataclass(frozen=True)
class StackedSource:
    """A parameter with one row per expert, each of which is a separate published tensor."""

    parts: tuple[TensorSource, ...]


def parameter_sources(
    model: Architecture, model_type: ModelType | None = None
) -> dict[str, TensorSource | StackedSource]:
    """Return the source of every parameter of the model, and of the routers' biases, by the runtime's name.

    Args:
        model: the architecture.
        model_type: what the model is published as; None for `model_type_of`.
    """
    model_type = model_type or model_type_of(model)
    return dict(_gpt2(model) if model_type is GPT2 else _llama(model, model_type))


def published_tensors(model: Architecture, model_type: ModelType | None = None) -> set[str]:
    """Return the names of all published tensors that the model is read from, without a prefix."""
    sources = parameter_sources(model, model_type).values()
    return {one.tensor for each in sources for one in (each.parts if isinstance(each, StackedSource) else (each,))}


def _llama(model: Architecture, model_type: ModelType) -> Iterator[tuple[str, TensorSource | StackedSource]]:
    yield "embedding.weight", TensorSource("embed_tokens.weight")
    yield "norm.weight", TensorSource("norm.weight", offset=model_type.norm_offset)
    if not model.tie_embeddings:
        yield "output.weight", TensorSource("lm_head.weight")
    for layer in range(model.layers):
        attention = _latent_attention(model)
        if model.latent is None:
            attention = _fused_attention(model) if model_type.fused else _plain_attention(model, model_type.norm_offset)
        for ours, theirs in model_type.norms.items():
            source = TensorSource(f"layers.{layer}.{theirs}.weight", offset=model_type.norm_offset)
            yield f"layers.{layer}.{ours}.weight", source
        yield f"layers.{layer}.attention.output.weight", TensorSource(f"layers.{layer}.self_attn.o_proj.weight")
        for ours, source in attention:
            yield (
                f"layers.{layer}.attention.{ours}",
                replace(source, tensor=f"layers.{layer}.self_attn.{source.tensor}"),
            )
        if is_mixture(model.mixture, layer):
            yield from _mixture(model, f"layers.{layer}", model_type.experts)
        elif model_type.fused:
            yield from _fused_feed_forward(model, f"layers.{layer}")
        else:
            for ours, theirs in _DENSE.items():
                yield f"layers.{layer}.{ours}", TensorSource(f"layers.{layer}.{theirs}")


def _fused_feed_forward(model: Architecture, layer: str) -> Iterator[tuple[str, TensorSource]]:
    for number, name in enumerate(("gate", "up")):
        first = number * model.intermediate_size
        source = TensorSource(f"{layer}.mlp.gate_up_proj.weight", first=first, parts=2)
        yield f"{layer}.feed_forward.{name}.weight", source
    yield f"{layer}.feed_forward.down.weight", TensorSource(f"{layer}.mlp.down_proj.weight")


def _mixture(
    model: Architecture, layer: str, names: ExpertTensors
) -> Iterator[tuple[str, TensorSource | StackedSource]]:
    mixture = model.mixture
    if mixture is None:
        return
    ours, theirs = f"{layer}.feed_forward", f"{layer}.{names.block}"
    yield f"{ours}.router.weight", TensorSource(f"{theirs}.gate.weight")
    if mixture.balancing is Balancing.BIAS:
        yield f"{ours}.router.bias", TensorSource(f"{theirs}.gate.e_score_correction_bias")
    for name, matrix in (("gate", names.gate), ("up", names.up), ("down", names.down)):
        if mixture.shared_intermediate_size:
            yield f"{ours}.shared.{name}.weight", TensorSource(f"{theirs}.shared_experts.{matrix}.weight")
        parts = (TensorSource(f"{theirs}.experts.{expert}.{matrix}.weight") for expert in range(mixture.experts))
        yield f"{ours}.experts.{name}", StackedSource(tuple(parts))


def _plain_attention(model: Architecture, norm_offset: float) -> Iterator[tuple[str, TensorSource]]:
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        yield f"{ours}.weight", TensorSource(f"{theirs}.weight")
        if model.attention_biases:
            yield f"{ours}.bias", TensorSource(f"{theirs}.bias")
    if model.query_key_norms:
        yield "query_norm.weight", TensorSource("q_norm.weight", offset=norm_offset)
        yield "key_norm.weight", TensorSource("k_norm.weight", offset=norm_offset)


def _fused_attention(model: Architecture) -> Iterator[tuple[str, TensorSource]]:
    sizes = {
        "query": model.heads * model.head_size,
        "key": model.kv_heads * model.head_size,
        "value": model.kv_heads * model.value_size,
    }
    first, total = 0, sum(sizes.values())
    for name, size in sizes.items():
        yield f"{name}.weight", TensorSource("qkv_proj.weight", first=first, parts=len(sizes), total=total)
        first += size


def _latent_attention(model: Architecture) -> Iterator[tuple[str, TensorSource]]:
    latent = model.latent
    if latent is None:
        return
    turned = torch.cat((torch.arange(0, latent.rope_size, 2), torch.arange(1, latent.rope_size, 2)))
    head = torch.cat((torch.arange(model.head_size), model.head_size + turned))
    heads = (torch.arange(model.heads).unsqueeze(1) * model.key_size + head).flatten()
    if latent.query_rank:
        yield "query_down.weight", TensorSource("q_a_proj.weight")
        yield "query_norm.weight", TensorSource("q_a_layernorm.weight")
    yield "query.weight", TensorSource("q_b_proj.weight" if latent.query_rank else "q_proj.weight", order=heads)
    down = torch.cat((torch.arange(latent.kv_rank), latent.kv_rank + turned))
    yield "kv_down.weight", TensorSource("kv_a_proj_with_mqa.weight", order=down)
    yield "kv_norm.weight", TensorSource("kv_a_layernorm.weight")
    yield "kv.weight", TensorSource("kv_b_proj.weight")


def _gpt2(model: Architecture) -> Iterator[tuple[str, TensorSource]]:
    yield "embedding.weight", TensorSource("wte.weight")
    yield "positions.weight", TensorSource("wpe.weight")
    if not model.tie_embeddings:
        yield "output.weight", TensorSource("lm_head.weight")
    hidden = model.hidden_size
    for part in ("weight", "bias"):
        yield f"norm.{part}", TensorSource(f"ln_f.{part}")
        for layer in range(model.layers):
            ours, theirs = f"layers.{layer}", f"h.{layer}"
            yield f"{ours}.attention_norm.{part}", TensorSource(f"{theirs}.ln_1.{part}")
            yield f"{ours}.feed_forward_norm.{part}", TensorSource(f"{theirs}.ln_2.{part}")
            for number, name in enumerate(("query", "key", "value")):
                yield (
                    f"{ours}.attention.{name}.{part}",
                    TensorSource(f"{theirs}.attn.c_attn.{part}", transposed=True, first=number * hidden, parts=3),
                )
            yield f"{ours}.attention.output.{part}", TensorSource(f"{theirs}.attn.c_proj.{part}", transposed=True)
            yield f"{ours}.feed_forward.up.{part}", TensorSource(f"{theirs}.mlp.c_fc.{part}", transposed=True)
            yield f"{ours}.feed_forward.down.{part}", TensorSource(f"{theirs}.mlp.c_proj.{part}", transposed=True)
