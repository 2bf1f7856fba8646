"""Which device a rank's threads work on, and which kernels it asks for. The calls to CUDA are noted, not made."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from meshwright.api.checkpoint import Retention
from meshwright_worker.checkpoint.async_save import AsyncCheckpointer
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.store import Tier
from meshwright_worker.checkpoint_errors import CheckpointError
from meshwright_worker.data.prefetch import Prefetcher
from meshwright_worker.distributed import device
from meshwright_worker.distributed.mesh import join_process_group
from meshwright_worker.local_sgd.async_sgd import _report_errors
from meshwright_worker.rank.task import RankTask
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import free_port

GPU = torch.device("cuda", 3)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.device]:
    """By thread, the device that it was set to."""
    noted: dict[str, torch.device] = {}
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda given: noted.__setitem__(threading.current_thread().name, given)
    )
    return noted


def test_the_thread_that_writes_checkpoints_uses_the_ranks_device(
    taken: dict[str, torch.device], tmp_path: Path
) -> None:
    saver = AsyncCheckpointer(
        [Tier(CheckpointDirectory(tmp_path), Retention(1))], cast(Any, SimpleNamespace(device=GPU, rank=1))
    )
    saver.begin({}, cast(Any, SimpleNamespace(state=SimpleNamespace(step=1))))
    # There are no other ranks to save with.
    with pytest.raises(CheckpointError):
        saver.take_finished(wait=True)
    assert taken == {"checkpoint": GPU}


def test_the_parameter_servers_threads_use_the_ranks_device(taken: dict[str, torch.device]) -> None:
    served: list[torch.device] = []
    task = _report_errors(lambda: served.extend(taken.values()), cast(Any, None), GPU)
    thread = threading.Thread(target=task, name="served")
    thread.start()
    thread.join()
    assert served == [GPU]


def test_the_thread_that_reads_ahead_uses_the_ranks_device(taken: dict[str, torch.device]) -> None:
    def read(first: int) -> Any:
        raise LookupError(str(taken))

    ahead = Prefetcher(read, GPU)
    with pytest.raises(LookupError, match="index=3"):
        ahead.take(0, None)
    ahead.close()


@pytest.fixture
def as_it_was() -> Iterator[None]:
    threads, reproducible = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(reproducible)


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("asked", [True, False])
def test_a_run_says_whether_its_kernels_are_repeatable(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    run = small_run(training={"deterministic": asked})
    with join_process_group(RankTask(run, 1, 0, 1, 0, 1, 0, "127.0.0.1", free_port(), "127.0.0.1", None, None)):
        assert torch.are_deterministic_algorithms_enabled() is asked
        # Attention's backward pass on a GPU takes warnings for leave to add up in any order.
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert ("CUBLAS_WORKSPACE_CONFIG" in device.os.environ) is asked
