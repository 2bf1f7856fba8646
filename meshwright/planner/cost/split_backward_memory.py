"""Bytes that the first half of a backward pass leaves to the second, per token: of every matrix product its input and
its output's gradient (M_W of arXiv 2401.10241, section 2); a router leaves nothing. See the worker's `models.deferred`.
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.api.precision import Precision
from meshwright.models.architecture import Architecture
from meshwright.planner.cost.stages import Stage
from meshwright.planner.cost.strategy import Strategy


def weight_half_bytes_of_stage(model: Architecture, stage: Stage, choices: Strategy) -> float:
    """Of a rank of a stage."""
    split = (choices.tensor, choices.precision)
    weight_half_bytes = stage.dense * weight_half_bytes_of_layer(model, False, *split)
    if stage.mixtures:
        weight_half_bytes += stage.mixtures * weight_half_bytes_of_layer(model, True, *split)
    if stage.output:
        weight_half_bytes += weight_half_bytes_of_output(model, *split, choices.settings.loss_chunk)
    return weight_half_bytes


@lru_cache(maxsize=65536)
def weight_half_bytes_of_layer(model: Architecture, mixture: bool, tensor: int, precision: Precision) -> float:
    """Of one layer. What enters a split block and the gradient of what leaves it are whole on every rank; split are the
    input of a feed-forward layer's second product and the gradients of the first ones' outputs.
    """
    whole, split = _attention(model)
    moe = model.mixture if mixture else None
    blocks = [(1, model.intermediate_size)]
    if moe is not None:
        blocks = [(moe.per_token, moe.intermediate_size)]
        blocks += [(1, moe.shared_intermediate_size)] if moe.shared_intermediate_size else []
    for times, width in blocks:
        whole += times * 2 * model.hidden_size
        split += times * (3.0 if model.gated else 2.0) * width
    return precision.bytes * (whole + split / tensor)


def weight_half_bytes_of_output(
    model: Architecture, tensor: int, precision: Precision, loss_chunk: int | None
) -> float:
    """Of the output projection; a loss in chunks has multiplied everything out in its forward pass."""
    if loss_chunk is not None:
        return 0.0
    return precision.bytes * (model.hidden_size + model.vocab_size / tensor)


def _attention(model: Architecture) -> tuple[float, float]:
    """Numbers that every rank of a tensor group has, and those that are split over it."""
    hidden, latent = model.hidden_size, model.latent
    attention_output = model.heads * model.value_size
    if latent is None:
        projected = (model.heads + model.kv_heads) * model.head_size + model.kv_heads * model.value_size
        return 2.0 * hidden, attention_output + projected
    latent_width = 2 * (latent.query_rank + latent.kv_rank) + latent.rope_size
    key_widths = model.heads * (model.head_size + latent.rope_size)
    expanded = key_widths + model.heads * (model.head_size + model.value_size)
    return 2.0 * hidden + latent_width, attention_output + expanded
