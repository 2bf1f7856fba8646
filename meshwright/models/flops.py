"""Floating-point operations of training.

A multiply-add counts as two. Recomputation is not counted: these are model FLOPs, what MFU is measured against.
"""

from __future__ import annotations

from meshwright.models.architecture import Architecture


def flops_per_token(architecture: Architecture, sequence_length: int) -> int:
    """FLOPs of forward and backward for one token: 6·N + 12·L·d·s (PaLM, arXiv 2204.02311, appendix B).

    N counts every parameter that multiplies activations: all but the token embedding, which is a look-up (a tied
    one multiplies as the output projection), and the experts that a token is not sent to. The attention term takes
    the full sequence, not the causal half, as is the custom, so that utilisation can be compared with published
    numbers.
    """
    lookup = 0 if architecture.tie_embeddings else architecture.vocab_size * architecture.hidden_size
    matrices = architecture.active_parameters - lookup
    return 6 * matrices + 12 * architecture.layers * architecture.hidden_size * sequence_length
