"""Takes training steps on the fake GPU; `main` runs in a process that has it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks._contests import OurLoop, random_tokens
from meshwright.api.data import Packing
from meshwright.api.parallelism import ExpertDispatch
from meshwright.api.precision import Precision
from meshwright.data.tokenizers import BYTE_SEPARATOR
from tests.distributed.configs import small_run
from tests.worker.fake_gpu.gpu import GPU, fake_gpu
from tests.worker.simulated import simulated_mesh

RUNS: dict[str, dict[str, Any]] = {
    "dense": {},
    "chunked loss": {"training": {"loss_chunk_tokens": 24}},
    "mixture": {"mixture": "Mixtral"},
    "mixture with a capacity": {
        "mixture": "ST-MoE",
        "parallelism": {"expert_dispatch": ExpertDispatch.PADDED},
    },
    "fp8": {"training": {"fp8": {}}},
    "fp8 with delayed scales": {"training": {"fp8": {"update": "Delayed"}}},
    "bf16 without master weights": {"training": {"master_weights": False}},
    "packed documents": {"packing": Packing.DOCUMENTS},
    "packed documents in one kernel": {"training": {"varlen_attention": True}, "packing": Packing.DOCUMENTS},
    "adapters": {"training": {"lora": {"rank": 4}}},
    "Muon": {"optimizer": {"name": "Muon"}},
    "tensor parallelism": {"tensor": 2},
    "early updates": {
        "data": 2,
        "zero": 1,
        "replicas": {"strategy": "ZeRO"},
        "training": {"sharded_masters": {}},
        "optimizer": {"early_launch": True},
    },
}


def waits_of_a_step(name: str) -> list[str]:
    """Where the host waits in the second step of a run."""
    run = small_run(precision=Precision.BF16, layers=1, hidden_size=64, intermediate_size=96, **RUNS[name])
    with simulated_mesh(run, 0) as mesh, fake_gpu() as waits:
        loop = OurLoop(run, replace(mesh, device=GPU))
        text = random_tokens(run.architecture, run.training, 0)
        text[:, 5] = BYTE_SEPARATOR
        loop.step(1, text)
        batch = loop.batch(text)
        waits.clear()
        loop.trainer.step(2, batch)
        return list(waits)


def reads_a_number() -> None:
    torch.ones(3, device=GPU).sum().item()


def copies_from_pageable_memory() -> None:
    torch.ones(3).to(GPU, non_blocking=True)


def copies_and_waits() -> None:
    torch.ones(3).pin_memory().to(GPU)


def fills_from_the_host() -> None:
    torch.empty(3, device=GPU).copy_(torch.ones(3))


def copies_from_pinned_memory() -> None:
    torch.ones(3).pin_memory().to(GPU, non_blocking=True)


def adds_tensors_of_two_devices() -> None:
    torch.ones(3, device=GPU) + torch.ones(3)


OPERATIONS: list[Callable[[], None]] = [
    reads_a_number,
    copies_from_pageable_memory,
    copies_and_waits,
    fills_from_the_host,
    copies_from_pinned_memory,
    adds_tensors_of_two_devices,
]


def outcome_of(operation: Callable[[], None]) -> str:
    """Whether it waits, or what error it raises."""
    with fake_gpu() as waits:
        try:
            operation()
        except RuntimeError as error:
            return str(error)
        return "waits" if waits else ""


def main() -> None:
    """Print where each run of the command line waits, and what each operation comes to."""
    results: dict[str, Any] = {operation.__name__: outcome_of(operation) for operation in OPERATIONS}
    for name in sys.argv[1:]:
        results[name] = waits_of_a_step(name)
        print(name, results[name], file=sys.stderr, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
