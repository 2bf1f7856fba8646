"""A BERT-like encoder (arXiv 1810.04805) that is not part of Meshwright, with the plan to train it in parallel.

It learns to predict masked bytes of Python source. Train on four ranks, then resume on two:

    torchrun --nproc-per-node 4 examples/own_module/encoder.py --tensor 2 --data 2 --zero 2 --stop 30 --directory D
    torchrun --nproc-per-node 2 examples/own_module/encoder.py --data 2 --zero 1 --directory D

`--check` prints the difference between the split and the unsplit module, and does not train.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import os

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.training import OptimizerSpec
from meshwright.protocol.run_config import Run
from meshwright_worker.custom_module.compare import differences
from meshwright_worker.custom_module.plan import ParallelPlan
from meshwright_worker.custom_module.trainer import CustomModuleTrainer
from meshwright_worker.distributed.mesh import Mesh, join_mesh
from meshwright_worker.rank.torchrun import task_from_environment

MASK, VOCABULARY = 256, 264
IGNORED = -100
ROWS = 16

PLAN = ParallelPlan(
    regions=("layers.*.attention", "layers.*.feed_forward"),
    column=("layers.*.attention.inputs.*", "layers.*.feed_forward.widen"),
    row=("layers.*.attention.output", "layers.*.feed_forward.narrow"),
    gathered=("output",),
    vocabulary=("tokens",),
    blocks=("layers.*",),
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
    """Attention and feed-forward layer, each with a norm after its residual sum, as in BERT."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention, self.first_norm = Attention(width, heads), nn.LayerNorm(width)
        self.feed_forward, self.second_norm = FeedForward(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] -> the same shape."""
        x = self.first_norm(x + self.dropout(self.attention(x)))
        return self.second_norm(x + self.dropout(self.feed_forward(x)))


class Encoder(nn.Module):
    """Predicts the logits of masked bytes. The output projection is tied to the embedding."""

    def __init__(
        self, width: int = 64, heads: int = 4, layers: int = 2, length: int = 64, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.output = nn.Linear(width, VOCABULARY)
        self.output.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=width**-0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [batch, length] -> [batch, length, vocabulary]."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def masked_loss(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The sum of the cross-entropy over the masked bytes, and their number."""
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


def train(mesh: Mesh, arguments: argparse.Namespace) -> None:
    """Train from the newest checkpoint to step `--stop`."""
    torch.manual_seed(0)
    optimizer = OptimizerSpec(learning_rate=1e-3, warmup_steps=5)
    trainer = CustomModuleTrainer(
        Encoder(), PLAN, masked_loss, mesh, steps=arguments.steps, optimizer=optimizer, zero_stage=arguments.zero
    )
    rows = ROWS // arguments.data

    def own_rows(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        first = mesh.coordinates.data * rows
        tokens, targets = (tensor[first : first + rows].to(mesh.device) for tensor in batch_of(step, ROWS))
        return [(tokens, targets)]

    last = min(arguments.stop or arguments.steps, arguments.steps)
    done = trainer.load(arguments.directory) if arguments.directory else 0
    for step in range(done + 1, last + 1):
        loss = trainer.step(step, own_rows(step))
        if mesh.rank == 0 and step % 10 == 0:
            logging.info("step %d loss %.4f", step, loss)
        if arguments.directory and (step % arguments.save_every == 0 or step == last):
            trainer.save(arguments.directory, step)
    held_out = trainer.evaluate(own_rows(0))
    if mesh.rank == 0:
        logging.info("after step %d, held out: loss %.4f", last, held_out)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, default=1, help="number of ranks that a layer is split over")
    parser.add_argument("--data", type=int, default=1, help="number of replicas")
    parser.add_argument("--zero", type=int, default=0, choices=[0, 1, 2, 3], help="ZeRO stage")
    parser.add_argument("--steps", type=int, default=50, help="number of steps of the run")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints: a restart repeats fewer")
    parser.add_argument("--stop", type=int, help="step to stop after, to resume later")
    parser.add_argument(
        "--directory",
        default=os.environ.get("MESHWRIGHT_CHECKPOINT_DIR"),
        help="checkpoint directory, on storage that all ranks share (default: that of the job)",
    )
    parser.add_argument(
        "--check", action="store_true", help="compare the split and the unsplit module, and do not train"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if ROWS % arguments.data:
        parser.error(f"--data {arguments.data}: must divide the {ROWS} rows of a step")
    run = Run(
        tensor=arguments.tensor,
        pipeline=1,
        data_parallel=arguments.data,
        micro_batches=1,
        parallelism=ParallelismSpec(sequence=False),
    )
    with join_mesh(task_from_environment(run)) as mesh:
        if not arguments.check:
            train(mesh, arguments)
            return
        torch.manual_seed(0)
        found = differences(Encoder(), PLAN, masked_loss, batch_of(1, ROWS), mesh)
        if mesh.rank == 0:
            worst = max(found, key=lambda name: found[name])
            logging.info("largest relative difference: %.1e, of %s", found[worst], worst)


if __name__ == "__main__":
    main()
