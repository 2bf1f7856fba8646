"""What ranks have imported before they are forked, hidden from the garbage collection that follows each case."""

from __future__ import annotations

import gc
import importlib
import sys

from meshwright_worker.trainer.train import preload_for
from tests.distributed.configs import small_run


def compiler_is_imported() -> bool:
    return "torch._dynamo" in sys.modules


COMPILER_IMPORTED_BY = {"the runtime": compiler_is_imported()}
"""Whether the compiler is imported once there is the runtime, and after what it preloads for a run."""
for option in (None, "Full"):
    preload_for(small_run(training={"activation_checkpointing": option}))
    COMPILER_IMPORTED_BY[f"checkpoints: {option}"] = compiler_is_imported()

for module in ("tests.distributed.cases", "tests.parity.measure"):
    importlib.import_module(module)

gc.collect()
gc.freeze()
