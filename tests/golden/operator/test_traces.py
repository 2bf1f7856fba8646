"""The operator does in 300 seeded traces what it did when the golden files were recorded.

A file has a summary of each trace and a digest of all writes, events, generations and metrics. `full/` has the first
thirty traces entry by entry. Messages have their own files and digests. `python -m tests.golden.operator.trace SEED`
prints a whole trace, to compare it with that of another commit.
"""

from __future__ import annotations

import pytest

from tests.golden.files import check
from tests.golden.operator.trace import run
from tests.tiers import mostly_long

TRACES, BLOCK, FULL, ALWAYS = 300, 10, 30, 10


@pytest.mark.parametrize("first", mostly_long(range(0, TRACES, BLOCK), lambda first: first < ALWAYS))
def test_traces(first: int) -> None:
    traces = {seed: run(seed) for seed in range(first, first + BLOCK)}
    full = {seed: trace for seed, trace in traces.items() if seed < FULL}
    # Full traces before digests, which show only that there is a difference; everything else before messages.
    for seed, trace in full.items():
        check(f"operator/traces/full/{seed:03}.jsonl", trace.short_lines())
    check(f"operator/traces/{first:03}.jsonl", {f"{seed:03}": trace.summary() for seed, trace in traces.items()})
    for seed, trace in full.items():
        check(f"operator/traces/full/{seed:03}-text.jsonl", trace.texts())
    messages = {f"{seed:03}": trace.messages_summary() for seed, trace in traces.items()}
    check(f"operator/traces/{first:03}-text.jsonl", messages)
