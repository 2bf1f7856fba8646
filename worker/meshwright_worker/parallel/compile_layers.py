"""Compiles layers one by one with torch.compile: one graph serves all identical layers and is compiled once.

A layer's hooks, above all the gathering of its parameters, stay outside of the graph. Collectives inside a block break
the graph into pieces; each matrix product is still fused with its neighbors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshwright_worker.memory.activation_checkpointing import selective_checkpoint
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.parallel.tensor.async_tensor_parallel import ring_matmuls
from meshwright_worker.precision.fp8.scaling_recipe import fp8_recipes


def compile_layers(
    stage: DecoderStage, backend: str | Callable[..., Any] = "inductor", *, selective: bool = False
) -> None:
    """Make the blocks of a stage run compiled code from their first batch on; `backend` is torch.compile's.

    With `selective`, what the blocks save is decided inside their graphs, see `selective_checkpoint`. A block that
    breaks its graph then raises `torch._dynamo.exc.Unsupported` in its first pass.
    """
    for product in fp8_recipes(stage):
        product.compile()
    for ring in ring_matmuls(stage):
        ring.compile()
    for block in stage.layers.values():
        run = selective_checkpoint(block.forward) if selective else block.forward
        block.forward = torch.compile(run, backend=backend, fullgraph=selective)
