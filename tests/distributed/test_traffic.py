"""Each technique sends what its paper says: these collectives, this often, of these sizes, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cases import count_a_step
from tests.distributed.comm_counter import Traffic
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.tiers import mostly_long

LAYERS, HIDDEN, VOCABULARY, LENGTH, BATCH = 3, 32, 260, 16, 8
FP32 = 4
AGREEMENT = 5 * 8
"""The step's one reduction over all ranks: loss, squared norm, targets and the stop flag in fp64."""


def parameters() -> int:
    architecture = small_run().architecture
    assert architecture is not None
    return architecture.parameters


def measured(pool: RankPool, **layout: Any) -> list[Traffic]:
    ranks: list[Traffic] = pool.run(count_a_step, small_run(**layout))
    return ranks


def without_agreement(traffic: Traffic, world: int) -> dict[str, tuple[int, int]]:
    found = dict(traffic.as_dict())
    calls, size = found.pop(f"all-reduce/{world}")
    if calls > 1:
        found[f"all-reduce/{world}"] = (calls - 1, size - AGREEMENT)
    return found


@pytest.mark.parametrize("replicas", mostly_long([2, 4], lambda replicas: replicas == 2))
def test_replicas_all_reduce_every_gradient_once(pool: RankPool, replicas: int) -> None:
    for traffic in measured(pool, data=replicas, micro_batches=2):
        counted = without_agreement(traffic, replicas)
        assert set(counted) == {f"all-reduce/{replicas}"}
        assert counted[f"all-reduce/{replicas}"][1] == FP32 * parameters()
        ring = 2 * (replicas - 1) / replicas
        assert traffic.sent() == round(ring * (FP32 * parameters() + AGREEMENT))


def test_zero_3_sends_half_as_much_again(pool: RankPool) -> None:
    """arXiv 1910.02054, section 7.2: two all-gathers of the parameters and a reduce-scatter of the gradients."""
    size = FP32 * parameters()
    for traffic in measured(pool, data=2, zero=3, micro_batches=1):
        counted = without_agreement(traffic, 2)
        assert {kind: amount for kind, (_, amount) in counted.items()} == {
            "all-gather/2": 2 * size,
            "reduce-scatter/2": size,
        }
        assert traffic.sent() == 1.5 * size + AGREEMENT


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_zero_2_sends_as_much_as_replicas(pool: RankPool, micro_batches: int) -> None:
    """Also with several micro-batches, which all use what the first one gathers."""
    size = FP32 * parameters()
    for traffic in measured(pool, data=2, zero=2, micro_batches=micro_batches):
        assert without_agreement(traffic, 2) == {
            "all-gather/2": (LAYERS + 1, size),
            "reduce-scatter/2": (LAYERS + 1, size),
        }
        assert traffic.sent() == size + AGREEMENT


def test_a_second_gather_only_from_neighbors(pool: RankPool) -> None:
    """ZeRO++, arXiv 2306.10209, section 3.2 (hpZ): the backward pass gathers within `reshardSize` ranks."""
    size = FP32 * parameters()
    for traffic in measured(pool, data=4, zero=3, replicas={"reshard_size": 2}, micro_batches=1):
        counted = without_agreement(traffic, 4)
        units = LAYERS + 1
        assert counted == {
            "all-gather/4": (units, size),
            "all-gather/2": (units, size),
            "reduce-scatter/4": (units, size),
        }


@pytest.mark.parametrize(
    ("zero", "replicas"), [(1, {}), (2, {}), (2, {"strategy": "ZeRO"})], ids=["ZeRO-1", "ZeRO-2", "ZeRO-2, flat shards"]
)
def test_sets_of_shards_reduce_their_parts_once_more(pool: RankPool, zero: int, replicas: dict[str, Any]) -> None:
    """HSDP (arXiv 2304.11277, section 3.2.2): collectives of ZeRO within a set, an all-reduce of a part over sets."""
    size = FP32 * parameters()
    options = {"shard_size": 2, **replicas}
    for traffic in measured(pool, data=4, zero=zero, replicas=options, micro_batches=1):
        counted = without_agreement(traffic, 4)
        assert {kind: amount for kind, (_, amount) in counted.items()} == {
            "reduce-scatter/2": size,
            "all-reduce/2": size // 2,
            "all-gather/2": size,
        }


