"""Checkpoints that a process next to each rank writes, and copies that are made during the next step."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from meshwright.api.checkpoint import CheckpointSpec, Staging
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.full_tensors import FullTensorReader
from meshwright_worker.checkpoint.manifest import check_files, read_manifest
from meshwright_worker.rank.task import Outcome
from tests.distributed.cases import train_fully
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.distributed.writer_cases import fail_with_a_writer, save_with_a_writer, train_with_a_writer
from tests.patience import patient
from tests.tiers import mostly_long


@pytest.mark.parametrize(
    "end", mostly_long(["nothing", "while it writes", "before it writes"], lambda end: end != "before it writes")
)
def test_a_writer_process_saves_until_it_dies_and_then_the_rank_does(pool: RankPool, tmp_path: Path, end: str) -> None:
    first, second = pool.run(save_with_a_writer, small_run(data=2), str(tmp_path), end)
    directory = CheckpointDirectory(tmp_path)
    assert directory.steps() == [4, 3, 2, 1]
    for step in directory.steps():
        files = directory.files(step)
        check_files(files, read_manifest(files))
        reader = FullTensorReader(files)
        assert torch.equal(reader.read("all"), torch.full((70, 7), float(step)))
        assert all(torch.equal(reader.read(f"of {rank}"), torch.arange(9) + step) for rank in range(2))
    assert "empty" in FullTensorReader(directory.files(4)).names
    for rank in (first, second):
        assert rank["errors"] == []
        assert rank["plans"] == 2, "steps 1 to 3 have the same plan"
        assert rank["mapped"] == (1, 1)
        assert rank["mapped at the end"] == (0, 0)
        assert rank["gone"]
    assert first["warnings"] == []
    killed = "the process that writes checkpoints was killed by signal 9: this rank writes them in a thread from now on"
    assert second["warnings"] == ([] if end == "nothing" else [killed])


def test_an_error_in_one_writer_fails_the_save_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, second = pool.run(fail_with_a_writer, small_run(data=2), str(tmp_path))
    assert first == second
    assert "a checkpoint could not be written: rank 1: NotADirectoryError" in first
    assert CheckpointDirectory(tmp_path).steps() == []


CHILD = """
import os, signal
from meshwright_worker.checkpoint.writer_process import start_writer
print(start_writer().process, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_ends_with_its_rank() -> None:
    child = subprocess.run([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, check=False)
    assert child.returncode == -signal.SIGKILL
    stat = Path(f"/proc/{int(child.stdout)}/stat")
    deadline = time.monotonic() + patient(10)
    # Whoever adopts the process reaps it: in a pod, the fork server.
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the writer lives on"
        time.sleep(0.01)


def overlapped(run: NativeRun) -> NativeRun:
    """The same run, with copies that are made during steps."""
    assert run.checkpoint is not None
    spec = CheckpointSpec.model_validate({**run.checkpoint.wire(), "staging": Staging.OVERLAPPED})
    return run.model_copy(update={"checkpoint": spec})


RUNS = {
    "one rank": small_run(),
    "ddp": small_run(data=2),
    "zero 1": small_run(data=2, zero=1),
    "zero 2": small_run(data=2, zero=2),
    "zero 3": small_run(data=2, zero=3),
    "tensor": small_run(tensor=2),
    "pipeline": small_run(pipeline=2),
    "dualpipe": small_run(pipeline=2, micro_batches=4, layers=4, parallelism={"schedule": "DualPipe"}),
    "context": small_run(context=2),
    "experts": small_run(data=2, expert=2, mixture="Mixtral"),
    "balanced experts": small_run(data=2, expert=2, mixture="DeepSeek-V3", zero=3),
    "pipedream": small_run(pipeline=2, micro_batches=1, clip=0.0, parallelism={"schedule": "PipeDream"}),
    "offloaded optimizer": small_run(data=2, zero=1, optimizer={"offload": "CPU"}),
    "offloaded parameters": small_run(data=2, zero=3, training={"parameter_offload": True}),
    "delayed fp8": small_run(training={"fp8": {"update": "Delayed", "history": 2}}),
    "compressed gradients": small_run(
        data=2, replicas={"bucket_elements": 4000, "compression": "TopK", "compression_density": 0.1}
    ),
    "islands": small_run(data=2, outer={"method": "DiLoCo", "islands": 2, "every_steps": 3}),
    "muon": small_run(data=2, zero=3, optimizer={"name": "Muon"}),
}


@pytest.mark.parametrize("name", mostly_long(RUNS, lambda name: name == "zero 3"))
def test_a_copy_made_during_the_next_step_is_the_state_before_it(
    pool: RankPool, tmp_path: Path, text: Path, name: str
) -> None:
    run = RUNS[name].model_copy(
        update={"checkpoint": RUNS[name].checkpoint.model_copy(update={"keep": 99})}  # type: ignore[union-attr]
    )
    roots = {"blocking": tmp_path / "blocking", "overlapped": tmp_path / "overlapped"}
    for kind, root in roots.items():
        answers = pool.run(
            train_fully, run if kind == "blocking" else overlapped(run), checkpoint_dir=root, data_dir=text
        )
        assert {outcome for outcome, _ in answers} == {Outcome.COMPLETE}
    steps = {kind: CheckpointDirectory(root).steps() for kind, root in roots.items()}
    assert steps["blocking"] == steps["overlapped"] == [8, 6, 3]
    for step in steps["blocking"]:
        wanted, found = (FullTensorReader(CheckpointDirectory(root).files(step)) for root in roots.values())
        assert wanted.names == found.names
        assert all(torch.equal(wanted.read(tensor), found.read(tensor)) for tensor in wanted.names)


def test_a_run_with_writer_processes_has_the_same_checkpoints(pool: RankPool, tmp_path: Path, text: Path) -> None:
    run = small_run(data=2, zero=3, steps=6)
    for train, root in ((train_fully, tmp_path / "thread"), (train_with_a_writer, tmp_path / "process")):
        answers = pool.run(train, overlapped(run), checkpoint_dir=root, data_dir=text)
        assert {outcome for outcome, _ in answers} == {Outcome.COMPLETE}
    for name in sorted(path.name for path in CheckpointDirectory(tmp_path / "thread").path(6).iterdir()):
        thread, process = (
            (CheckpointDirectory(tmp_path / way).path(6) / name).read_bytes() for way in ("thread", "process")
        )
        assert thread == process, name
