"""A BERT-like encoder (arXiv 1810.04805) that Meshwright knows nothing about, with the plan to train it in parallel.

Masked bytes of Python source are predicted. On two times two ranks:

    torchrun --nproc-per-node 4 examples/own_module/encoder.py --tensor 2 --data 2 --zero 2
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.training import OptimizerSpec
from meshwright.protocol import RunConfig
from meshwright_worker.mesh import joined
from meshwright_worker.own.plan import ParallelPlan
from meshwright_worker.own.trainer import OwnTrainer
from meshwright_worker.torchrun import task_from_environment

MASK, VOCABULARY = 256, 264
IGNORED = -100

PLAN = ParallelPlan(
    regions=("layers.*.attention", "layers.*.feed_forward"),
    column=("layers.*.attention.inputs.*", "layers.*.feed_forward.widen"),
    row=("layers.*.attention.output", "layers.*.feed_forward.narrow"),
    vocabulary=("tokens",),
    blocks=("layers.?",),
)


class Attention(nn.Module):
    """Attention in both directions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.inputs = nn.ModuleDict({name: nn.Linear(width, width) for name in ("query", "key", "value")})
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] -> the same shape."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for project in self.inputs.values()
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.output(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two matrices with GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] -> the same shape."""
        return self.narrow(F.gelu(self.widen(x)))


class Layer(nn.Module):
    """Attention and feed-forward layer, each normed after its residual sum, as in BERT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.first_norm = Attention(width, heads), nn.LayerNorm(width)
        self.feed_forward, self.second_norm = FeedForward(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] -> the same shape."""
        x = self.first_norm(x + self.attention(x))
        return self.second_norm(x + self.feed_forward(x))


class Encoder(nn.Module):
    """Bytes, some of them masked, to logits of what they are."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.output = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [batch, length] -> [batch, length, vocabulary]."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def masked_loss(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Cross-entropy summed over the masked bytes, and how many they are."""
    tokens, targets = batch
    logits = module(tokens).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED)
    return loss, int((targets != IGNORED).sum())


def batch_of(step: int, rows: int, length: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a step, the same on every rank: masked tokens and targets, int64 [rows, length]."""
    source = inspect.getsource(argparse) + inspect.getsource(json)
    text = torch.tensor(list(source.encode()))
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - length, (rows,), generator=generator)
    tokens = text[starts.unsqueeze(1) + torch.arange(length)]
    masked = torch.rand(tokens.shape, generator=generator) < 0.15
    return tokens.masked_fill(masked, MASK), tokens.masked_fill(~masked, IGNORED)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--data", type=int, default=1)
    parser.add_argument("--zero", type=int, default=0, choices=[0, 2, 3])
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run = RunConfig(
        tensor=arguments.tensor,
        pipeline=1,
        data_parallel=arguments.data,
        micro_batches=1,
        parallelism=ParallelismSpec(sequence=False),
    )
    with joined(task_from_environment(run)) as mesh:
        torch.manual_seed(0)
        optimizer = OptimizerSpec(learning_rate=1e-3, warmup_steps=5)
        trainer = OwnTrainer(
            Encoder(), PLAN, masked_loss, mesh, steps=arguments.steps, optimizer=optimizer, zero_stage=arguments.zero
        )
        rows = 16 // arguments.data
        for step in range(1, arguments.steps + 1):
            first = mesh.coordinates.data * rows
            mine = [tensor[first : first + rows].to(mesh.device) for tensor in batch_of(step, 16)]
            loss = trainer.step(step, [tuple(mine)])
            if mesh.rank == 0 and step % 10 == 0:
                logging.info("step %d loss %.4f", step, loss)


if __name__ == "__main__":
    main()
