"""This process's rank among processes that torchrun, or a job's `runtime.command`, started."""

from __future__ import annotations

import os
import socket
from typing import TypeVar

from meshwright.protocol.run_config import Run
from meshwright_worker.rank.task import RankTask

RunT = TypeVar("RunT", bound=Run)

_USES_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def task_from_environment(run: RunT) -> RankTask[RunT]:
    """Build this rank's task from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    Raises:
        ValueError: they are not set, or the number of ranks does not match the run's layout.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    needed = run.layout.world_size
    start = f"start the script with `torchrun --nproc-per-node {needed}`, or as `runtime.command` of a job"
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be set: {start}")
    if world != needed:
        raise ValueError(
            f"{run.layout} needs {needed} ranks, but there are {world}: {start} with `replicas` {run.data_parallel}, "
            "and the degrees of `parallelism` that the run has"
        )
    rank = int(os.environ["RANK"])
    # torchrun's own store listens on MASTER_PORT itself. In a job nothing does, and no other port is reserved.
    own_store = int("TORCHELASTIC_RUN_ID" in os.environ and os.environ.get(_USES_AGENT_STORE) != "False")
    return RankTask(
        run=run,
        generation=1,
        rank=rank,
        world_size=world,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        worker=0,
        master_address=os.environ["MASTER_ADDR"],
        master_port=int(os.environ["MASTER_PORT"]) + own_store,
        pod_address=_own_address(os.environ["MASTER_ADDR"]),
        checkpoint_dir=None,
        data_dir=None,
    )


def _own_address(master: str) -> str:
    """Return the address of this machine's interface toward the master. Sends no packet."""
    family, _, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
