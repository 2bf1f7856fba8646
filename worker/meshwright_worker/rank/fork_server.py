"""The process that ranks are forked from: it imports torch once, while the pod still waits for its gang.

A rank that imports torch itself takes seconds to start, a fork of this process tenths of a second. The fork server of
`multiprocessing` uses pickle, leaves a socket directory behind when its parent is killed, and lives as long as any
rank. This one uses JSON over an inherited socket, and no process outlives the agent: the kernel kills the server when
the agent dies, and each rank when the server dies.

    agent -> server   {"task": ..., "environment": {...}} + descriptors (events, output, stacks, commands)
                      {"store": PORT, "ranks": N} for the store of a generation that recovers in memory
    server -> agent   {"ready": SECONDS} once, {"pid": N} per request in order, {"exited": N, "code": C} per exit,
                      {"failed": TEXT} when the server exits with an error
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    # Importing torch creates millions of objects, none of which is garbage: looking for some takes a fifth of the time.
    gc.disable()

import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from meshwright.protocol.run_config import NativeRun
from meshwright_worker.rank import rank_main
from meshwright_worker.rank.commands import TASK
from meshwright_worker.rank.failures import describe
from meshwright_worker.rank.process_lifetime import become_subreaper, die_with_parent
from meshwright_worker.rank.task import RankTask

MAX_MESSAGE = 1 << 17
DESCRIPTORS = 4
"""Descriptors that come with the request for a rank."""


def encode_request(task: RankTask[NativeRun], environment: Mapping[str, str]) -> bytes:
    """Encode a fork request.

    Raises:
        ValueError: it is longer than the server reads.
    """
    request = json.dumps({"task": TASK.dump_python(task, mode="json"), "environment": dict(environment)}).encode()
    if len(request) > MAX_MESSAGE:
        raise ValueError(f"the task of rank {task.rank} takes {len(request)} bytes, more than {MAX_MESSAGE}")
    return request


def encode_store_request(port: int, ranks: int) -> bytes:
    """Encode a request to fork a process that keeps a generation's store."""
    return json.dumps({"store": port, "ranks": ranks}).encode()


def decode_request(data: bytes) -> tuple[RankTask[NativeRun], dict[str, str]]:
    """Decode a fork request into its task and environment."""
    request = json.loads(data)
    return TASK.validate_python(request["task"]), request["environment"]


class ForkServer:
    """Forks ranks on request and reports how each exited. Single-threaded, so that a fork copies no held lock."""

    def __init__(self, channel: socket.socket, module: str) -> None:
        self._channel = channel
        self._module = module
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Preload, then serve until the agent closes its end of the socket."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write)
        # The writers of ranks that were killed are reaped here.
        become_subreaper()
        started = time.monotonic()
        self._preload()
        self._send({"ready": time.monotonic() - started})
        selector = selectors.DefaultSelector()
        selector.register(self._channel, selectors.EVENT_READ)
        selector.register(self._wake_read, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                self._reap()
            if self._channel.fileno() in ready and not self._serve_one():
                return

    def _preload(self) -> None:
        try:
            importlib.import_module(self._module).preload()
        except ImportError as error:
            # An image for the user's command needs no torch. A rank of the built-in runtime fails at its own import.
            sys.stderr.write(f"the training runtime cannot be preloaded: {error}\n")
        # Collecting garbage in a rank would write to, and so copy, pages that all ranks share.
        gc.collect()
        gc.freeze()
        gc.enable()

    def _preload_for(self, request: bytes) -> None:
        module = sys.modules.get(self._module)
        if module is not None:
            module.preload_for(decode_request(request)[0].run)
            gc.freeze()

    def _serve_one(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._channel, MAX_MESSAGE, DESCRIPTORS)
        if not data:
            return False
        if descriptors:
            self._preload_for(data)
        # The rank's own handler must be installed before SIGTERM can arrive: the inherited setting ignores it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run_child(server, data, descriptors)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        for descriptor in descriptors:
            os.close(descriptor)
        self._send({"pid": pid})
        return True

    def _run_child(self, server: int, request: bytes, descriptors: list[int]) -> NoReturn:
        try:
            die_with_parent(server)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._channel.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            if not descriptors:
                _keep_store(**json.loads(request))
            task, environment = decode_request(request)
            events, output, stacks, commands = descriptors
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            rank_main.run(self._module, task, environment, events, stacks, commands)
        finally:
            os._exit(rank_main.EXIT_FAILED)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._send({"exited": pid, "code": os.waitstatus_to_exitcode(status)})

    def _send(self, message: dict[str, Any]) -> None:
        self._channel.send(json.dumps(message).encode())


def _keep_store(store: int, ranks: int) -> NoReturn:
    """Keep the store of a generation on this port, until this process is killed.

    A rank's own store would be gone with the rank: others that just join would try to reach it for minutes.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # noqa: PLC0415 - only images with torch

    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kept = TCPStore("localhost", store, ranks, is_master=True, wait_for_workers=False)
    while kept is not None:
        signal.pause()
    os._exit(rank_main.EXIT_DONE)


def main(arguments: list[str]) -> None:
    """Run `fork_server DESCRIPTOR AGENT_PID MODULE`; only the agent starts it."""
    descriptor, agent, module = arguments
    die_with_parent(int(agent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = socket.socket(fileno=int(descriptor))
    try:
        ForkServer(channel, module).run()
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(0)
    except Exception as error:
        channel.send(json.dumps({"failed": describe(error)}).encode())
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
