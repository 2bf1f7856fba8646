"""What ranks of the tests of the writer process run."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from meshwright.api.checkpoint import Retention
from meshwright.models.presets import PRESETS
from meshwright_worker.checkpoint import async_save
from meshwright_worker.checkpoint.async_save import AsyncCheckpointer
from meshwright_worker.checkpoint.directory import CheckpointDirectory, LocalSink
from meshwright_worker.checkpoint.manifest import LayoutRecord, Manifest, TrainingState
from meshwright_worker.checkpoint.store import Tier
from meshwright_worker.checkpoint.writer_process import WriterProcess, set_writer, start_writer
from meshwright_worker.checkpoint_errors import CheckpointError
from meshwright_worker.rank.task import RankTask
from tests.distributed.cases import train_fully
from tests.distributed.mesh_cache import kept_mesh, uses_kept_mesh


class Texts(logging.Handler):
    """The warnings of the writer."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def writer_of_this_rank(warnings: Texts | None = None) -> Iterator[WriterProcess]:
    """A writer process that saves of this rank use."""
    writer = start_writer()
    set_writer(writer)
    handler = warnings or Texts()
    logging.getLogger("meshwright_worker").addHandler(handler)
    try:
        yield writer
    finally:
        logging.getLogger("meshwright_worker").removeHandler(handler)
        set_writer(None)
        writer.close()


def manifest_of(step: int) -> Manifest:
    return Manifest(
        state=TrainingState(step=step),
        architecture=PRESETS["tiny"],
        seed=0,
        sequence_length=8,
        stream="s",
        layout=LayoutRecord(tensor=1, pipeline=1, data=2, zero_stage=0),
    )


def shared_mappings(process: int | str) -> int:
    """How many pieces of memory for checkpoints a process maps."""
    return Path(f"/proc/{process}/maps").read_text().count("memfd:meshwright-checkpoint")


def is_gone(process: int) -> bool:
    """Whether there is neither such a process nor a zombie."""
    return not Path(f"/proc/{process}").exists()


@uses_kept_mesh
def save_with_a_writer(task: RankTask, root: str, end: str) -> dict[str, Any]:
    """Save steps 1 to 4; `end` says what happens to rank 1's writer during step 3."""
    seen: dict[str, Any] = {"plans": 0, "errors": []}
    plan = async_save.local_plan

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen["plans"] += 1
        return plan(*args, **kwargs)

    async_save.local_plan = counted
    warnings = Texts()
    try:
        with kept_mesh(task) as mesh, writer_of_this_rank(warnings) as writer:
            saver = AsyncCheckpointer([Tier(CheckpointDirectory(Path(root)), Retention(9))], mesh)
            for step in range(1, 5):
                tensors = {"all": torch.full((70, 7), float(step)), f"of {task.rank}": torch.arange(9) + step}
                if step == 4:
                    tensors["empty"] = torch.empty(0, 3)
                dies = end != "nothing" and step == 3 and task.rank == 1
                if dies:
                    os.kill(writer.process, signal.SIGSTOP)
                saver.begin(tensors, manifest_of(step))
                if dies:
                    # The thread waits for the stopped process by now, or meets a dead one.
                    threading.Event().wait(0.2 if end == "while it writes" else 0.0)
                    os.kill(writer.process, signal.SIGKILL)
                try:
                    saver.take_finished(wait=True)
                except CheckpointError as error:
                    seen["errors"].append(str(error))
                if step == 2:
                    seen["mapped"] = shared_mappings(writer.process), shared_mappings("self")
            del saver, tensors
            AsyncCheckpointer([], mesh)
            process = writer.process
            seen["mapped at the end"] = (
                shared_mappings(process) if not is_gone(process) else 0,
                shared_mappings("self"),
            )
        seen["gone"] = is_gone(process)
        seen["warnings"] = warnings.texts
        return seen
    finally:
        async_save.local_plan = plan


class BelowAFile(CheckpointDirectory):
    """A directory in which nobody can write."""

    def sink(self, step: int) -> LocalSink:
        return LocalSink(self.root / "file" / "below")


@uses_kept_mesh
def fail_with_a_writer(task: RankTask, root: str) -> str:
    """Why a save fails whose directory one rank's writer cannot use."""
    with kept_mesh(task) as mesh, writer_of_this_rank():
        directory = (BelowAFile if task.rank == 1 else CheckpointDirectory)(Path(root))
        saver = AsyncCheckpointer([Tier(directory, Retention(9))], mesh)
        saver.begin({f"of {task.rank}": torch.ones(3)}, manifest_of(1))
        try:
            saver.take_finished(wait=True)
        except CheckpointError as error:
            return str(error)
        return ""


def train_with_a_writer(task: RankTask) -> Any:
    """`train_fully` of a rank that has a writer process."""
    with writer_of_this_rank():
        return train_fully(task)
