"""Copies between a GPU and the host: from pinned memory, and without a wait."""

from __future__ import annotations

import torch

from meshwright_worker.data.batch import Batch
from meshwright_worker.data.prefetch import pin_batch
from meshwright_worker.memory.activation_offload import HostCopier


def test_batches_are_pinned_and_arrive_whole(device: torch.device) -> None:
    samples = torch.randint(0, 1000, (8, 65), generator=torch.Generator().manual_seed(1))
    batch = pin_batch(Batch.of(samples), device)
    assert batch.tokens.is_pinned()
    assert batch.targets.is_pinned()
    assert batch.tokens.is_contiguous()
    moved = batch.to(device)
    torch.cuda.synchronize(device)
    assert torch.equal(moved.tokens.cpu(), samples[:, :-1])
    assert torch.equal(moved.targets.cpu(), samples[:, 1:])


def test_a_pinned_batch_is_copied_without_a_wait(device: torch.device) -> None:
    batch = pin_batch(Batch.of(torch.zeros(8, 65, dtype=torch.int64)), device)
    batch.to(device)  # the first copy may set something up
    torch.cuda.synchronize(device)
    torch.cuda._sleep(2_000_000_000)  # about a second
    done = torch.cuda.Event()
    batch.to(device)
    done.record()
    assert not done.query()
    torch.cuda.synchronize(device)


def test_offloaded_tensors_come_back_bit_by_bit(device: torch.device) -> None:
    copies = HostCopier(device)
    tensors = [torch.randn(64, 128, device=device).t(), torch.randn(1000, device=device).to(torch.bfloat16)]
    hosts = [copies.out(tensor) for tensor in tensors]
    assert all(host.is_pinned() for host in hosts)
    for tensor, host in zip(tensors, hosts, strict=True):
        back, arrived = copies.back(host, device)
        copies.wait(arrived, back)
        assert torch.equal(back, tensor)
