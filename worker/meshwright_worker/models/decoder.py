"""One pipeline stage of a decoder; without a pipeline, the only stage is the entire model.

A stage builds only its own layers, and names them by their index in the model. A parameter therefore has the same name
in every layout; initial weights and checkpoints rely on this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from meshwright.layout import split_layers
from meshwright.models.architecture import Architecture
from meshwright_worker.data.batch import TokenMetadata
from meshwright_worker.models.attention import Attention, LatentAttention
from meshwright_worker.models.layers import Linear, NoDropout, PositionEmbedding, TokenEmbedding, TokenLoss, build_norm
from meshwright_worker.models.moe import build_feed_forward
from meshwright_worker.models.rotary import RotaryEmbedding, rotary_embeddings


class Block(nn.Module):
    """A pre-norm residual block. The sub-layers' outputs may be normalized, too."""

    def __init__(self, model: Architecture, rotary: RotaryEmbedding | None, layer: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(model)
        kind = Attention if model.latent is None else LatentAttention
        self.attention = kind(model, rotary, layer)
        self.feed_forward_norm = build_norm(model)
        self.feed_forward = build_feed_forward(model, layer)
        self.attention_dropout: nn.Module = NoDropout()
        self.feed_forward_dropout: nn.Module = NoDropout()
        self.attention_output_norm = build_norm(model) if model.output_norms else None
        self.feed_forward_output_norm = build_norm(model) if model.output_norms else None

    def forward(self, x: torch.Tensor, token_metadata: TokenMetadata) -> torch.Tensor:
        """[batch, positions, hidden] -> the same shape."""
        attended = self.attention(self.attention_norm(x), token_metadata)
        if self.attention_output_norm is not None:
            attended = self.attention_output_norm(attended)
        x = x + self.attention_dropout(attended, token_metadata)
        fed = self.feed_forward(self.feed_forward_norm(x))
        if self.feed_forward_output_norm is not None:
            fed = self.feed_forward_output_norm(fed)
        summed: torch.Tensor = x + self.feed_forward_dropout(fed, token_metadata)
        return summed


LayerRunner = Callable[[Sequence[Block], torch.Tensor, TokenMetadata], torch.Tensor]
"""A function that runs layers on hidden states: `run_in_order`, or one with the same result that saves less for the
backward pass.
"""


def run_in_order(layers: Sequence[Block], x: torch.Tensor, token_metadata: TokenMetadata) -> torch.Tensor:
    """Run hidden states [batch, positions, hidden] through one layer after the other."""
    for layer in layers:
        x = layer(x, token_metadata)
    return x


class DecoderStage(nn.Module):
    """Consecutive layers, with the embedding in the first stage and the output in the last.

    `layer_indices` defaults to `split_layers(layers, stages)[stage]`. With tied embeddings the last stage has the
    embedding's matrix too, under the same name: the gradients of both copies are summed.

    Build it on the meta device if only a shard of it is to be kept; `init_weights` then fills it.
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
        self.rotary, self.window_rotary = rotary_embeddings(model)
        if self.is_first or (self.is_last and self.tied):
            self.embedding = TokenEmbedding(model.vocab_size, model.hidden_size)
        if self.is_first:
            self.embedding_dropout: nn.Module = NoDropout()
            self.positions = PositionEmbedding(model.positions, model.hidden_size) if model.positions else None
        # Rounded to the format that it is multiplied in, as published code does.
        self.embedding_factor = float(torch.tensor(model.embedding_factor, dtype=compute, device="cpu"))
        layer_indices = split_layers(model.layers, stages)[stage] if layer_indices is None else layer_indices
        self.layers = nn.ModuleDict(
            {str(index): Block(model, self._rotary_of(model, index), index) for index in layer_indices}
        )
        if self.is_last:
            self.norm = build_norm(model)
            self.output = Linear(model.hidden_size, model.vocab_size)
            self.loss = TokenLoss()
        self.tie()

    def _rotary_of(self, model: Architecture, layer: int) -> RotaryEmbedding | None:
        return self.window_rotary if model.window_of(layer) else self.rotary

    def tie(self) -> None:
        """Use the token embedding as the output matrix, if the model ties them. Call again after parameters were
        replaced.
        """
        if self.tied and self.is_last:
            self.output.weight = self.embedding.weight

    def forward(
        self, x: torch.Tensor, targets: torch.Tensor | None = None, token_metadata: TokenMetadata | None = None
    ) -> torch.Tensor:
        """Run the stage on one micro-batch.

        Args:
            x: tokens, int64 [batch, positions], for the first stage; otherwise the previous stage's output, hidden
                states [batch, positions, hidden] (a slice of the positions under sequence parallelism).
            targets: the tokens to predict, [batch, positions]; only for the last stage.
            token_metadata: positions and documents of the tokens; None for one document per row, from position 0 on.

        Returns:
            Hidden states. From the last stage: the loss summed over all targets, fp32 [], if targets were given, else
            logits [batch, positions, vocabulary].
        """
        token_metadata = token_metadata or TokenMetadata()
        if self.is_first:
            x = self._embed(x, token_metadata)
        self.prepare_layers(x, token_metadata)
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

    def prepare_layers(self, x: torch.Tensor, token_metadata: TokenMetadata) -> None:
        """Compute what all layers need of a micro-batch, for hidden states in the format of `x` and on its device.

        Before the layers: compiled layers would include the table in their graph, and compile twice. They also cache
        only the last micro-batch's, so what they do themselves would depend on which one has run before.
        """
        if token_metadata.positions is None and token_metadata.token_indices is not None:
            for rotary in (self.rotary, self.window_rotary):
                if rotary is not None:
                    rotary.table(token_metadata.token_indices.shape[1], x)
        for layer in self.layers.values():
            layer.attention.core.prepare(token_metadata, x.device)  # type: ignore[union-attr, operator]

    def _embed(self, tokens: torch.Tensor, token_metadata: TokenMetadata) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens).to(self.compute)
        if self.embedding_factor != 1.0:
            x = x * self.embedding_factor
        if self.positions is not None:
            x = x + self.positions(tokens, token_metadata.positions).to(self.compute)
        dropped: torch.Tensor = self.embedding_dropout(x, token_metadata)
        return dropped
