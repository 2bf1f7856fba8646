"""Planning processes of the operators in a test process, forked from one that has imported the planner once.

The imports take 0.7 s of CPU time, and a hundred operators start in the tests. `test_planning_service` and the
end-to-end tests start planning processes as an operator does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import struct
import subprocess
import sys
import traceback
from asyncio.streams import FlowControlMixin
from pathlib import Path

from meshwright_operator.planning import planning_process

ROOT = Path(__file__).parents[2]
NUMBER = struct.Struct("i")


class News(asyncio.Protocol):
    """What is heard of a process: its pid, and its exit status. No task reads it: kopf cancels tasks when it stops."""

    def __init__(self) -> None:
        self._data = b""
        self.numbers = [asyncio.get_running_loop().create_future() for _ in range(2)]

    def data_received(self, data: bytes) -> None:
        self._data += data
        for place, number in enumerate(self.numbers):
            part = self._data[place * NUMBER.size : (place + 1) * NUMBER.size]
            if len(part) == NUMBER.size and not number.done():
                number.set_result(NUMBER.unpack(part)[0])


class ForkedProcess:
    """What the operator uses of an `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader, news: News) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._news = news

    @property
    def returncode(self) -> int | None:
        """The exit status. None while it runs."""
        return self._news.numbers[1].result() if self._news.numbers[1].done() else None

    def send_signal(self, number: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def communicate(self) -> None:
        """Wait for the end of its output and for its own."""
        self.stdin.close()
        await self.stdout.read()
        await asyncio.shield(self._news.numbers[1])


async def start_process() -> ForkedProcess:
    """In place of `process_client.start_process`."""
    requests, to_process = os.pipe()
    from_process, answers = os.pipe()
    told, news = os.pipe()
    theirs = [requests, answers, news]
    try:
        socket.send_fds(template(), [b"\0"], theirs)
    finally:
        for descriptor in theirs:
            os.close(descriptor)
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(FlowControlMixin, os.fdopen(to_process, "wb", buffering=0))
    stdin, stdout = asyncio.StreamWriter(transport, protocol, None, loop), await reader(from_process)
    _, heard = await loop.connect_read_pipe(News, os.fdopen(told, "rb", buffering=0))
    pid = await asyncio.shield(heard.numbers[0])
    return ForkedProcess(pid, stdin, stdout, heard)


async def reader(descriptor: int) -> asyncio.StreamReader:
    found = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(found), pipe)
    return found


@functools.cache
def template() -> socket.socket:
    """The socket of this test process's template, which ends when it is closed: with the test process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return ours


def main(channel: socket.socket) -> None:
    """Fork a planning process for each message: descriptors of its input, its output, and where its process id and
    then its exit code are written.
    """
    news: dict[int, int] = {}

    def reap(*_: object) -> None:
        for pid in list(news):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                tell(news[pid], os.waitstatus_to_exitcode(status))
                os.close(news.pop(pid))

    signal.signal(signal.SIGCHLD, reap)
    while descriptors := socket.recv_fds(channel, 1, 3)[1]:
        requests, answers, told = descriptors
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if not pid:
            serve(requests, answers)
        news[pid] = told
        tell(told, pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.close(requests)
        os.close(answers)


def tell(descriptor: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the operator's event loop has ended
        os.write(descriptor, NUMBER.pack(number))


def serve(requests: int, answers: int) -> None:
    """Be a planning process."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.dup2(requests, 0)
        os.dup2(answers, 1)
        os.closerange(3, 1024)
        sys.stdin = os.fdopen(0)
        planning_process.main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
