"""Rules on mixtures of experts and on expert parallelism."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.api.mixture import Balancing, MixtureSpec, Router
from meshwright.api.model_parts import Activation
from meshwright.api.parallelism import ExpertDispatch
from meshwright.rules.facts import Facts
from meshwright.rules.rule import Rule, divides

_NO_MIXTURE_OR = "!has(self.model) || !has(self.model.mixture) || "


def _mixture(facts: Facts) -> MixtureSpec | None:
    return facts.model.mixture if facts.model is not None else None


def _on_mixture(holds: Callable[[MixtureSpec], bool]) -> Callable[[Facts], bool]:
    """A rule that reads only the mixture. It holds if there is none."""

    def check(facts: Facts) -> bool:
        mixture = _mixture(facts)
        return mixture is None or holds(mixture)

    return check


def _has_experts(facts: Facts) -> bool:
    model = facts.model
    return (facts.parallelism.expert or 1) == 1 or (
        model is not None and (model.mixture is not None or model.heads is None)
    )


def _experts_divide(facts: Facts) -> bool:
    mixture = _mixture(facts)
    return mixture is None or divides(facts.parallelism.expert, mixture.experts)


def _expert_width_splits(facts: Facts) -> bool:
    mixture, tensor = _mixture(facts), facts.parallelism.tensor
    return mixture is None or not facts.parallelism.expert_tensor or divides(tensor, mixture.intermediate_size)


def _whole_experts_allowed(facts: Facts) -> bool:
    fp8 = facts.training is not None and facts.training.fp8 is not None
    return facts.parallelism.expert_tensor or (facts.parallelism.sequence and not fp8)


def _dispatch_has_experts(facts: Facts) -> bool:
    model = facts.model
    has_experts = model is not None and (model.mixture is not None or model.heads is None)
    return facts.parallelism.expert_dispatch is None or has_experts


def _dispatch_without_fp8(facts: Facts) -> bool:
    fp8 = facts.training is not None and facts.training.fp8 is not None
    return facts.parallelism.expert_dispatch in (None, ExpertDispatch.PER_EXPERT) or not fp8


def _padding_has_a_capacity(facts: Facts) -> bool:
    mixture, model = _mixture(facts), facts.model
    unknown = model is None or (mixture is None and model.heads is None)
    if facts.parallelism.expert_dispatch is not ExpertDispatch.PADDED or unknown:
        return True
    return mixture is not None and mixture.capacity_factor is not None


def _shared_width_splits(facts: Facts) -> bool:
    mixture, tensor = _mixture(facts), facts.parallelism.tensor
    return mixture is None or divides(tensor, mixture.shared_intermediate_size)


def _has_mixture_layer(facts: Facts) -> bool:
    mixture, layers = _mixture(facts), facts.model.layers if facts.model is not None else None
    return mixture is None or layers is None or mixture.dense_layers + mixture.every <= layers


def _swiglu(facts: Facts) -> bool:
    model = facts.model
    if model is None or model.mixture is None:
        return True
    return model.gated is not False and not model.biases and model.activation in (None, Activation.SILU)


def _fp8_experts_see_whole_rows(facts: Facts) -> bool:
    fp8 = facts.training is not None and facts.training.fp8 is not None
    expert, context = facts.parallelism.expert or 1, facts.parallelism.context_or_default
    return not fp8 or expert % context == 0 or context % expert == 0


def _experts_stay_on_an_island(facts: Facts) -> bool:
    outer = facts.training.outer if facts.training is not None else None
    return outer is None or (facts.parallelism.expert or 1) == 1


def _router_has_gradient(mixture: MixtureSpec) -> bool:
    return mixture.per_token > 1 or not mixture.renormalize or mixture.router is not Router.SOFTMAX


MIXTURE_RULES: tuple[Rule[Facts], ...] = (
    Rule(
        "model.mixture.perToken",
        "must be at most `model.mixture.experts`",
        _NO_MIXTURE_OR + "self.model.mixture.perToken <= self.model.mixture.experts",
        _on_mixture(lambda m: m.per_token <= m.experts),
    ),
    Rule(
        "model.mixture.groups",
        "must divide `model.mixture.experts`, because all groups have the same size",
        _NO_MIXTURE_OR + "self.model.mixture.experts % self.model.mixture.groups == 0",
        _on_mixture(lambda m: m.experts % m.groups == 0),
    ),
    Rule(
        "model.mixture.groupsPerToken",
        "must be at most `model.mixture.groups`",
        _NO_MIXTURE_OR + "self.model.mixture.groupsPerToken <= self.model.mixture.groups",
        _on_mixture(lambda m: m.groups_per_token <= m.groups),
    ),
    Rule(
        "model.mixture.groupsPerToken",
        "times the experts of a group must be at least `model.mixture.perToken`: raise it, or lower `perToken` or "
        "`groups`",
        _NO_MIXTURE_OR + "self.model.mixture.perToken * self.model.mixture.groups"
        " <= self.model.mixture.groupsPerToken * self.model.mixture.experts",
        _on_mixture(lambda m: m.per_token * m.groups <= m.groups_per_token * m.experts),
    ),
    Rule(
        "model.mixture.renormalize",
        "must be false with `perToken: 1` and `router: Softmax`, because a weight that is always 1 gives the "
        "router no gradient",
        _NO_MIXTURE_OR + "self.model.mixture.perToken > 1 || !self.model.mixture.renormalize"
        " || self.model.mixture.router != 'Softmax'",
        _on_mixture(_router_has_gradient),
    ),
    Rule(
        "model.mixture.auxiliaryWeight",
        "needs `model.mixture.balancing: Auxiliary` or `Bias`: change the balancing, or remove this field",
        _NO_MIXTURE_OR + "!has(self.model.mixture.auxiliaryWeight) || self.model.mixture.balancing != 'None'",
        _on_mixture(lambda m: m.auxiliary_weight is None or m.balancing is not Balancing.NONE),
    ),
    Rule(
        "model.mixture.denseLayers",
        "plus `model.mixture.every` must be at most `model.layers`, because at least one layer must be a mixture",
        _NO_MIXTURE_OR + "!has(self.model.layers)"
        " || self.model.mixture.denseLayers + self.model.mixture.every <= self.model.layers",
        _has_mixture_layer,
    ),
    Rule(
        "model.mixture",
        "is not supported with `gated: false`, `biases: true`, or an `activation` other than `SiLU`, because "
        "experts are SwiGLU: remove these fields",
        _NO_MIXTURE_OR
        + "((!has(self.model.gated) || self.model.gated) && (!has(self.model.biases) || !self.model.biases)"
        " && (!has(self.model.activation) || self.model.activation == 'SiLU'))",
        _swiglu,
    ),
    Rule(
        "parallelism.expert",
        "needs a model with experts: set `model.mixture`, or a `model.preset` or `model.huggingFace` with a "
        "mixture, or remove this field",
        "!has(self.parallelism.expert) || self.parallelism.expert == 1"
        " || (has(self.model) && (has(self.model.mixture) || !has(self.model.heads)))",
        _has_experts,
    ),
    Rule(
        "parallelism.expert",
        "must divide `replicas` times `parallelism.context`, because experts are spread over the ranks with the "
        "same dense parameters",
        "!has(self.parallelism.expert) || has(self.gpus)"
        " || self.replicas * self.parallelism.context % self.parallelism.expert == 0",
        lambda facts: (
            facts.gpus is not None
            or divides(facts.parallelism.expert, facts.replicas * facts.parallelism.context_or_default)
        ),
    ),
    Rule(
        "parallelism.expert",
        "must divide `model.mixture.experts`, because every rank has the same number of experts",
        _NO_MIXTURE_OR + "!has(self.parallelism.expert) || self.model.mixture.experts % self.parallelism.expert == 0",
        _experts_divide,
    ),
    Rule(
        "parallelism.tensor",
        "must divide `model.mixture.intermediateSize`, because experts are split by their width: change one of "
        "them, or set `expertTensor: false`",
        _NO_MIXTURE_OR + "!has(self.parallelism.tensor) || !self.parallelism.expertTensor"
        " || self.model.mixture.intermediateSize % self.parallelism.tensor == 0",
        _expert_width_splits,
    ),
    Rule(
        "parallelism.tensor",
        "must divide `model.mixture.sharedIntermediateSize`, because shared experts are split by their width",
        _NO_MIXTURE_OR + "!has(self.parallelism.tensor)"
        " || self.model.mixture.sharedIntermediateSize % self.parallelism.tensor == 0",
        _shared_width_splits,
    ),
    Rule(
        "parallelism.expertTensor",
        "must be true with `sequence: false` and with `training.fp8`: GPUs with full experts route separate "
        "positions, but fp8 scales cover all positions",
        "self.parallelism.expertTensor"
        " || (self.parallelism.sequence && (!has(self.training) || !has(self.training.fp8)))",
        _whole_experts_allowed,
    ),
    Rule(
        "parallelism.expertDispatch",
        "needs a model with experts: set `model.mixture`, or remove this field",
        "!has(self.parallelism.expertDispatch)"
        " || (has(self.model) && (has(self.model.mixture) || !has(self.model.heads)))",
        _dispatch_has_experts,
    ),
    Rule(
        "parallelism.expertDispatch",
        "must be `PerExpert` with `training.fp8`, whose scales are those of the rows of one micro-batch",
        "!has(self.parallelism.expertDispatch) || self.parallelism.expertDispatch == 'PerExpert'"
        " || !has(self.training) || !has(self.training.fp8)",
        _dispatch_without_fp8,
    ),
    Rule(
        "parallelism.expertDispatch",
        "`Padded` needs `model.mixture.capacityFactor`, because rows are padded to the capacity of each expert",
        "!has(self.parallelism.expertDispatch) || self.parallelism.expertDispatch != 'Padded' || !has(self.model)"
        " || (has(self.model.mixture) ? has(self.model.mixture.capacityFactor) : !has(self.model.heads))",
        _padding_has_a_capacity,
    ),
    Rule(
        "parallelism.expert",
        "must divide `parallelism.context` or be a multiple of it with `training.fp8`, because fp8 scales cover "
        "full sequences",
        "!has(self.parallelism.expert) || !has(self.training) || !has(self.training.fp8)"
        " || self.parallelism.expert % self.parallelism.context == 0"
        " || self.parallelism.context % self.parallelism.expert == 0",
        _fp8_experts_see_whole_rows,
    ),
    Rule(
        "parallelism.expert",
        "is not supported with `training.outer`, because experts would be spread over several islands: remove one "
        "of the two",
        "!has(self.parallelism.expert) || self.parallelism.expert == 1 || !has(self.training)"
        " || !has(self.training.outer)",
        _experts_stay_on_an_island,
    ),
    Rule(
        "parallelism.expert",
        "is not supported with `parallelism.dataParallel.shardSize`: remove one of the two",
        "!has(self.parallelism.expert) || self.parallelism.expert == 1"
        " || !has(self.parallelism.dataParallel.shardSize)",
        lambda facts: (facts.parallelism.expert or 1) == 1 or facts.parallelism.data_parallel.shard_size is None,
    ),
)
