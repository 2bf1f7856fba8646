"""A step waits for its device once: where the sums of its results are read."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.api.parallelism import ExpertDispatch
from meshwright.api.precision import Precision
from meshwright.data.tokenizers import BYTE_SEPARATOR
from meshwright_worker.data.batch import make_batch
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer.trainer import Trainer
from tests.distributed.cases import samples_of
from tests.distributed.configs import small_run
from tests.distributed.host_syncs import host_syncs, without_fallback
from tests.distributed.rank_pool import RankPool
from tests.tiers import mostly_long

PADDED = {"parallelism": {"expert_dispatch": ExpertDispatch.PADDED}}
BF16 = {"precision": Precision.BF16}
FP8: dict[str, Any] = {"training": {"fp8": {}}, **BF16}

RUNS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense in bf16": {**BF16},
    "dense without master weights": {"training": {"master_weights": False}, **BF16},
    "dense, chunked loss": {"training": {"loss_chunk_tokens": 16}},
    "dense, 2 replicas": {"data": 2},
    "dense, ZeRO-3 on 2": {"data": 2, "zero": 3},
    "dense, tensor 2": {"tensor": 2},
    "dense, pipeline 2": {"pipeline": 2},
    "fp8": FP8,
    "fp8 with delayed scales": {"training": {"fp8": {"update": "Delayed"}}, **BF16},
    "fp8, tensor 2": {**FP8, "tensor": 2},
    "fp8, ZeRO-3 on 2": {**FP8, "data": 2, "zero": 3},
    "fp8, gathered in fp8": {"training": {"fp8": {"all_gather": True}}, **BF16, "data": 2, "zero": 3},
    "capacity": {"mixture": "ST-MoE", **PADDED},
    "capacity, one expert per token": {"mixture": "Switch", **PADDED},
    "capacity, experts on 2": {"mixture": "ST-MoE", "data": 2, "expert": 2, **PADDED},
    "capacity, experts on 2, tensor 2": {"mixture": "ST-MoE", "data": 2, "expert": 2, "tensor": 2, **PADDED},
    "capacity, DualPipe": {
        "mixture": "ST-MoE", "data": 2, "expert": 2, "pipeline": 2, "layers": 4, "micro_batches": 4,
        "parallelism": {**PADDED["parallelism"], "schedule": "DualPipe"},
    },
    "no capacity": {"mixture": "Mixtral"},
}  # fmt: skip


def waits_of_a_step(task: RankTask) -> list[str]:
    """Where this rank waits in its second step; the first one may set things up. The batch is on the host."""
    model, data, training = task.run.architecture, task.run.data, task.run.training
    with join_mesh(task) as mesh:
        trainer = Trainer(task.run, mesh)
        share = training.global_batch_size // mesh.layout.data
        samples = samples_of(1, training.global_batch_size, training.sequence_length, model.vocab_size)
        batch = make_batch(samples[mesh.coordinates.data * share :][:share], data, BYTE_SEPARATOR)
        trainer.step(1, batch)
        with host_syncs() as sites:
            trainer.step(2, batch)
        return without_fallback(sites)


OFTEN = {"dense", "dense, ZeRO-3 on 2", "fp8", "capacity", "capacity, experts on 2"}


@pytest.mark.parametrize("name", mostly_long(RUNS, OFTEN.__contains__))
def test_the_host_waits_once_in_a_step(pool: RankPool, name: str) -> None:
    for sites in pool.run(waits_of_a_step, small_run(**RUNS[name])):
        assert len(sites) == 1, sites
        assert sites[0].startswith("trainer/trainer.py:")


def test_sizes_of_an_exchange_of_rows_cost_a_wait_in_each_mixture(pool: RankPool) -> None:
    """What the padded dispatch avoids, and proof that waits are seen."""
    run = small_run(data=2, expert=2, mixture="ST-MoE", micro_batches=1)
    for sites in pool.run(waits_of_a_step, run):
        assert (
            len([site for site in sites if site.startswith("parallel/expert/dispatch.py:")]) == run.architecture.layers
        )
