"""All that the operator does in 300 seeded traces of virtual time is what it did when it was recorded.

Each trace stands in a file as a summary and a digest of everything it did: every write, every event, every generation,
every metric. Of the first thirty all of it stands in `full/`. Words for people have a file and a digest of their own.
`python -m tests.golden.operator.trace SEED` prints any trace whole, to be compared with that of another commit.
"""

from __future__ import annotations

import pytest

from tests.golden.files import check
from tests.golden.operator.trace import run
from tests.tiers import mostly_long

TRACES, BLOCK, FULL = 300, 10, 30


@pytest.mark.parametrize("first", mostly_long(range(0, TRACES, BLOCK), lambda first: first < FULL))
def test_traces(first: int) -> None:
    traces = {seed: run(seed) for seed in range(first, first + BLOCK)}
    for seed, trace in traces.items():
        if seed < FULL:
            # The longest form first: its failure says what differs, not only that something does.
            check(f"operator/traces/full/{seed:03}.jsonl", trace.short_lines())
            check(f"operator/traces/full/{seed:03}-text.jsonl", trace.texts())
    check(f"operator/traces/{first:03}.jsonl", {f"{seed:03}": trace.summary() for seed, trace in traces.items()})
    check(f"operator/traces/{first:03}-text.jsonl", {f"{seed:03}": trace.words() for seed, trace in traces.items()})
