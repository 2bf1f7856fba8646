"""A decoder of any known family in numbers: what the planner counts.

A superset of `Architecture`, which is what the runtime builds: it also describes sliding windows and multi-token
prediction, and leaves out what changes no count. A plain dataclass, because a search reads it some hundred thousand
times.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.api.mixture import Balancing, MixtureSpec
from meshwright.models.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture-of-experts feed-forward layer: a router and `count` networks, of which each token uses `per_token`."""

    count: int
    per_token: int
    intermediate: int
    """Width of one expert."""
    shared_intermediate: int = 0
    """Summed width of the shared experts, which every token uses."""
    dense_layers: int = 0
    """First layers that keep a dense feed-forward layer."""
    router_bias: bool = False
    """Whether the router has a bias per expert (DeepSeek-V3's balancing without an auxiliary loss)."""
    every: int = 1
    """Of the other layers, every so many is a mixture; the rest are dense."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    kv_rank: int
    """Width of the compressed keys and values."""
    rope_size: int
    """Width of the rotary part, one key for all heads."""
    query_rank: int = 0
    """Width of the compressed queries; 0 where queries are not compressed."""


@dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder-only transformer.

    Raises:
        ValueError: a number is not positive, or heads do not divide into key-value groups.
    """

    layers: int
    hidden: int
    heads: int
    intermediate: int
    """Width of the dense feed-forward layer."""
    vocab: int
    kv_heads: int = 0
    """Key and value heads; 0 for as many as `heads`."""
    head_size: int = 0
    """Width of a query's and key's head; 0 for `hidden / heads`. With latent attention: without the rotary part."""
    value_size: int = 0
    """Width of a value's head; 0 for `head_size`."""
    gated: bool = True
    """Whether the feed-forward layer has a gate (SwiGLU, GeGLU): three matrices instead of two."""
    biases: bool = False
    """Whether every matrix and norm has a bias (GPT)."""
    attention_biases: bool = False
    """Whether only queries, keys and values have one (Qwen2)."""
    query_key_norms: bool = False
    """Whether each head's queries and keys are normed (Qwen3)."""
    positions: int = 0
    """Rows of a learned position embedding; 0 for rotary positions."""
    tie_embeddings: bool = False
    window: int = 0
    """Width of sliding-window attention; 0 for full attention."""
    experts: Experts | None = None
    latent: LatentAttention | None = None
    prediction_layers: int = 0
    """Multi-token prediction modules (DeepSeek-V3, arXiv 2412.19437, section 2.2), each one layer and a projection."""
    name: str = ""
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "intermediate", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, not {getattr(self, name)}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"`heads` ({self.heads}) must be divisible by `kv_heads` ({self.kv_heads})")
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_size", self.head_size or self.hidden // self.heads)
        object.__setattr__(self, "value_size", self.value_size or self.head_size)
        shape = (self.layers, self.hidden, self.heads, self.intermediate, self.vocab, self.kv_heads, self.name)
        object.__setattr__(self, "_hash", hash(shape))

    def __hash__(self) -> int:
        """Computed once: a search uses models as keys all the time."""
        return self._hash

    @classmethod
    def of(cls, architecture: Architecture) -> Transformer:
        """The runtime's architecture in the planner's numbers."""
        latent = architecture.latent
        return cls(
            name=architecture.name,
            layers=architecture.layers,
            hidden=architecture.hidden_size,
            heads=architecture.heads,
            kv_heads=architecture.kv_heads,
            intermediate=architecture.intermediate_size,
            vocab=architecture.vocab_size,
            head_size=architecture.head_size,
            value_size=architecture.value_size,
            gated=architecture.gated,
            biases=architecture.biases,
            attention_biases=architecture.attention_biases,
            query_key_norms=architecture.query_key_norms,
            positions=architecture.positions,
            tie_embeddings=architecture.tie_embeddings,
            experts=_experts_of(architecture.mixture),
            latent=None if latent is None else LatentAttention(latent.kv_rank, latent.rope_size, latent.query_rank),
        )

    def is_mixture(self, layer: int) -> bool:
        """Whether layer number `layer` (from 0) has a mixture of experts."""
        experts = self.experts
        if experts is None or layer < experts.dense_layers:
            return False
        return (layer - experts.dense_layers) % experts.every == experts.every - 1

    def mixtures(self, first: int, last: int) -> int:
        """How many of the layers `first` to `last - 1` have a mixture of experts."""
        experts = self.experts
        if experts is None:
            return 0
        low, high = (max(0, layer - experts.dense_layers) // experts.every for layer in (first, last))
        return high - low


def _experts_of(mixture: MixtureSpec | None) -> Experts | None:
    if mixture is None:
        return None
    return Experts(
        count=mixture.experts,
        per_token=mixture.per_token,
        intermediate=mixture.intermediate_size,
        shared_intermediate=mixture.shared_intermediate_size,
        dense_layers=mixture.dense_layers,
        router_bias=mixture.balancing is Balancing.BIAS,
        every=mixture.every,
    )
