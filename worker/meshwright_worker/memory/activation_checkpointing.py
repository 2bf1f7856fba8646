"""Activation checkpointing: layers are recomputed in the backward pass instead of saved (arXiv 1604.06174).

Gradients do not change, since the same operators run on the same inputs. Dropout depends on the token, not on the order
of computation, so there is no RNG state to restore. Collectives inside a layer are issued again too, up to the last
operator whose output the backward pass needs: with tensor parallelism (arXiv 1909.08053) all but the block's last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import isqrt
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.api.training import ActivationCheckpointing
from meshwright_worker.data.batch import TokenMetadata
from meshwright_worker.models.decoder import Block, DecoderStage, run_in_order

_SAVED_OPS = (
    "mm",
    "addmm",
    "_grouped_mm",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_flash_attention_forward",
)
"""Operators whose outputs `Selective` saves: matrix products and attention, which have the most FLOPs per byte. Not
`bmm`: attention without a fused kernel would save its scores.
"""


Prepare = Callable[[torch.Tensor, TokenMetadata], None]


def _prepare_nothing(x: torch.Tensor, token_metadata: TokenMetadata) -> None:
    """A `Prepare` for layers that need nothing."""


class CheckpointedLayers:
    """Runs a stage's layers in groups and saves only a group's input, and the outputs that the policy saves.

    Args:
        group: number of layers that are recomputed together.
        selective: whether the outputs of `_SAVED_OPS` are saved.
        prepare: computes what the layers need of a micro-batch, see `DecoderStage.prepare_layers`.
    """

    def __init__(self, group: int, *, selective: bool, prepare: Prepare = _prepare_nothing) -> None:
        self._group = group
        self._selective = selective
        self._prepare = prepare

    def __call__(self, layers: Sequence[Block], x: torch.Tensor, token_metadata: TokenMetadata) -> torch.Tensor:
        """See `run_in_order`."""
        if not torch.is_grad_enabled():
            return run_in_order(layers, x, token_metadata)
        options: dict[str, Any] = {}
        if self._selective:
            # Without the hidden states, which may be offloaded.
            prepare = partial(self._prepare, x.detach().new_empty(0), token_metadata)
            options["context_fn"] = partial(_prepared_contexts, prepare)
        for first in range(0, len(layers), self._group):
            group = layers[first : first + self._group]
            x = checkpoint(
                run_in_order, group, x, token_metadata, use_reentrant=False, preserve_rng_state=False, **options
            )
        return x


def _prepared_contexts(prepare: Callable[[], None]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of `Selective`, of which the second one prepares the layers before they run again.

    Meanwhile other micro-batches may have run: layers that prepare themselves would run operators that they have not
    run before, which is an error.
    """
    first, again = create_selective_checkpoint_contexts(_selective_policy)  # type: ignore[no-untyped-call]
    return first, _Prepared(prepare, again)


class _Prepared(AbstractContextManager[Any]):
    """A context that calls `prepare` before it begins. It may be entered again."""

    def __init__(self, prepare: Callable[[], None], context: AbstractContextManager[Any]) -> None:
        self._prepare = prepare
        self._context = context

    def __enter__(self) -> Any:
        self._prepare()
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)


def selective_checkpoint(layer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a layer to save its input and the outputs of `_SAVED_OPS`, for compilation.

    Outside of compiled code, checkpointing would not see the products that it must save: there they are `mm.out`, into
    memory that other operators reuse, and all of them would be computed twice. Inside, the compiler reads the policy
    when it partitions the graph.
    """
    contexts = partial(create_selective_checkpoint_contexts, _selective_policy)

    def run(x: torch.Tensor, token_metadata: TokenMetadata) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return layer(x, token_metadata)
        y: torch.Tensor = checkpoint(
            layer, x, token_metadata, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )
        return y

    return run


def group_size(mode: ActivationCheckpointing, every: int, layers: int) -> int:
    """Return the number of layers per group on a stage with so many layers: `Sqrt` takes the root, as the
    planner does.
    """
    if mode is ActivationCheckpointing.EVERY_K:
        return every
    return max(1, isqrt(layers)) if mode is ActivationCheckpointing.SQRT else 1


def checkpoint_activations(stage: DecoderStage, mode: ActivationCheckpointing, every: int) -> None:
    """Make a stage recompute its layers according to `training.activationCheckpointing`."""
    if mode is not ActivationCheckpointing.NONE:
        selective = mode is ActivationCheckpointing.SELECTIVE
        stage.run_layers = CheckpointedLayers(
            group_size(mode, every, len(stage.layers)), selective=selective, prepare=stage.prepare_layers
        )


def _operators() -> frozenset[Callable[..., Any]]:
    packets = (getattr(torch.ops.aten, name, None) for name in _SAVED_OPS)
    return frozenset(packet.default for packet in packets if packet is not None)


_SAVED_OPERATORS = _operators()


def _selective_policy(_: object, operator: Callable[..., Any], *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
