"""Validates the options of generation: layouts and temperatures. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from meshwright.layout import Layout
from meshwright.models.architecture import Architecture
from meshwright.rules.nearest import nearest
from meshwright_worker.rank.failures import InvalidRunError


def check_layout(layout: Layout, model: Architecture) -> None:
    """Reject a layout that does not fit, before any process group is created.

    Raises:
        InvalidRunError: lists every problem, by the options of `meshwright_worker.generate`, with values that fit.
    """
    problems = [*_tensor_problems(layout.tensor, model), *_expert_problems(layout.expert, model)]
    if layout.pipeline > model.layers:
        problems.append(f"`--pipeline {layout.pipeline}` needs a layer a stage; at most {model.layers}")
    if problems:
        raise InvalidRunError("; ".join(problems))


def check_temperature(temperature: float) -> None:
    """Reject a temperature that logits cannot be divided by.

    Raises:
        InvalidRunError: it is negative, infinite or not a number.
    """
    if not 0 <= temperature < inf:
        raise InvalidRunError(
            f"`--temperature {temperature}` must be 0, which takes the likeliest token each time, or a positive number "
            "such as 0.7"
        )


def _tensor_problems(tensor: int, model: Architecture) -> Iterator[str]:
    split = {"heads": model.heads, "kvHeads": model.kv_heads, "intermediateSize": model.intermediate_size}
    if model.mixture is not None:
        split["mixture.intermediateSize"] = model.mixture.intermediate_size
        split["mixture.sharedIntermediateSize"] = model.mixture.shared_intermediate_size
    fits = nearest(tensor, lambda n: not any(value % n for value in split.values()), model.heads)
    for name, value in split.items():
        if value % tensor:
            yield f"`--tensor {tensor}` must divide the model's `{name}: {value}`; nearest that fit: {fits}"


def _expert_problems(expert: int, model: Architecture) -> Iterator[str]:
    if expert == 1:
        return
    if model.mixture is None:
        yield f"`--expert {expert}` needs a model with a mixture of experts; for this one only 1 fits"
        return
    experts = model.mixture.experts
    if experts % expert:
        fits = nearest(expert, lambda n: experts % n == 0, experts)
        yield f"`--expert {expert}` must divide the model's `mixture.experts: {experts}`; nearest that fit: {fits}"