@pytest.mark.parametrize("method", mostly_long(["LocalSGD", "DiLoCo"], lambda method: method == "DiLoCo"))
def test_islands_reduce_all_parameters_once_a_round(pool: RankPool, method: str) -> None:
    """arXiv 1805.09767 and 2311.08105; beside them one number, whether any island is asked to stop."""
    last, inner = ({"method": method, "islands": 2, "every_steps": steps} for steps in (2, 3))
    for traffic in measured(pool, data=2, outer=last, every=6):
        assert traffic.as_dict() == {"all-reduce/2": (2, FP32 * parameters() + FP32)}
    for traffic in measured(pool, data=2, outer=inner, every=6):
        assert traffic.as_dict() == {}


def test_tensor_parallelism_reduces_four_times_a_layer(pool: RankPool) -> None:
    """arXiv 1909.08053, section 3: two all-reduces forward, two backward. Beside them the embedding's forward, the
    output's backward, and per token three numbers of the loss."""
    micro_batches = 2
    stream = FP32 * BATCH * LENGTH * HIDDEN
    for traffic in measured(pool, tensor=2, sequence=False, micro_batches=micro_batches):
        calls, amount = without_agreement(traffic, 2)["all-reduce/2"]
        assert calls == micro_batches * (4 * LAYERS + 2 + 2)
        assert amount == (4 * LAYERS + 2) * stream + 3 * FP32 * BATCH * LENGTH


def test_sequence_parallelism_sends_the_same_in_other_collectives(pool: RankPool) -> None:
    """arXiv 2205.05198, section 4.2.2: an all-gather and a reduce-scatter in place of each all-reduce."""
    micro_batches = 2
    stream = FP32 * BATCH * LENGTH * HIDDEN
    (plain, *_), ranks = measured(pool, tensor=2, sequence=False), measured(pool, tensor=2)
    for traffic in ranks:
        expected = (micro_batches * (4 * LAYERS + 2), (4 * LAYERS + 2) * stream)
        assert traffic.as_dict()["all-gather/2"] == traffic.as_dict()["reduce-scatter/2"] == expected
        norms = 2 * LAYERS + 1
        assert traffic.sent() == plain.sent() + FP32 * HIDDEN * norms


@pytest.mark.parametrize("tensor", mostly_long([2, 4], lambda tensor: tensor == 2))
def test_asynchronous_tensor_parallelism_sends_the_same_to_neighbors(pool: RankPool, tensor: int) -> None:
    """ASPLOS 2023, 10.1145/3567955.3567959: rings of n - 1 messages take the place of collectives, beside all products.
    Those of the embedding, which has none, stay."""
    micro_batches, heads = 2, {"kv_heads": 4}
    stream = FP32 * BATCH * LENGTH * HIDDEN
    whole = measured(pool, tensor=tensor, **heads)
    for traffic, sequence in zip(
        measured(pool, tensor=tensor, parallelism={"tensor_overlap": True}, **heads), whole, strict=True
    ):
        counted = traffic.as_dict()
        rings = 8 * LAYERS + 2
        messages = (micro_batches * rings * (tensor - 1), rings * (tensor - 1) * stream // tensor)
        assert counted[f"send/{tensor}"] == counted[f"recv/{tensor}"] == messages
        assert counted[f"all-gather/{tensor}"] == counted[f"reduce-scatter/{tensor}"] == (micro_batches, stream)
        assert traffic.sent() == sequence.sent()


def test_stages_send_one_activation_and_one_gradient_a_micro_batch(pool: RankPool) -> None:
    micro_batches = 4
    expected = (micro_batches, FP32 * BATCH * LENGTH * HIDDEN)
    first, middle, last = measured(pool, pipeline=3, micro_batches=micro_batches)
    assert without_agreement(first, 3) == without_agreement(last, 3) == {"send/3": expected, "recv/3": expected}
    twice = tuple(2 * number for number in expected)
    assert without_agreement(middle, 3) == {"send/3": twice, "recv/3": twice}
