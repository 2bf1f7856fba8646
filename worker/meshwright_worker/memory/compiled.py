"""Layers compiled one by one by torch.compile: one graph serves all that are alike, and compiles once.

What a layer's hooks do, gathering its parameters above all, stays outside of the graph. Collectives inside of a block
break the graph in pieces: each matrix product and its neighbours are still fused.
"""

from __future__ import annotations

import torch

from meshwright_worker.models.llama import DecoderStage


def compile_layers(stage: DecoderStage) -> None:
    """Let the blocks of a stage run compiled code from their first batch on."""
    for block in stage.layers.values():
        block.forward = torch.compile(block.forward)
