"""A checkpoint of one process: what a rank does when there are no others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from meshwright_worker.checkpoint import save_plan
from meshwright_worker.checkpoint.directory import LocalSink
from meshwright_worker.checkpoint.manifest import FileRecord
from meshwright_worker.checkpoint.store import CheckpointSink


def save_alone(
    tensors: Mapping[str, torch.Tensor],
    target: Path | CheckpointSink,
    commit: Callable[[dict[str, FileRecord]], object],
) -> None:
    """Write the file of tensors and the index, then call `commit` with their records."""
    sink = LocalSink(target) if isinstance(target, Path) else target
    items = save_plan.local_plan(tensors, is_coordinator=True)
    planned = save_plan.global_plan([save_plan.encode_plan(items)])
    file = save_plan.file_of_rank(0)
    record = sink.write_tensors(file, save_plan.tensors_to_write(items, tensors))[1]
    commit({file: record, planned.index_name: sink.write(planned.index_name, planned.index)})
