"""Floating-point operations of training.

A multiply-add counts as two. Model FLOPs are what MFU is measured against; recomputation, which counts in hardware
FLOPs and HFU alone, stands for itself.
"""

from __future__ import annotations

from meshwright.models.architecture import Architecture


def flops_per_token(architecture: Architecture, sequence_length: int) -> int:
    """FLOPs of forward and backward for one token: 6·N + 12·L·d·s (PaLM, arXiv 2204.02311, appendix B).

    N counts every parameter that multiplies activations: all but the token embedding, which is a look-up (a tied
    one multiplies as the output projection). The attention term takes the full sequence, not the causal half, as is
    the custom, so that utilisation can be compared with published numbers.
    """
    lookup = 0 if architecture.tie_embeddings else architecture.vocab_size * architecture.hidden_size
    matrices = architecture.parameters - lookup
    return 6 * matrices + 12 * architecture.layers * architecture.hidden_size * sequence_length


def recomputed_flops_per_token(architecture: Architecture, sequence_length: int) -> int:
    """FLOPs of one token's second forward pass through every layer: what full activation checkpointing adds."""
    output = 6 * architecture.vocab_size * architecture.hidden_size
    return (flops_per_token(architecture, sequence_length) - output) // 3
