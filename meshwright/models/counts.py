"""Parameters of an `Architecture` by how parallelism divides them, and its floating-point operations.

A multiply-add counts as two operations. Counts are per token and for one layer, so that stages, micro-batches and
shards are products of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.api.lora import LoraSpec
from meshwright.models.architecture import Architecture
from meshwright.models.lora import adapter_parameters
from meshwright.models.mixture import router_parameters


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """Parameters of one decoder layer, by how parallelism divides them."""

    attention: int
    """Matrices (and their biases) of attention, split by tensor parallelism."""
    latent: int
    """Down-projections of latent attention: full on every tensor-parallel rank."""
    dense: int
    """Feed-forward layer, or a mixture's shared experts: split by tensor parallelism."""
    router: int
    """Full on every rank."""
    experts: int
    """All routed experts: split by expert parallelism."""
    active_experts: int
    """The part of `experts` that one token uses."""
    norms: int
    """Norms and unsplit biases: full on every rank."""

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
        """Parameters of the matrices that one token is multiplied with."""
        return self.active - self.norms


@lru_cache(maxsize=1024)
def layer_counts(model: Architecture, mixture: bool) -> LayerCounts:
    """Counts of one layer, with a mixture of experts or a dense feed-forward layer."""
    attention, latent, norms = model.attention_parameters, model.latent_parameters, model.layer_norm_parameters
    moe = model.mixture
    if not mixture or moe is None:
        return LayerCounts(attention, latent, model.feed_forward_parameters, 0, 0, 0, norms)
    one = model.feed_forward_parameters_of(moe.intermediate_size)
    return LayerCounts(
        attention=attention,
        latent=latent,
        dense=model.feed_forward_parameters_of(moe.shared_intermediate_size),
        router=router_parameters(moe, model.hidden_size) + (model.hidden_size if model.shared_gate else 0),
        experts=moe.experts * one,
        active_experts=moe.per_token * one,
        norms=norms,
    )


def embedding_parameters(model: Architecture) -> int:
    """Rows of the token embedding (and of learned positions) times the width."""
    return (model.vocab_size + model.positions) * model.hidden_size


def output_parameters(model: Architecture) -> int:
    """Parameters of the output projection, also if it is the embedding's table."""
    return model.vocab_size * model.hidden_size


def prediction_parameters(model: Architecture) -> int:
    """Parameters of one multi-token prediction module: a projection of two inputs, a layer and three norms."""
    return 2 * model.hidden_size**2 + layer_counts(model, model.mixture is not None).total + 3 * model.hidden_size


def attended_keys(model: Architecture, sequence_length: int, *, causal: bool, layer: int | None = None) -> float:
    """Mean number of keys that a query of the sequence attends to, in one layer, or over all if `layer` is None."""
    window, full = model.sliding_window, (sequence_length + 1) / 2 if causal else float(sequence_length)
    if not window or window >= sequence_length:
        return full
    if layer is not None and not model.window_of(layer):
        return full
    recent = window - window * (window - 1) / (2 * sequence_length) if causal else float(window)
    return recent if layer is not None else recent + (full - recent) * model.full_attention_layers / model.layers


def attention_flops(
    model: Architecture, sequence_length: int, *, causal: bool = False, layer: int | None = None
) -> float:
    """FLOPs of one token's scores and weighted sum in one layer, forward: the mean of all if `layer` is None."""
    keyed = model.head_size + (model.latent.rope_size if model.latent else 0)
    keys = attended_keys(model, sequence_length, causal=causal, layer=layer)
    return 2.0 * model.heads * (keyed + model.value_size) * keys


def layer_flops(model: Architecture, mixture: bool, sequence_length: int, *, causal: bool = False) -> float:
    """FLOPs of one token in one layer, forward."""
    return 2.0 * layer_counts(model, mixture).matrices + attention_flops(model, sequence_length, causal=causal)


@lru_cache(maxsize=4096)
def forward_flops(model: Architecture, sequence_length: int, *, causal: bool = False) -> float:
    """FLOPs of one token through the entire model, forward: layers and logits.

    The embedding is a look-up without FLOPs.
    """
    mixtures = model.count_mixtures(0, model.layers)
    dense = layer_flops(model, False, sequence_length, causal=causal)
    mixed = layer_flops(model, True, sequence_length, causal=causal)
    extra = model.prediction_layers * (mixed + 4.0 * model.hidden_size**2 + 2.0 * output_parameters(model))
    return (model.layers - mixtures) * dense + mixtures * mixed + 2.0 * output_parameters(model) + extra


def training_flops(
    model: Architecture,
    sequence_length: int,
    *,
    causal: bool = False,
    recomputed: float = 0.0,
    lora: LoraSpec | None = None,
) -> float:
    """FLOPs of one token's training. Backward is twice forward, and the fraction `recomputed` of forward runs again.

    With `causal=False` and no recomputation these are the model FLOPs of the utilization (MFU): 6·N + 12·L·d·s (PaLM,
    arXiv 2204.02311, appendix B). N is the number of parameters of the matrices that one token is multiplied with, d is
    the width of all heads, and attention counts the full sequence, as is the convention.

    With adapters the gradients of frozen matrices, 2·N, are not computed, and each parameter of an adapter adds 6.
    """
    whole = (3.0 + recomputed) * forward_flops(model, sequence_length, causal=causal)
    if lora is None:
        return whole
    return whole - 2.0 * _multiplied_parameters(model) + (6.0 + 2.0 * recomputed) * adapter_parameters(lora, model)


def recomputed_layers_flops(model: Architecture, sequence_length: int, lora: LoraSpec | None = None) -> float:
    """FLOPs of one token's second forward pass through every layer, which full activation checkpointing adds."""
    return forward_pass_flops(model, sequence_length, lora) - 2.0 * output_parameters(model)


def forward_pass_flops(model: Architecture, sequence_length: int, lora: LoraSpec | None = None) -> float:
    """`forward_flops` with the adapters, which rematerialization adds."""
    adapters = 0 if lora is None else adapter_parameters(lora, model)
    return forward_flops(model, sequence_length) + 2.0 * adapters


def _multiplied_parameters(model: Architecture) -> int:
    """N: the number of parameters of the matrices that one token is multiplied with."""
    mixtures = model.count_mixtures(0, model.layers)
    dense, mixed = layer_counts(model, False).matrices, layer_counts(model, True).matrices
    return (model.layers - mixtures) * dense + mixtures * mixed + output_parameters(model)
