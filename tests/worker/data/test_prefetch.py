"""Samples that are read while a step runs."""

from __future__ import annotations

import threading

import pytest
import torch

from meshwright_worker.data.batch import Batch
from meshwright_worker.data.prefetch import Prefetcher, StepSamples, pin_batch

CPU = torch.device("cpu")


def read(first: int) -> StepSamples:
    samples = torch.arange(first, first + 6).view(2, 3)
    return StepSamples(range(first, first + 2), samples, Batch.of(samples))


def test_the_next_samples_are_read_without_being_asked_for() -> None:
    there, asked, threads = threading.Event(), [], set()

    def watched(first: int) -> StepSamples:
        asked.append(first)
        threads.add(threading.current_thread().name)
        if first == 2:
            there.set()
        return read(first)

    ahead = Prefetcher(watched, CPU)
    assert list(ahead.take(0, 2).numbers) == [0, 1]
    assert there.wait(10), "nothing was read ahead"
    assert torch.equal(ahead.take(2, 4).samples, read(2).samples)
    # Training goes on elsewhere, as it does after a resume: what was read for nothing is dropped.
    assert torch.equal(ahead.take(10, None).batch.tokens, read(10).batch.tokens)
    ahead.close()
    assert asked == [0, 2, 4, 10]
    assert len(threads) == 1
    assert threading.current_thread().name not in threads


def test_what_cannot_be_read_is_reported_when_its_step_begins() -> None:
    def broken(first: int) -> StepSamples:
        if first == 2:
            raise OSError("shard 3 is damaged")
        return read(first)

    ahead = Prefetcher(broken, CPU)
    ahead.take(0, 2)
    with pytest.raises(OSError, match="shard 3"):
        ahead.take(2, 4)
    ahead.close()


def test_pinned_batches_have_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = read(0).batch
    assert not batch.tokens.is_contiguous()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # there is no GPU here
    pinned = pin_batch(batch, torch.device("cuda", 0))
    for name in ("tokens", "targets", "token_indices"):
        tensor = getattr(pinned, name)
        assert tensor.is_contiguous(), name
        assert torch.equal(tensor, getattr(batch, name))
