"""A Llama-style decoder in numbers: what planner and worker count and build alike."""

from __future__ import annotations

from meshwright.api.base import ApiModel


class Architecture(ApiModel):
    """RMSNorm, rotary positions, grouped-query attention, SwiGLU; pre-norm residual blocks; no biases."""

    name: str = ""
    """Preset's name, or empty."""
    layers: int
    """Decoder layers."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the SwiGLU feed-forward layer."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    vocab_size: int
    """Rows of the token embedding."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding."""
    norm_epsilon: float = 1e-5
    """Epsilon of RMSNorm."""
    tie_embeddings: bool = False
    """Whether the output projection is the token embedding."""

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.heads

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: attention, feed-forward and two norms."""
        attention = 2 * self.hidden_size * self.head_size * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.layers * self.layer_parameters + self.hidden_size
