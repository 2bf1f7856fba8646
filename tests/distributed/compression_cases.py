"""Compressors as ranks run them, and what they are to compute, written out for all ranks in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from meshwright.api.data_parallel import DataParallelSpec
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.data.batch import Batch
from meshwright_worker.distributed.mesh import REPLICA, join_mesh
from meshwright_worker.parallel.data.compression.build import build_compressor
from meshwright_worker.parallel.data.gradient_buckets import buckets_of
from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer.train import build_trainer
from tests.distributed.cases import samples_of

SHAPES = [torch.Size(shape) for shape in ((12, 10), (7,), (9, 6), (3, 2))]
ELEMENTS = sum(shape.numel() for shape in SHAPES)


def gradients_of(rank: int, step: int) -> torch.Tensor:
    """One rank's bucket, [elements], fp64: part of it is the same on all ranks, as gradients of one model are."""
    common = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    own = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1000 + 10 * rank + step), dtype=torch.float64)
    return 1e-9 * (common + 0.3 * own)


def compress(
    task: RankTask, options: dict[str, Any], steps: int, dtype: torch.dtype, size: float = 1.0
) -> list[torch.Tensor]:
    """What the rank has for the sum over ranks, step by step, of gradients times `size`."""
    with join_mesh(task) as mesh:
        compressor = build_compressor(DataParallelSpec(**options), mesh.group(REPLICA))
        sums = []
        for step in range(steps):
            flat = (gradients_of(task.rank, step) * size).to(dtype)
            compressor.start(0, flat, SHAPES).finish(flat)
            sums.append(flat)
        return sums


def gradients_and_rest(
    task: RankTask[NativeRun], steps: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """By parameter, the sum over steps of the gradients of updates, and what this rank has left out at the end. Of the
    tokens of every second step, few have a target.
    """
    training, vocabulary = task.run.training, task.run.architecture.vocab_size
    with join_mesh(task) as mesh:
        trainer, summed = build_trainer(task.run, mesh), dict[str, torch.Tensor]()
        update = trainer.optimizer.step

        def add(gradients: Sequence[torch.Tensor], rate: float) -> None:
            for shard, gradient in zip(trainer.shards, gradients, strict=True):
                summed[shard.name] = summed.get(shard.name, torch.zeros_like(gradient)) + gradient
            update(gradients, rate)

        trainer.optimizer.step = add  # type: ignore[method-assign]
        share = training.global_batch_size // mesh.layout.data
        first = mesh.coordinates.data * share
        for step in range(1, steps + 1):
            samples = samples_of(step, training.global_batch_size, training.sequence_length, vocabulary)
            if step % 2 == 0:
                samples[:, 4:] = ~samples[:, 4:]
            trainer.step(step, Batch.of(samples[first : first + share]))
        trainer.drain()
        residuals = trainer.compression_state.tensors() if trainer.compression_state is not None else {}
        (bucket,) = buckets_of(trainer.shards, task.run.parallelism.data_parallel.bucket_elements)
        rest = dict[str, torch.Tensor]()
        for name, residual in residuals.items():
            if name.endswith(".left.0"):
                parts = torch.split(residual, [shard.local.numel() for shard in bucket])
                rest |= {shard.name: p.view_as(shard.local) for shard, p in zip(bucket, parts, strict=True)}
        return summed, rest


def top_k(ranks: int, steps: int, density: float) -> list[torch.Tensor]:
    left = [torch.zeros(ELEMENTS, dtype=torch.float64) for _ in range(ranks)]
    sums = []
    for step in range(steps):
        total = torch.zeros(ELEMENTS, dtype=torch.float64)
        for rank in range(ranks):
            wanted = gradients_of(rank, step) + left[rank]
            threshold = wanted.abs().sort(descending=True).values[math.ceil(density * ELEMENTS) - 1]
            sent = torch.where(wanted.abs() >= threshold, wanted, 0.0)
            left[rank] = wanted - sent
            total += sent
        sums.append(total)
    return sums


def power_sgd(ranks: int, steps: int, rank: int) -> list[torch.Tensor]:
    """Algorithm 1 and 2 of arXiv 1905.13727 for every matrix, with the mean of ranks; whole for what is no matrix."""
    left = [torch.zeros(ELEMENTS, dtype=torch.float64) for _ in range(ranks)]
    factors = {
        index: torch.randn(shape[1], rank, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        for index, shape in enumerate(SHAPES)
        if len(shape) == 2 and sum(shape) * rank < shape.numel()
    }
    sums = []
    for step in range(steps):
        wanted = [gradients_of(one, step) + left[one] for one in range(ranks)]
        means, offset = [], 0
        for index, shape in enumerate(SHAPES):
            parts = [one[offset : offset + shape.numel()].view(shape) for one in wanted]
            offset += shape.numel()
            if index not in factors:
                means.append((sum(parts) / ranks).flatten())
                continue
            p, _ = torch.linalg.qr(sum(part @ factors[index] for part in parts) / ranks)
            factors[index] = sum(part.T @ p for part in parts) / ranks
            means.append((p @ factors[index].T).flatten())
        mean = torch.cat(means)
        sums.append(mean * ranks)
        left = [own - _sent(own, mean, factors) for own in wanted]
    return sums


def _sent(own: torch.Tensor, mean: torch.Tensor, factors: dict[int, torch.Tensor]) -> torch.Tensor:
    sent, offset = own.clone(), 0
    for index, shape in enumerate(SHAPES):
        if index in factors:
            sent[offset : offset + shape.numel()] = mean[offset : offset + shape.numel()]
        offset += shape.numel()
    return sent


def true_sums(ranks: int, steps: int) -> list[torch.Tensor]:
    return [sum_of([gradients_of(rank, step) for rank in range(ranks)]) for step in range(steps)]


def sum_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors)).sum(dim=0)
