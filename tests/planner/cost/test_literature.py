"""Numbers that papers and textbooks give, as the planner and the schedules compute them."""

from __future__ import annotations

import pytest

from benchmarks.pipeline_bubble import predicted
from meshwright.api.parallelism import ContextMethod
from meshwright.layout import Layout
from meshwright.models.presets import published
from meshwright.planner.cost.accelerators import ACCELERATORS
from meshwright.planner.cost.collectives import LINK_EFFICIENCY, all_reduce
from meshwright.planner.cost.fabric import Fabric, FabricLevel, Span
from meshwright.planner.cost.frameworks import FRAMEWORKS
from meshwright.planner.cost.memory import Memory, worst_stage
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright.sequence_sharding import SequenceSharding, size

GIGA, TERA, PETA = 1e9, 1e12, 1e15
SEVEN_BILLION = published("llama-2-7b").model_copy(update={"vocab_size": 64_000, "name": "7b"})


def states(model: str, data: int = 1, zero_stage: int = 0) -> Memory:
    """What ZeRO's paper counts: fp16 parameters and gradients, fp32 masters and two moments."""
    architecture = SEVEN_BILLION if model == "7b" else published(model)
    work = Workload(architecture, 2048, data)
    return worst_stage(work, Strategy(data=data, zero_stage=zero_stage), FRAMEWORKS["megatron-deepspeed"])


def test_seven_billion_parameters_by_kind() -> None:
    """ZeRO, arXiv 1910.02054, section 3.1: 2 + 2 + 4 + 4 + 4 bytes of each."""
    memory = states("7b")
    masters_and_moments = (memory.master + memory.optimizer) / 3
    kinds = [memory.parameters, memory.gradients, *[masters_and_moments] * 3]
    assert [kind / GIGA for kind in kinds] == pytest.approx([14, 14, 28, 28, 28], rel=0.01)


def test_seventy_billion_parameters_in_16_bits_and_with_their_states() -> None:
    memory = states("llama-3.1-70b")
    assert memory.parameters / GIGA == pytest.approx(140, rel=0.02)
    assert memory.states / TERA == pytest.approx(1.12, rel=0.02)


@pytest.mark.parametrize(("stage", "factor"), [(1, 4), (2, 8), (3, 1024)])
def test_zero_divides_states_by_4_by_8_and_by_the_number_of_ranks(stage: int, factor: float) -> None:
    """ZeRO, arXiv 1910.02054, abstract of section 3; traffic: `tests/distributed/test_traffic.py`."""
    whole, part = states("7b"), states("7b", data=1024, zero_stage=stage)
    assert whole.states / part.states == pytest.approx(factor, rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "bubble"),
    [("naive", 4, 0.75), ("gpipe", 4, 3 / 7), ("gpipe", 16, 3 / 19), ("1f1b", 16, 3 / 19)],
)
def test_bubbles_of_four_stages(schedule: str, micro_batches: int, bubble: float) -> None:
    """75, 43 and 16% of the step: (S - 1) / (M + S - 1). GPipe's (S - 1) / M is the same over the busy time."""
    assert predicted(schedule, 4, micro_batches) == pytest.approx({"simulated": bubble, "closed form": bubble})
    if schedule != "naive":
        assert bubble / (1 - bubble) == pytest.approx(3 / micro_batches)


@pytest.mark.parametrize(("rate", "seconds"), [(200, 0.14), (100, 0.28)])
def test_the_gradients_of_seven_billion_parameters_are_reduced(rate: float, seconds: float) -> None:
    """14 GB in 16 bits cross each link about twice (Patarasuk and Yuan, 2009)."""
    fabric = Fabric((FabricLevel("network", 1 << 30, rate * GIGA / LINK_EFFICIENCY),))
    assert all_reduce(states("7b").gradients, Span((64,)), fabric) == pytest.approx(seconds, rel=0.03)


def test_ranks_of_64_in_three_dimensions() -> None:
    layout = Layout(tensor=4, pipeline=4, data=4)
    assert layout.world_size == Layout(tensor=8, pipeline=4, data=2).world_size == 64
    assert layout.tensor_groups()[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [layout.coordinates(rank).data for rank in (15, 16)] == [0, 1]


def test_a_rank_of_16_has_8k_tokens_of_128k() -> None:
    """Llama 3, arXiv 2407.21783, table 4."""
    parts = SequenceSharding(ContextMethod.RING_ZIG_ZAG, 16).slices(131_072)
    assert {size(part) for part in parts} == {8192}


def test_llama_3_took_38_yotta_flops() -> None:
    """arXiv 2407.21783, section 3.2: 405 billion parameters, 15.6 trillion tokens."""
    assert 6 * published("llama-3.1-405b").parameters * 15.6e12 == pytest.approx(3.8e25, rel=0.01)


@pytest.mark.parametrize(("teraflops", "share"), [(400, 0.40), (380, 0.38)])
def test_llama_3_ran_at_forty_percent_of_the_peak(teraflops: float, share: float) -> None:
    """arXiv 2407.21783, table 4, at 8K and 128K tokens. 57%, which some give for 400 of 989, is wrong."""
    assert teraflops * TERA / ACCELERATORS["H100-SXM5-80GB"].half == pytest.approx(share, abs=0.006)


def test_megatron_ran_at_a_quarter_of_the_peak_of_512_v100() -> None:
    """arXiv 1909.08053: 8.3 billion parameters at 15.1 PFLOP/s."""
    assert 15.1 * PETA / (512 * ACCELERATORS["V100-SXM2-32GB"].half) == pytest.approx(0.236, abs=0.001)


def test_rates_of_data_sheets() -> None:
    hopper, blackwell = ACCELERATORS["H100-SXM5-80GB"], ACCELERATORS["B300"]
    assert (hopper.half / TERA, hopper.single / TERA) == (989, 67)
    assert hopper.fp8 == pytest.approx(2 * hopper.half, rel=0.01)
    assert (hopper.link / GIGA, blackwell.link / GIGA) == (900 / 2, 1800 / 2), "NVLink 4 and 5, one way"
    assert (hopper.nic / GIGA, blackwell.nic / GIGA) == (400 / 8, 800 / 8), "NDR and XDR"
    # A slot of PCIe 5 carries 63 GB/s, one of PCIe 4 half of it; copies reach less.
    assert 0.75 * 63 < hopper.host / GIGA < 63
    assert 0.7 * 31.5 < ACCELERATORS["A100-SXM4-80GB"].host / GIGA < 31.5
