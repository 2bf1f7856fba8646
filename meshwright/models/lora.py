"""The matrices that get low-rank adapters, and the size of the adapters (LoRA, arXiv 2106.09685).

A layer has an adapter for each of the named matrices that it has. Latent attention has no key and value matrices, and
GPT's feed-forward layer has no gate. The experts of a mixture, including shared ones, get no adapters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from meshwright.api.lora import LoraSpec, LoraTarget
from meshwright.models.architecture import Architecture
from meshwright.models.mixture import mixture_layers


class Matrix(NamedTuple):
    """A matrix of a layer that can have an adapter."""

    target: LoraTarget
    inputs: int
    outputs: int


def adapted_matrices(lora: LoraSpec, model: Architecture, *, mixture: bool) -> list[Matrix]:
    """The matrices of one layer, with a mixture of experts or a dense feed-forward layer, that get an adapter."""
    return [matrix for matrix in _matrices(model, mixture=mixture) if matrix.target in lora.targets]


def adapter_parameters_per_layer(lora: LoraSpec, model: Architecture, *, mixture: bool) -> int:
    """Parameters of one layer's adapters: A and B of each adapted matrix."""
    return lora.rank * sum(matrix.inputs + matrix.outputs for matrix in adapted_matrices(lora, model, mixture=mixture))


def adapter_parameters(lora: LoraSpec, model: Architecture) -> int:
    """Parameters of all layers' adapters."""
    return sum(
        count * adapter_parameters_per_layer(lora, model, mixture=mixture) for mixture, count in _kinds(model).items()
    )


def skipped_targets(lora: LoraSpec, model: Architecture) -> str | None:
    """Describe which of the named matrices get no adapter, and in which layers. None if every layer has all of them."""
    targets_by_kind = {
        mixture: {matrix.target for matrix in adapted_matrices(lora, model, mixture=mixture)}
        for mixture in _kinds(model)
    }
    all_targets = set().union(*targets_by_kind.values())
    missing = {
        "any layer": set(lora.targets) - all_targets,
        "the mixtures of experts": all_targets - targets_by_kind.get(True, all_targets),
    }
    found = [f"for {_names(names)} in {where}" for where, names in missing.items() if names]
    return f"`training.lora.targets`: no adapter {' and '.join(found)}" if found else None


def layer_targets(*, latent: bool, gated: bool, mixture: bool) -> set[LoraTarget]:
    """The matrices that a layer has.

    Args:
        latent: whether attention is latent.
        gated: whether the feed-forward layer has a gate.
        mixture: whether the layer has a mixture of experts instead of the feed-forward layer.
    """
    targets = {LoraTarget.QUERY, LoraTarget.OUTPUT}
    targets |= set() if latent else {LoraTarget.KEY, LoraTarget.VALUE}
    feed_forward = {LoraTarget.UP, LoraTarget.DOWN} | ({LoraTarget.GATE} if gated else set())
    return targets if mixture else targets | feed_forward


def _matrices(model: Architecture, *, mixture: bool) -> list[Matrix]:
    hidden, width, latent = model.hidden_size, model.intermediate_size, model.latent
    queries = latent.query_rank or hidden if latent is not None else hidden
    matrices = (
        Matrix(LoraTarget.QUERY, queries, model.heads * model.key_size),
        Matrix(LoraTarget.KEY, hidden, model.kv_heads * model.head_size),
        Matrix(LoraTarget.VALUE, hidden, model.kv_heads * model.value_size),
        Matrix(LoraTarget.OUTPUT, model.heads * model.value_size, hidden),
        Matrix(LoraTarget.GATE, hidden, width),
        Matrix(LoraTarget.UP, hidden, width),
        Matrix(LoraTarget.DOWN, width, hidden),
    )
    targets = layer_targets(latent=latent is not None, gated=model.gated, mixture=mixture)
    return [matrix for matrix in matrices if matrix.target in targets]


def _kinds(model: Architecture) -> dict[bool, int]:
    """Numbers of mixture layers (True) and dense layers (False). A kind without layers is left out."""
    mixtures = len(mixture_layers(model.mixture, model.layers))
    return {mixture: count for mixture, count in ((False, model.layers - mixtures), (True, mixtures)) if count}


def _names(targets: Iterable[LoraTarget]) -> str:
    """The names of the targets, in the order of the API's list."""
    named = set(targets)
    return ", ".join(target.value for target in LoraTarget if target in named)
