"""Parameters and floating-point operations of an `Architecture`, exactly, by part.

A multiply-add counts as two operations. Counts are per token and for one layer, so that stages, micro-batches and
shards are products of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.api.mixture import Balancing
from meshwright.models.architecture import Architecture


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """Parameters of one decoder layer, by how parallelism divides them."""

    attention: int
    """Matrices (and their biases) of attention, split by tensor parallelism."""
    latent: int
    """Down-projections of latent attention: whole on every tensor-parallel rank."""
    dense: int
    """Feed-forward layer, or a mixture's shared experts: split by tensor parallelism."""
    router: int
    """Whole on every rank."""
    experts: int
    """All routed experts: split by expert parallelism."""
    active_experts: int
    """Of `experts`, what one token uses."""
    norms: int
    """Norms and unsplit biases: whole on every rank."""

    @property
    def total(self) -> int:
        """Parameters stored."""
        return self.attention + self.latent + self.dense + self.router + self.experts + self.norms

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.total - self.experts + self.active_experts

    @property
    def matrices(self) -> int:
        """Parameters that one token multiplies with."""
        return self.active - self.norms


@lru_cache(maxsize=1024)
def layer_counts(model: Architecture, mixture: bool) -> LayerCounts:
    """Counts of one layer, with a mixture of experts or a dense feed-forward layer."""
    split, whole, latent_norms = _attention(model)
    norms = 2 * model.hidden_size * (2 if model.biases else 1) + latent_norms
    if model.biases:
        norms += 2 * model.hidden_size  # the biases behind attention's and the feed-forward layer's row-split products
    if model.query_key_norms:
        norms += 2 * model.head_size
    moe = model.mixture
    if not mixture or moe is None:
        return LayerCounts(split, whole, _feed_forward(model, model.intermediate_size), 0, 0, 0, norms)
    one = _feed_forward(model, moe.intermediate_size)
    return LayerCounts(
        attention=split,
        latent=whole,
        dense=_feed_forward(model, moe.shared_intermediate_size),
        router=(model.hidden_size + (moe.balancing is Balancing.BIAS)) * moe.experts
        + (model.hidden_size if model.shared_gate else 0),
        experts=moe.experts * one,
        active_experts=moe.per_token * one,
        norms=norms,
    )


def _attention(model: Architecture) -> tuple[int, int, int]:
    """(split by tensor parallelism, whole, norms of latent attention)."""
    hidden, heads, latent = model.hidden_size, model.heads, model.latent
    output = heads * model.value_size * hidden
    if latent is None:
        widths = (heads + model.kv_heads) * model.head_size + model.kv_heads * model.value_size
        biases = widths if model.biases or model.attention_biases else 0
        return hidden * widths + biases + output, 0, 0
    keyed = model.head_size + latent.rope_size
    queries = (latent.query_rank or hidden) * heads * keyed
    up = latent.kv_rank * heads * (model.head_size + model.value_size)
    down = hidden * (latent.query_rank + latent.kv_rank + latent.rope_size)
    return queries + up + output, down, latent.query_rank + latent.kv_rank


def _feed_forward(model: Architecture, width: int) -> int:
    columns = (2 if model.gated else 1) * width
    return columns * model.hidden_size + width * model.hidden_size + (columns if model.biases else 0)


def embedding_parameters(model: Architecture) -> int:
    """Rows of the token embedding (and of learned positions) times the width."""
    return (model.vocab_size + model.positions) * model.hidden_size


def output_parameters(model: Architecture) -> int:
    """The output projection, also where it is the embedding's table."""
    return model.vocab_size * model.hidden_size


def prediction_parameters(model: Architecture) -> int:
    """One multi-token prediction module: a projection of two inputs, a layer and three norms."""
    return 2 * model.hidden_size**2 + layer_counts(model, model.mixture is not None).total + 3 * model.hidden_size


def parameters(model: Architecture, *, active: bool = False) -> int:
    """Parameters of the whole model, multi-token prediction not counted; with `active` those that one token uses."""
    mixtures = model.count_mixtures(0, model.layers)
    dense, mixed = layer_counts(model, False), layer_counts(model, True)
    layers = (
        (model.layers - mixtures) * dense.active + mixtures * mixed.active
        if active
        else (model.layers - mixtures) * dense.total + mixtures * mixed.total
    )
    tables = embedding_parameters(model) + (0 if model.tie_embeddings else output_parameters(model))
    return tables + layers + model.hidden_size * (2 if model.biases else 1)


def attended_keys(model: Architecture, sequence_length: int, *, causal: bool) -> float:
    """Keys that a query attends to, on average over the sequence."""
    window = model.sliding_window
    if not window or window >= sequence_length:
        return (sequence_length + 1) / 2 if causal else float(sequence_length)
    return window - window * (window - 1) / (2 * sequence_length) if causal else float(window)


def attention_flops(model: Architecture, sequence_length: int, *, causal: bool = False) -> float:
    """FLOPs of one token's scores and weighted sum in one layer, forward."""
    keyed = model.head_size + (model.latent.rope_size if model.latent else 0)
    return 2.0 * model.heads * (keyed + model.value_size) * attended_keys(model, sequence_length, causal=causal)


def layer_flops(model: Architecture, mixture: bool, sequence_length: int, *, causal: bool = False) -> float:
    """FLOPs of one token in one layer, forward."""
    return 2.0 * layer_counts(model, mixture).matrices + attention_flops(model, sequence_length, causal=causal)


@lru_cache(maxsize=4096)
def forward_flops(model: Architecture, sequence_length: int, *, causal: bool = False) -> float:
    """FLOPs of one token through the whole model, forward: layers and logits; the embedding is a look-up."""
    mixtures = model.count_mixtures(0, model.layers)
    dense = layer_flops(model, False, sequence_length, causal=causal)
    mixed = layer_flops(model, True, sequence_length, causal=causal)
    extra = model.prediction_layers * (mixed + 4.0 * model.hidden_size**2 + 2.0 * output_parameters(model))
    return (model.layers - mixtures) * dense + mixtures * mixed + 2.0 * output_parameters(model) + extra


def training_flops(
    model: Architecture, sequence_length: int, *, causal: bool = False, recomputed: float = 0.0
) -> float:
    """FLOPs of one token's training: backward is twice forward; `recomputed` is the part of forward that runs again.

    With `causal=False` and nothing recomputed these are the model FLOPs that utilisation (MFU) is measured against
    (PaLM, arXiv 2204.02311, appendix B).
    """
    return (3.0 + recomputed) * forward_flops(model, sequence_length, causal=causal)
