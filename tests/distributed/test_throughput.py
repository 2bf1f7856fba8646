"""What `benchmarks/throughput.py` is made of: the interval of a ratio, and bare loops that do the same work as ours."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from benchmarks._contests import Times, contest, run_of
from benchmarks._gpu_settings import ENTRIES, H100, H200, Entry
from benchmarks._gpu_throughput import MODELS, train_for
from benchmarks._pairs import FEWEST, in_turns, ratio_of
from meshwright.models.architecture import Architecture
from meshwright_worker.trainer.train import validate_run
from tests.distributed.rank_pool import RankPool
from tests.tiers import mostly_long

TINY = Architecture(layers=2, hidden_size=32, intermediate_size=48, heads=4, kv_heads=2, vocab_size=260)
SHORT = {"globalBatchSize": 4, "sequenceLength": 16}


def test_a_ratio_is_the_median_between_two_of_its_pairs() -> None:
    ratio = ratio_of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 1000.0], [1.0] * 10)
    # 2 (1 + 10) / 2^10 is below 5%, 2 (1 + 10 + 45) / 2^10 is above: the second from either end.
    assert (ratio.low, ratio.median, ratio.high) == (2.0, 5.5, 9.0)


def test_the_interval_holds_the_true_ratio_as_often_as_it_says() -> None:
    draw = Random(0)
    held = 0
    for _ in range(1000):
        ours = [1.02 * draw.lognormvariate(0, 0.1) for _ in range(15)]
        ratio = ratio_of(ours, [draw.lognormvariate(0, 0.1) for _ in range(15)])
        held += ratio.low <= 1.02 <= ratio.high
    assert 945 <= held <= 985  # 96.5% by the binomial


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "within"), (1.05, "above"), (1.03, "undecided")])
def test_a_verdict_is_certain_or_none(factor: float, verdict: str) -> None:
    theirs = [1.0] * 8
    ours = [factor * (1 + (0.005 if pair % 2 else -0.005)) for pair in range(8)]
    assert ratio_of(ours, theirs).verdict(0.03) == verdict


@pytest.mark.parametrize(("ours", "theirs"), [([1.0] * 5, [1.0] * 5), ([1.0] * 8, [1.0] * 7), ([1.0] * 8, [0.0] * 8)])
def test_too_few_or_impossible_times_are_rejected(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="times"):
        ratio_of(ours, theirs)


def test_turns_begin_with_either_side_alternately() -> None:
    said: list[str] = []

    def side(name: str) -> Callable[[], float]:
        return lambda: float(said.append(name) or len(said))

    ours, theirs = in_turns(side("ours"), side("theirs"), 4)
    assert said == ["ours", "theirs", "theirs", "ours", "ours", "theirs", "theirs", "ours"]
    assert (ours, theirs) == ([1.0, 4.0, 5.0, 8.0], [2.0, 3.0, 6.0, 7.0])


@pytest.mark.parametrize(
    "shape",
    mostly_long(
        [{"micro_batches": 2}, {"data": 2}, {"pipeline": 2, "micro_batches": 4}], lambda shape: "data" not in shape
    ),
    ids=["one process", "ZeRO-3", "1F1B"],
)
def test_bare_loops_do_the_same_work(pool: RankPool, shape: dict[str, int]) -> None:
    # `contest` itself raises when the losses of the first two steps differ.
    times: list[Times] = pool.run(contest, run_of(TINY, SHORT, **shape), FEWEST, 1)
    assert all(min(*rank.ours, *rank.theirs) > 0 for rank in times)


@pytest.mark.parametrize("plain", [False, True], ids=["worker", "bare"])
def test_a_shape_is_trained_and_timed(pool: RankPool, plain: bool) -> None:
    run = run_of(TINY, {**SHORT, "precision": "bf16"}, micro_batches=2)
    (taken,) = pool.run(train_for, run, 2, plain, not plain)
    assert taken is not None
    assert (taken.profile is None) is plain
    assert taken.profile is None or taken.profile.kernels
    assert len(taken.seconds) == len(taken.losses) == 2
    # No device with known peak: no utilization is made up.
    assert (taken.memory, taken.mfu, taken.hfu) == (None, None, None)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.model} {entry.label}")
def test_settings_of_the_gpu_runs_are_valid(entry: Entry) -> None:
    for setting in entry.settings:
        validate_run(run_of(MODELS[entry.model], setting.training(), micro_batches=setting.micro_batches))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.model} {entry.label}")
def test_a_smaller_gpu_tries_only_what_may_fit(entry: Entry) -> None:
    assert entry.settings_for(None) == entry.settings_for(139.8) == entry.settings
    small = entry.settings_for(79.1)
    assert all(setting.gpu_memory == H100 for setting in small)
    # 8B with fp32 masters needs 128 GB for its states alone.
    assert bool(small) == ((entry.model, entry.label) != ("llama-3-8b", "bf16"))
    assert {setting.gpu_memory for setting in entry.settings} <= {H100, H200}
