"""What a stage's passes cost by the operations in them: the times that a search for a schedule starts from.

The zero-bubble paper searches with times measured on the machine (arXiv 2401.10241, section 3), and so does a run once
it has some (`schedules.measured`). Here they are counted per layer, so that planner and every rank know the same ones
before anything runs, to the last digit. A matrix product
costs as much forward as in either half of the backward pass. Attention has no weights: all of its backward pass, twice
its forward pass, falls to the half that computes gradients of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.models.architecture import Architecture
from meshwright.models.counts import attention_flops, layer_counts, output_parameters
from meshwright.models.transformer import Transformer
from meshwright.schedules.simulate import Costs


def stage_costs(
    model: Architecture, length: int, layers: Sequence[range], *, recomputes: bool = False
) -> tuple[Costs, ...]:
    """The costs of every stage, in floating-point operations of one token: only their ratios matter to an order.

    Args:
        model: whose stages.
        length: of a sequence, in tokens.
        layers: of each stage, in the model's order; the last one has the output projection beside them.
        recomputes: whether a stage is computed again before its backward pass.
    """
    whole = Transformer.of(model)
    attention = attention_flops(whole, length, causal=True)
    costs = []
    for stage, own in enumerate(layers):
        matrices = sum(2.0 * layer_counts(whole, whole.is_mixture(layer)).matrices for layer in own)
        if stage == len(layers) - 1:
            matrices += 2.0 * output_parameters(whole)
        forward = matrices + len(own) * attention
        again = forward if recomputes else 0.0
        costs.append(Costs(forward, again + matrices + 2.0 * len(own) * attention, matrices))
    return tuple(costs)
