"""The sizes of a decoder: the planner counts with them, the runtime builds the model from them."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from meshwright.api.base import ApiModel
from meshwright.api.mixture import MixtureSpec
from meshwright.api.model_parts import Activation, LatentSpec, Norm, RopeScalingSpec
from meshwright.models.mixture import feed_forward_parameters, is_mixture, mixture_layers


def _width_of_a_head(numbers: dict[str, Any]) -> int:
    return int(numbers["hidden_size"] // max(1, numbers["heads"]))


class Architecture(ApiModel):
    """A pre-norm decoder. The defaults are Llama's: RMSNorm, rotary positions, SwiGLU, no biases."""

    model_config = ConfigDict(frozen=True)  # a key of the planner's caches

    name: str = ""
    """Preset's name, or empty."""
    layers: int
    """Decoder layers."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the feed-forward layer."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    vocab_size: int
    """Rows of the token embedding."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding."""
    norm_epsilon: float = 1e-5
    """Epsilon of the norms."""
    tie_embeddings: bool = False
    """Whether the output projection is the token embedding."""
    head_size: int = Field(default_factory=_width_of_a_head)
    """Width of a query's and key's head. With latent attention: without the rotary part."""
    value_size: int = Field(default_factory=lambda numbers: int(numbers["head_size"]))
    """Width of a value's head."""
    gated: bool = True
    """Whether the feed-forward layer has a gate (SwiGLU, arXiv 2002.05202): three matrices instead of two."""
    activation: Activation = Activation.SILU
    """Non-linearity of the feed-forward layer. It is applied to the gate if there is one."""
    norm: Norm = Norm.RMS_NORM
    """Normalization before each sub-layer and before the output."""
    biases: bool = False
    """Whether every matrix but embedding and output, and every norm, has a bias (GPT). Needs `LayerNorm`."""
    attention_biases: bool = False
    """Whether queries, keys and values have a bias (Qwen2)."""
    query_key_norms: bool = False
    """Whether each head's queries and keys are normalized (Qwen3)."""
    positions: int = 0
    """Rows of a learned position embedding (GPT). 0 for rotary positions."""
    latent: LatentSpec | None = None
    """Multi-head latent attention (DeepSeek)."""
    rope_scaling: RopeScalingSpec | None = None
    """Rescaling of rotary frequencies, if any."""
    mixture: MixtureSpec | None = None
    """The mixture of experts that replaces the feed-forward layer in some layers."""
    sliding_window: int = 0
    """Largest number of keys that a query attends to, its own among them (Mistral, arXiv 2310.06825). 0 for all."""
    full_attention_every: int = 0
    """The last of every so many layers attends to all keys in spite of `sliding_window`. 0 for no layer."""
    window_rope_theta: float = 0.0
    """Base of the rotary position embedding of layers with a sliding window, whose frequencies are not rescaled
    (Gemma 3, arXiv 2503.19786). 0 for that of the others.
    """
    output_norms: bool = False
    """Whether the output of each sub-layer is normalized, too, before it is added (Gemma 2, arXiv 2408.00118)."""
    embedding_factor: float = 1.0
    """Factor of the token embedding's rows as the input of the first layer (Gemma, arXiv 2403.08295)."""
    shared_gate: Annotated[bool, Field(exclude=True), SkipJsonSchema()] = False
    """Whether a gate weights a mixture's shared experts (Qwen2-MoE). Counted, but not built."""
    prediction_layers: Annotated[int, Field(exclude=True), SkipJsonSchema()] = 0
    """Number of multi-token prediction modules (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Each is one layer and a projection. Counted, but not built.
    """

    def __hash__(self) -> int:
        """Hash only a few fields: a search uses models as keys very often."""
        return hash((self.name, self.layers, self.hidden_size))

    def is_mixture(self, layer: int) -> bool:
        """Whether layer number `layer` (from 0) has a mixture of experts."""
        return is_mixture(self.mixture, layer)

    def window_of(self, layer: int) -> int:
        """The sliding window of layer number `layer` (from 0). 0 if it attends to all keys."""
        every = self.full_attention_every
        return 0 if every and (layer + 1) % every == 0 else self.sliding_window

    @property
    def full_attention_layers(self) -> int:
        """Number of layers without a sliding window."""
        if not self.sliding_window:
            return self.layers
        return self.layers // self.full_attention_every if self.full_attention_every else 0

    def count_mixtures(self, first: int, last: int) -> int:
        """Number of layers with a mixture of experts, from layer `first` to `last - 1`."""
        mixture = self.mixture
        if mixture is None:
            return 0
        low, high = (max(0, layer - mixture.dense_layers) // mixture.every for layer in (first, last))
        return high - low

    @property
    def key_size(self) -> int:
        """Width of a query's and key's head with its rotary part."""
        return self.head_size + (self.latent.rope_size if self.latent else 0)

    @property
    def rope_size(self) -> int:
        """Width of the rotated part of a query's and key's head. 0 with learned positions."""
        if self.positions:
            return 0
        return self.latent.rope_size if self.latent else self.head_size

    @property
    def score_scale(self) -> float | None:
        """Factor of attention's scores. None for 1 / sqrt(key width)."""
        scaling = self.rope_scaling
        if scaling is None or scaling.score_factor == 1:
            return None
        return scaling.score_factor / math.sqrt(self.key_size)

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm of the residual stream."""
        return self.hidden_size * (2 if self.biases else 1)

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention that tensor parallelism splits: matrices and their biases."""
        hidden, heads, latent = self.hidden_size, self.heads, self.latent
        output = heads * self.value_size * hidden
        if latent is None:
            widths = heads * self.head_size + self.kv_heads * (self.head_size + self.value_size)
            biased = self.biases or self.attention_biases
            return widths * (hidden + (1 if biased else 0)) + output
        queries = (latent.query_rank or hidden) * heads * self.key_size
        return queries + latent.kv_rank * heads * (self.head_size + self.value_size) + output

    @property
    def feed_forward_parameters(self) -> int:
        """Parameters of one layer's feed-forward that tensor parallelism splits: matrices and their biases."""
        return self.feed_forward_parameters_of(self.intermediate_size)

    def feed_forward_parameters_of(self, width: int) -> int:
        """`feed_forward_parameters` of a feed-forward layer, or an expert, of another width."""
        columns = (2 if self.gated else 1) * width
        return (columns + width) * self.hidden_size + (columns if self.biases else 0)

    @property
    def latent_parameters(self) -> int:
        """Parameters of the down-projections of one layer's latent attention.

        Tensor parallelism does not split them.
        """
        latent = self.latent
        return 0 if latent is None else self.hidden_size * (latent.query_rank + latent.kv_rank + latent.rope_size)

    @property
    def layer_norm_parameters(self) -> int:
        """Parameters of one layer's norms, and of the biases after the row-split products of its two parts.

        Tensor parallelism does not split them.
        """
        norms = 4 if self.output_norms else 2
        count = norms * self.norm_parameters + (2 * self.hidden_size if self.biases else 0)
        if self.query_key_norms:
            count += 2 * self.head_size
        if self.latent is not None:
            count += self.latent.query_rank + self.latent.kv_rank
        return count

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer with a dense feed-forward layer: attention, feed-forward and norms."""
        whole = self.latent_parameters + self.layer_norm_parameters
        return self.attention_parameters + self.feed_forward_parameters + whole

    @property
    def parameters(self) -> int:
        """Parameters of the entire model, without multi-token prediction."""
        return self._parameters(active=False)

    @property
    def active_parameters(self) -> int:
        """The part of `parameters` that one token uses: all except the experts that it is not routed to."""
        return self._parameters(active=True)

    def _parameters(self, *, active: bool) -> int:
        tables = self.vocab_size * (1 if self.tie_embeddings else 2) + self.positions
        count = tables * self.hidden_size + self.layers * self.layer_parameters + self.norm_parameters
        if self.mixture is None:
            return count
        mixed = feed_forward_parameters(self.mixture, self.hidden_size, active=active)
        mixed += self.hidden_size if self.shared_gate else 0
        return count + len(mixture_layers(self.mixture, self.layers)) * (mixed - self.feed_forward_parameters)


def not_buildable(model: Architecture) -> list[str]:
    """Reasons why the runtime does not build a model that can be counted. Empty if it builds the model."""
    reasons = []
    if model.shared_gate:
        reasons.append("a gate on the shared experts (`model_type: qwen2_moe`) is not supported")
    if model.prediction_layers:
        reasons.append(
            f"multi-token prediction (`num_nextn_predict_layers: {model.prediction_layers}`) is not supported"
        )
    return reasons
