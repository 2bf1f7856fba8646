"""Maps each parameter of the runtime to rows of a published tensor.

The runtime rotates the two halves of a head, as published Llama, Mistral and Qwen weights require. DeepSeek's weights
rotate neighboring elements, so the rows of their rotary parts are reordered. GPT-2 stores matrices transposed, and
queries, keys and values as one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from meshwright.api.mixture import Balancing
from meshwright.models.architecture import Architecture
from meshwright.models.huggingface.gpt2 import GPT2
from meshwright.models.huggingface.registry import model_type_of
from meshwright.models.mixture import is_mixture

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
    """Number of parameters of this shape in the published tensor, one after the other."""
    order: torch.Tensor | None = None
    """int64 [rows]: which row of the published tensor each row is; None for `first`, `first + 1`, ..."""

    def rows(self, published: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop - 1` of the parameter."""
        view = published.T if self.transposed and published.ndim == 2 else published
        if self.order is None:
            return view[self.first + start : self.first + stop]
        return view[self.order[start:stop]]

    def write_into(self, parameter: torch.Tensor, published: torch.Tensor) -> None:
        """Write the full parameter into its rows: the reverse of reading it."""
        view = published.T if self.transposed and published.ndim == 2 else published
        if self.order is None:
            view[self.first : self.first + len(parameter)] = parameter
        else:
            view[self.order] = parameter


@dataclass(frozen=True)
class StackedSource:
    """A parameter with one row per expert, each of which is a separate published tensor."""

    parts: tuple[TensorSource, ...]


def parameter_sources(model: Architecture) -> dict[str, TensorSource | StackedSource]:
    """Return the source of every parameter of the model, and of the routers' biases, by the runtime's name."""
    return dict(_gpt2(model) if model_type_of(model) is GPT2 else _llama(model))


def published_tensors(model: Architecture) -> set[str]:
    """Return the names of all published tensors that the model is read from, without a prefix."""
    sources = parameter_sources(model).values()
    return {one.tensor for each in sources for one in (each.parts if isinstance(each, StackedSource) else (each,))}


def _llama(model: Architecture) -> Iterator[tuple[str, TensorSource | StackedSource]]:
    yield "embedding.weight", TensorSource("embed_tokens.weight")
    yield "norm.weight", TensorSource("norm.weight")
    if not model.tie_embeddings:
        yield "output.weight", TensorSource("lm_head.weight")
    names = {
        "attention_norm.weight": "input_layernorm.weight",
        "feed_forward_norm.weight": "post_attention_layernorm.weight",
        "attention.output.weight": "self_attn.o_proj.weight",
    }
    for layer in range(model.layers):
        attention = _plain_attention(model) if model.latent is None else _latent_attention(model)
        for ours, theirs in names.items():
            yield f"layers.{layer}.{ours}", TensorSource(f"layers.{layer}.{theirs}")
        for ours, source in attention:
            yield (
                f"layers.{layer}.attention.{ours}",
                TensorSource(f"layers.{layer}.self_attn.{source.tensor}", order=source.order),
            )
        if is_mixture(model.mixture, layer):
            yield from _mixture(model, f"layers.{layer}")
        else:
            for ours, theirs in _DENSE.items():
                yield f"layers.{layer}.{ours}", TensorSource(f"layers.{layer}.{theirs}")


def _mixture(model: Architecture, layer: str) -> Iterator[tuple[str, TensorSource | StackedSource]]:
    mixture = model.mixture
    if mixture is None:
        return
    names = model_type_of(model).experts
    ours, theirs = f"{layer}.feed_forward", f"{layer}.{names.block}"
    yield f"{ours}.router.weight", TensorSource(f"{theirs}.gate.weight")
    if mixture.balancing is Balancing.BIAS:
        yield f"{ours}.router.bias", TensorSource(f"{theirs}.gate.e_score_correction_bias")
    for name, matrix in (("gate", names.gate), ("up", names.up), ("down", names.down)):
        if mixture.shared_intermediate_size:
            yield f"{ours}.shared.{name}.weight", TensorSource(f"{theirs}.shared_experts.{matrix}.weight")
        parts = (TensorSource(f"{theirs}.experts.{expert}.{matrix}.weight") for expert in range(mixture.experts))
        yield f"{ours}.experts.{name}", StackedSource(tuple(parts))


def _plain_attention(model: Architecture) -> Iterator[tuple[str, TensorSource]]:
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        yield f"{ours}.weight", TensorSource(f"{theirs}.weight")
        if model.attention_biases:
            yield f"{ours}.bias", TensorSource(f"{theirs}.bias")
    if model.query_key_norms:
        yield "query_norm.weight", TensorSource("q_norm.weight")
        yield "key_norm.weight", TensorSource("k_norm.weight")


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
