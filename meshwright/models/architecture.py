"""A Llama-style decoder in numbers: what planner and worker count and build alike."""

from __future__ import annotations

from meshwright.api.base import ApiModel
from meshwright.api.mixture import MixtureSpec
from meshwright.models.mixture import feed_forward_parameters, mixture_layers


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
    mixture: MixtureSpec | None = None
    """Layers with a mixture of experts in place of the feed-forward layer."""

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.heads

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer with a dense feed-forward layer: attention, feed-forward and two norms."""
        attention = 2 * self.hidden_size * self.head_size * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self._parameters(active=False)

    @property
    def active_parameters(self) -> int:
        """Of `parameters`, what one token uses: all but the experts that it is not sent to."""
        return self._parameters(active=True)

    def _parameters(self, *, active: bool) -> int:
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        count = embeddings + self.layers * self.layer_parameters + self.hidden_size
        if self.mixture is None:
            return count
        dense = 3 * self.hidden_size * self.intermediate_size
        mixed = feed_forward_parameters(self.mixture, self.hidden_size, active=active)
        return count + len(mixture_layers(self.mixture, self.layers)) * (mixed - dense)
