"""`spec.model.mixture`: mixtures of experts."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel


class Router(StrEnum):
    """The function from a router's logits to the experts' scores."""

    SOFTMAX = "Softmax"
    SIGMOID = "Sigmoid"


class Balancing(StrEnum):
    """What balances the experts' loads."""

    NONE = "None"
    AUXILIARY = "Auxiliary"
    BIAS = "Bias"


class MixtureSpec(ApiModel):
    """Mixtures of experts in place of feed-forward layers (arXiv 1701.06538): a router and SwiGLU experts."""

    experts: Annotated[int, Field(ge=1, le=4096)]
    """Number of routed experts of each mixture. Must be divisible by `parallelism.expert`."""
    per_token: Annotated[int, Field(ge=1, le=256)]
    """Number of experts that each token uses: 1 in Switch (arXiv 2101.03961), 2 in Mixtral (2401.04088), 8 in
    DeepSeek-V3."""
    intermediate_size: Annotated[int, Field(ge=1, le=1048576)]
    """Width of one expert. Must be divisible by `parallelism.tensor`."""
    shared_intermediate_size: Annotated[int, Field(ge=0, le=1048576)] = 0
    """Total width of the shared experts, which every token uses in addition to its own (DeepSeekMoE, arXiv 2401.06066).
    0 for none. Must be divisible by `parallelism.tensor`."""
    dense_layers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of first layers with a dense feed-forward layer of `model.intermediateSize`."""
    every: Annotated[int, Field(ge=1, le=1024)] = 1
    """Distance between mixtures: of the other layers, every `every`th is a mixture, and the rest are dense."""
    router: Router = Router.SOFTMAX
    """Scores of the experts. `Softmax`: over all experts. `Sigmoid`: for each expert separately (DeepSeek-V3, arXiv
    2412.19437)."""
    renormalize: bool = True
    """Whether the weights of a token's experts are divided by their sum, as in Mixtral and DeepSeek-V3. Not allowed
    with `perToken: 1` and `router: Softmax`: the router would get no gradient."""
    scaling: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Factor of the weights of routed experts: 2.5 in DeepSeek-V3."""
    groups: Annotated[int, Field(ge=1, le=256)] = 1
    """Number of equal groups of consecutive experts, of which a token uses `groupsPerToken`: with one per node, at most
    that many nodes. The score of a group is its best score, with `Sigmoid` the sum of its two best."""
    groups_per_token: Annotated[int, Field(ge=1, le=256)] = 1
    """Number of groups that a token may use. Must be at most `groups`."""
    capacity_factor: Annotated[float, Field(gt=0, le=4096)] | None = None
    """An expert takes at most this times `sequenceLength` times `perToken` / `experts` tokens of a sequence, the first
    ones in order, and drops the others. By default no token is dropped."""
    balancing: Balancing = Balancing.AUXILIARY
    """`Auxiliary`: a loss on the product of load and mean score of each expert, over each sequence (Switch;
    DeepSeek-V3, section 2.1.2). `Bias`: a bias of each expert's scores, for the choice only, moves against its load
    after each step (arXiv 2408.15664). `None`: neither."""
    auxiliary_weight: Annotated[float, Field(ge=0, le=1000)] | None = None
    """Weight of each mixture's auxiliary loss. Defaults to 0.01 with `balancing: Auxiliary` and to 0 with `Bias`, where
    DeepSeek-V3 uses 0.0001. Not allowed with `None`."""
    z_loss_weight: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Weight of the mean squared log-sum-exp of each router's logits (ST-MoE, arXiv 2202.08906)."""
    bias_rate: Annotated[float, Field(ge=0, le=1)] = 0.001
    """Amount by which a step moves each bias with `balancing: Bias`."""

    @property
    def balance_weight(self) -> float:
        """The auxiliary loss's weight. The schema has no default: with `balancing: None` the field must be absent."""
        if self.auxiliary_weight is not None:
            return self.auxiliary_weight
        return 0.01 if self.balancing is Balancing.AUXILIARY else 0.0
