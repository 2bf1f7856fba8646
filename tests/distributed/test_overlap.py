"""DualPipe overlaps: experts' exchanges of one pass run during the other pass's products, and a trace shows it."""

from __future__ import annotations

import pytest

from meshwright.protocol.run_config import NativeRun
from tests.distributed.configs import small_run
from tests.distributed.overlap_trace import Trace, trace_a_step
from tests.distributed.rank_pool import RankPool


def run_of(schedule: str) -> NativeRun:
    layout = {"pipeline": 2, "data": 2, "expert": 2, "micro_batches": 6, "batch": 12}
    return small_run(**layout, mixture="Mixtral", layers=4, parallelism={"schedule": schedule})


@pytest.mark.parametrize("schedule", ["DualPipe", pytest.param("DualPipeV", marks=pytest.mark.long)])
def test_each_pass_of_a_pair_computes_during_the_others_exchanges(pool: RankPool, schedule: str) -> None:
    """arXiv 2412.19437, section 3.2.1: dispatch and combine, forward and backward."""
    run = run_of(schedule)
    traces: list[Trace] = pool.run(trace_a_step, run, False)
    for trace in traces:
        assert trace.pairs
        for forward, backward in trace.pairs:
            assert trace.hidden(forward, backward), f"nothing is computed by {backward} while {forward} exchanges"
            assert trace.hidden(backward, forward), f"nothing is computed by {forward} while {backward} exchanges"
        in_pairs = {action for pair in trace.pairs for action in pair}
        # A pass that has no partner waits for its exchanges.
        assert {e.of for e in trace.exchanges for p in trace.products if e.holds(p)} <= in_pairs
    for trace in pool.run(trace_a_step, run, True):
        assert trace.exchanges
        assert not [e for e in trace.exchanges for p in trace.products if e.holds(p)]
