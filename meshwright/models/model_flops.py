"""Floating-point operations of training.

A multiply-add counts as two. Model FLOPs are what MFU is measured against; recomputation, which counts in hardware
FLOPs and HFU alone, stands for itself.
"""

from __future__ import annotations

from meshwright.api.lora import LoraSpec
from meshwright.models.architecture import Architecture
from meshwright.models.lora import adapter_parameters


def trained_flops_per_token(architecture: Architecture, sequence_length: int, lora: LoraSpec | None) -> int:
    """`flops_per_token` of what a run really computes: with adapters, 4·N + 6·A + 12·L·d·s.

    The gradients of frozen weights, a third of what they cost, are not computed; those of their inputs are. A are the
    parameters of the adapters.
    """
    whole = flops_per_token(architecture, sequence_length)
    if lora is None:
        return whole
    return whole - 2 * _matrices(architecture) + 6 * adapter_parameters(lora, architecture)


def forward_flops_per_token(architecture: Architecture, sequence_length: int, lora: LoraSpec | None) -> int:
    """FLOPs of one token's forward pass through the whole model: what re-materialisation adds."""
    adapters = 0 if lora is None else adapter_parameters(lora, architecture)
    return flops_per_token(architecture, sequence_length) // 3 + 2 * adapters


def flops_per_token(architecture: Architecture, sequence_length: int) -> int:
    """FLOPs of forward and backward for one token: 6·N + 12·L·d·s (PaLM, arXiv 2204.02311, appendix B).

    N counts every parameter that multiplies activations: all but the embeddings of tokens and positions, which are
    look-ups (a tied one multiplies as the output projection), and the experts that a token is not sent to. d is the
    width of all heads. The attention term takes the full sequence, not the causal half, as is the custom, so that
    utilisation compares with published numbers.
    """
    widths = architecture.heads * (architecture.key_size + architecture.value_size)
    return 6 * _matrices(architecture) + 6 * architecture.layers * widths * sequence_length


def recomputed_flops_per_token(architecture: Architecture, sequence_length: int, lora: LoraSpec | None = None) -> int:
    """FLOPs of one token's second forward pass through every layer: what full activation checkpointing adds."""
    output = 2 * architecture.vocab_size * architecture.hidden_size
    return forward_flops_per_token(architecture, sequence_length, lora) - output


def _matrices(architecture: Architecture) -> int:
    """N: the parameters that multiply activations."""
    lookup = 0 if architecture.tie_embeddings else architecture.vocab_size * architecture.hidden_size
    return architecture.active_parameters - lookup - architecture.positions * architecture.hidden_size
