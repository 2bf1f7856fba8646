"""What a stage's passes cost by the operations in them: what layers are dealt by, and what a search starts from.

The zero-bubble paper searches with times measured on the machine (arXiv 2401.10241, section 3), and so does a run once
it has some (`schedules.measured`). Here they are counted per layer, so that planner and every rank know the same ones
before anything runs, to the last digit. A matrix product costs as much forward as in either half of the backward pass;
a mixture's are its shared experts and those that a token is sent to. Attention has no weights: all of its backward
pass, twice its forward pass, falls to the half that computes gradients of inputs. Looking up embeddings costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.models.architecture import Architecture
from meshwright.models.counts import attention_flops, layer_counts, output_parameters
from meshwright.schedules.simulator import ActionCosts


def layer_costs(
    model: Architecture, length: int, layer: int, *, recomputes: bool = False, causal: bool = True
) -> ActionCosts:
    """The costs of one layer, in floating-point operations of one token: only their ratios matter.

    Args:
        model: whose layer.
        length: of a sequence, in tokens.
        layer: its number, from 0: dense layers and mixtures differ, and those with a sliding window and without.
        recomputes: whether it is computed again before its backward pass.
        causal: whether attention skips what the mask hides.
    """
    matrices = 2.0 * layer_counts(model, model.is_mixture(layer)).matrices
    attention = attention_flops(model, length, causal=causal, layer=layer)
    forward = matrices + attention
    return ActionCosts(forward, (forward if recomputes else 0.0) + matrices + 2.0 * attention, matrices)


def output_costs(model: Architecture, *, recomputes: bool = False) -> ActionCosts:
    """The costs of the output projection, in the unit of `layer_costs`."""
    matrix = 2.0 * output_parameters(model)
    return ActionCosts(matrix, (matrix if recomputes else 0.0) + matrix, matrix)


def stage_costs(
    model: Architecture, length: int, layers: Sequence[range], *, recomputes: bool = False
) -> tuple[ActionCosts, ...]:
    """The costs of every stage, in the unit of `layer_costs`.

    Args:
        model: the model that the stages belong to.
        length: of a sequence, in tokens.
        layers: of each stage, in the model's order; the last one also has the output projection.
        recomputes: whether a stage is computed again before its backward pass.
    """
    costs = []
    for stage, stage_layers in enumerate(layers):
        parts = [layer_costs(model, length, layer, recomputes=recomputes) for layer in stage_layers]
        if stage == len(layers) - 1:
            parts.append(output_costs(model, recomputes=recomputes))
        costs.append(
            ActionCosts(
                sum(part.forward for part in parts),
                sum(part.backward_input for part in parts),
                sum(part.backward_weight for part in parts),
            )
        )
    return tuple(costs)
