"""Floating-point operations of training.

A multiply-add counts as two. Model FLOPs are what MFU is measured against; recomputation, which counts in hardware
FLOPs and HFU alone, stands for itself.
"""

from __future__ import annotations

from meshwright.models.architecture import Architecture


def flops_per_token(architecture: Architecture, sequence_length: int) -> int:
    """FLOPs of forward and backward for one token: 6·N + 12·L·d·s (PaLM, arXiv 2204.02311, appendix B).

    N counts every parameter that multiplies activations: all but the embeddings of tokens and positions, which are
    look-ups (a tied one multiplies as the output projection), and the experts that a token is not sent to. d is the
    width of all heads. The attention term takes the full sequence, not the causal half, as is the custom, so that
    utilisation compares with published numbers.
    """
    lookup = 0 if architecture.tie_embeddings else architecture.vocab_size * architecture.hidden_size
    matrices = architecture.active_parameters - lookup - architecture.positions * architecture.hidden_size
    widths = architecture.heads * (architecture.key_size + architecture.value_size)
    return 6 * matrices + 6 * architecture.layers * widths * sequence_length


def recomputed_flops_per_token(architecture: Architecture, sequence_length: int) -> int:
    """FLOPs of one token's second forward pass through every layer: what full activation checkpointing adds."""
    output = 6 * architecture.vocab_size * architecture.hidden_size
    return (flops_per_token(architecture, sequence_length) - output) // 3
