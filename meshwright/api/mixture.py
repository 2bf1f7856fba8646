"""`spec.model.mixture`: feed-forward layers of which each token uses a few out of many."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel


class Router(StrEnum):
    """How a router's logits become the experts' scores."""

    SOFTMAX = "Softmax"
    SIGMOID = "Sigmoid"


class Balancing(StrEnum):
    """What keeps the experts' loads alike."""

    NONE = "None"
    AUXILIARY = "Auxiliary"
    BIAS = "Bias"


class MixtureSpec(ApiModel):
    """Mixtures of experts in place of feed-forward layers (arXiv 1701.06538): a router and SwiGLU experts."""

    experts: Annotated[int, Field(ge=1, le=4096)]
    """Routed experts of each mixture. Must be divisible by `parallelism.expert`."""
    per_token: Annotated[int, Field(ge=1, le=256)]
    """Experts that each token uses: 1 in Switch (arXiv 2101.03961), 2 in Mixtral (2401.04088), 8 in DeepSeek-V3."""
    intermediate_size: Annotated[int, Field(ge=1, le=1048576)]
    """Width of one expert. Must be divisible by `parallelism.tensor`."""
    shared_intermediate_size: Annotated[int, Field(ge=0, le=1048576)] = 0
    """Summed width of the shared experts, which every token uses beside its own (DeepSeekMoE, arXiv 2401.06066); 0 for
    none. Must be divisible by `parallelism.tensor`."""
    dense_layers: Annotated[int, Field(ge=0, le=1024)] = 0
    """First layers that keep a dense feed-forward layer of `model.intermediateSize`."""
    every: Annotated[int, Field(ge=1, le=1024)] = 1
    """Of the other layers every so many is a mixture, beginning with the `every`th; the rest are dense."""
    router: Router = Router.SOFTMAX
    """Scores over all experts. `Softmax`; `Sigmoid`: each expert's on its own (DeepSeek-V3, arXiv 2412.19437)."""
    renormalize: bool = True
    """Whether the weights of a token's experts are divided by their sum, as in Mixtral and DeepSeek-V3. Not allowed
    with `perToken: 1` and `router: Softmax`: the router would get no gradient."""
    scaling: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """What the weights of routed experts are multiplied by: 2.5 in DeepSeek-V3."""
    groups: Annotated[int, Field(ge=1, le=256)] = 1
    """Equal groups of consecutive experts, of which a token uses `groupsPerToken`: with as many groups as nodes a token
    goes to that many nodes at most. A group counts by its best score, with `Sigmoid` by the sum of its two best."""
    groups_per_token: Annotated[int, Field(ge=1, le=256)] = 1
    """Groups that a token may use; at most `groups`."""
    capacity_factor: Annotated[float, Field(gt=0, le=4096)] | None = None
    """An expert takes at most this times `sequenceLength` times `perToken` / `experts` tokens of a sequence, the first
    ones in order; of others it drops, the residual passes. When left out no token is dropped."""
    balancing: Balancing = Balancing.AUXILIARY
    """`Auxiliary`: a loss on the product of load and mean score of each expert, over each sequence (Switch;
    DeepSeek-V3, section 2.1.2). `Bias`: a number per expert is added to scores for the choice alone and moved after
    each step against the step's load (arXiv 2408.15664). `None`: neither."""
    auxiliary_weight: Annotated[float, Field(ge=0, le=1000)] | None = None
    """Weight of each mixture's auxiliary loss. When left out: 0.01 with `balancing: Auxiliary`, 0 with `Bias`, beside
    which DeepSeek-V3 keeps 0.0001. Not allowed with `None`."""
    z_loss_weight: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Weight of the mean squared log-sum-exp of each router's logits (ST-MoE, arXiv 2202.08906)."""
    bias_rate: Annotated[float, Field(ge=0, le=1)] = 0.001
    """How far a step moves each bias with `balancing: Bias`."""

    @property
    def balance_weight(self) -> float:
        """The auxiliary loss's weight. No default stands in the schema: with `balancing: None` the field is absent."""
        if self.auxiliary_weight is not None:
            return self.auxiliary_weight
        return 0.01 if self.balancing is Balancing.AUXILIARY else 0.0
