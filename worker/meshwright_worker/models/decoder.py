"""One pipeline stage of a decoder; the whole model is the one stage of one.

A stage makes only its own layers, and names them by their index in the model: a parameter has the same name in every
layout, which is what initial weights and checkpoints go by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from meshwright.layout import split_layers
from meshwright.models.architecture import Architecture
from meshwright_worker.data.batch import TokenMetadata
from meshwright_worker.models.layers import (
    Block,
    Linear,
    NoDropout,
    PositionEmbedding,
    TokenEmbedding,
    TokenLoss,
    build_norm,
)
from meshwright_worker.models.moe import build_feed_forward
from meshwright_worker.models.rotary import RotaryEmbedding

LayerRunner = Callable[[Sequence[Block], torch.Tensor, TokenMetadata], torch.Tensor]
"""A way to run layers on hidden states: `run_in_order`, or one that gives the same and keeps less for the backward
pass.
"""


def run_in_order(layers: Sequence[Block], x: torch.Tensor, token_metadata: TokenMetadata) -> torch.Tensor:
    """Hidden states [batch, positions, hidden] through one layer after the other."""
    for layer in layers:
        x = layer(x, token_metadata)
    return x


class DecoderStage(nn.Module):
    """Some consecutive layers, with the embedding in the first stage and the output in the last.

    `layer_indices` are the layers, `split_layers(layers, stages)[stage]` when left out. With tied embeddings the
    last stage has
    the embedding's matrix too, under the same name: its holders add up their gradients.

    Built on the meta device where only a shard of it is to be kept; `initialize` then gives it its weights.
    """

    def __init__(
        self,
        model: Architecture,
        compute: torch.dtype,
        stage: int = 0,
        stages: int = 1,
        layer_indices: range | None = None,
    ) -> None:
        super().__init__()
        self.is_first = stage == 0
        self.is_last = stage == stages - 1
        self.compute = compute
        self.tied = model.tie_embeddings
        self.run_layers: LayerRunner = run_in_order
        self.chunked_loss: nn.Module | None = None
        rotates = model.rope_size > 0
        rotary = RotaryEmbedding(model.rope_size, model.rope_theta, model.rope_scaling) if rotates else None
        self.rotary = rotary
        if self.is_first or (self.is_last and self.tied):
            self.embedding = TokenEmbedding(model.vocab_size, model.hidden_size)
        if self.is_first:
            self.embedding_dropout: nn.Module = NoDropout()
            self.positions = PositionEmbedding(model.positions, model.hidden_size) if model.positions else None
        layer_indices = split_layers(model.layers, stages)[stage] if layer_indices is None else layer_indices
        self.layers = nn.ModuleDict(
            {str(index): Block(model, rotary, build_feed_forward(model, index)) for index in layer_indices}
        )
        if self.is_last:
            self.norm = build_norm(model)
            self.output = Linear(model.hidden_size, model.vocab_size)
            self.loss = TokenLoss()
        self.tie()

    def tie(self) -> None:
        """Let the output be the token embedding, if the model says so; again after parameters were replaced."""
        if self.tied and self.is_last:
            self.output.weight = self.embedding.weight

    def forward(
        self, x: torch.Tensor, targets: torch.Tensor | None = None, token_metadata: TokenMetadata | None = None
    ) -> torch.Tensor:
        """Run the stage on one micro-batch.

        Args:
            x: tokens, int64 [batch, positions], for the first stage; otherwise the previous stage's output, hidden
                states [batch, positions, hidden] (a slice of the positions under sequence parallelism).
            targets: the tokens to predict, [batch, positions]; for the last stage alone.
            token_metadata: where the tokens stand; None for one document a row, from position 0 on.

        Returns:
            Hidden states; from the last stage the loss summed over all targets, fp32 [], if it was given targets, and
            logits [batch, positions, vocabulary] otherwise.
        """
        token_metadata = token_metadata or TokenMetadata()
        if self.is_first:
            x = self._embed(x, token_metadata)
        if self.rotary is not None and token_metadata.positions is None and token_metadata.token_indices is not None:
            # Before the layers: compiled ones would make the table a part of their graph, and compile twice.
            self.rotary.table(token_metadata.token_indices.shape[1], x)
        x = self.run_layers([*self.layers.values()], x, token_metadata)  # type: ignore[list-item]
        if not self.is_last:
            return x
        x = self.norm(x)
        loss: torch.Tensor
        if targets is not None and self.chunked_loss is not None:
            loss = self.chunked_loss(x, self.output, targets)
            return loss
        logits: torch.Tensor = self.output(x)
        if targets is None:
            return logits
        loss = self.loss(logits, targets)
        return loss

    def _embed(self, tokens: torch.Tensor, token_metadata: TokenMetadata) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens).to(self.compute)
        if self.positions is not None:
            x = x + self.positions(tokens, token_metadata.positions).to(self.compute)
        dropped: torch.Tensor = self.embedding_dropout(x, token_metadata)
        return dropped
