"""What ranks have imported before they are forked, hidden from the garbage collection that follows each case."""

from __future__ import annotations

import gc

import tests.distributed.cases
import tests.parity.measure  # noqa: F401

gc.collect()
gc.freeze()
