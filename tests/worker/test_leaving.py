"""A rank leaves its generation: whatever waits for a peer comes back at once."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any, cast

import pytest

from meshwright_worker.in_memory.copies import HostCopies
from meshwright_worker.in_memory.generation import Generation
from meshwright_worker.in_memory.leaving import Connections
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import tasks_of
from tests.patience import patient


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, far


def waiting_in(connection: socket.socket) -> threading.Thread:
    thread = threading.Thread(target=connection.recv, args=(1,), daemon=True)
    thread.start()
    return thread


def generation() -> Generation:
    task = tasks_of(small_run(), port=1)[0]
    return Generation(task, cast(Any, None), cast(Any, None), None, HostCopies(), lambda: None)


@pytest.mark.parametrize("formed", [True, False])
def test_threads_beside_training_come_back_also_if_training_has_ended_by_itself(formed: bool) -> None:
    """Such as those that write a checkpoint: they wait for ranks that live, and that wait for the lost one."""
    left = generation()
    near, far = connected()
    if formed:
        left.formed()
    thread = waiting_in(near)
    assert left.leave() is None
    thread.join(patient(5))
    assert not thread.is_alive()
    assert far.recv(1) == b"", "the peer comes back too"
    near.close()
    far.close()


def test_connections_from_before_and_after_the_generation_s_groups_stay() -> None:
    before = connected()
    connections = Connections()
    own = connected()
    connections.close()
    after = connected()
    assert connections.cut() == 2
    for near, far in (before, after):
        near.send(b"x")
        assert far.recv(1) == b"x"
    assert own[0].recv(1) == b""
    reused = own[0].fileno()
    for one in own:
        one.close()
    later = connected()  # it may have the number of a descriptor that is closed
    assert os.fstat(later[0].fileno()), reused
    assert connections.cut() == 0
    for near, far in (before, after, later):
        near.close()
        far.close()
