"""The process that plans and writes a rank's part of checkpoints, so that the rank's interpreter has nothing to do.

It is forked from the rank before that has threads. Requests are functions with their arguments. Tensors travel as
places in shared memory, whose descriptors are sent once. The process exits with the rank: the kernel kills it, however
the rank exits. If the process dies first, the rank's thread does the work itself from then on.

    rank -> process   pickle of (segments in use, new segments), pickle of a request, descriptors of the new segments
    process -> rank   pickle of (result, None) or (None, error)

Each message has its length in front.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import os
import pickle
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar

import torch

from meshwright_worker.checkpoint.shared_memory import Segment, SharedMemory, SharedTensor
from meshwright_worker.rank.process_lifetime import die_with_parent

log = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_LENGTH = struct.Struct("<Q")
_MAX_DESCRIPTORS = 250
"""The kernel sends at most 253 at once. A rank needs one, and another if tensors are added later."""
_REAP_SECONDS = 5.0


class Executor(Protocol):
    """Runs the parts of a save that need no other rank."""

    @property
    def memory(self) -> SharedMemory | None:
        """Where tensors have to be; None if it does not matter."""

    def run(self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """The function's result. Raises what it raises."""


class ThisProcess:
    """Runs them here: in the thread that saves."""

    memory = None

    def run(self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """See `Executor.run`."""
        return function(*args, **kwargs)


class WriterProcess:
    """Runs them in the process of `start_writer`, one after the other, and here once that has died."""

    def __init__(self, process: int, channel: socket.socket) -> None:
        self.process = process
        self._channel = channel
        self._lock = threading.Lock()
        self._sent: set[int] = set()
        self._alive = True

    def executor(self) -> Executor:
        """For the saves of one mesh generation, whose staged copy is in memory of its own."""
        self._forget()
        return _InWriter(self) if self._alive else ThisProcess()

    def run(self, memory: SharedMemory, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """See `Executor.run`. If the process does not answer, the function runs here."""
        with self._lock:
            answer = self._answer(memory, function, args, kwargs) if self._alive else None
        if answer is None:
            return function(*args, **kwargs)
        result, error = answer
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def close(self) -> None:
        """Kill the process, and reap it unless storage that does not answer keeps it. A rank calls it before it exits:
        then the fork server reaps it later.
        """
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            if self._alive:
                os.kill(self.process, signal.SIGKILL)
            deadline = time.monotonic() + _REAP_SECONDS
            # A thread that waits for an answer reaps it too.
            while self._alive and os.waitpid(self.process, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
                time.sleep(0.001)
        self._alive = False

    def _answer(self, memory: SharedMemory, *request: Any) -> tuple[Any, BaseException | None] | None:
        """What the process answers; None if it is dead."""
        new = [segment for segment in memory.segments if segment.number not in self._sent]
        content = io.BytesIO()
        in_use = [segment.number for segment in memory.segments]
        pickle.dump((in_use, [(segment.number, segment.size) for segment in new]), content)
        _Pickler(content, memory.segments).dump(request)
        try:
            _send(self._channel, content.getvalue(), [segment.descriptor for segment in new])
            self._sent = set(in_use)  # the process forgets the others
            answer, _ = _receive(self._channel)
        except (OSError, EOFError):
            code = self._end()
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            log.warning("the process that writes checkpoints %s: this rank writes them in a thread from now on", how)
            return None
        return pickle.loads(answer)  # type: ignore[no-any-return] # noqa: S301 - of our own child

    def _forget(self) -> None:
        """Let the process unmap the memory of an earlier generation, unless it still writes from there."""
        if self._lock.acquire(blocking=False):
            try:
                if self._alive and self._sent:
                    self._answer(SharedMemory(), _nothing, (), {})
            finally:
                self._lock.release()

    def _end(self) -> int:
        self._alive = False
        self._channel.close()
        try:
            os.kill(self.process, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        except (ProcessLookupError, ChildProcessError):
            return 0


class _InWriter:
    def __init__(self, writer: WriterProcess) -> None:
        self._writer = writer
        self.memory: SharedMemory | None = SharedMemory()

    def run(self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        assert self.memory is not None
        return self._writer.run(self.memory, function, *args, **kwargs)


def start_writer(unused: Iterable[int] = ()) -> WriterProcess:
    """Fork the process. The caller has one thread, the one that lives as long as it does.

    Args:
        unused: descriptors of this process that the new one must not keep open.
    """
    rank = os.getpid()
    ours, theirs = socket.socketpair()
    process = os.fork()
    if process == 0:
        try:
            die_with_parent(rank)
            ours.close()
            for descriptor in unused:
                os.close(descriptor)
            _serve(theirs)
        finally:
            os._exit(1)
    theirs.close()
    return WriterProcess(process, ours)


_writer: WriterProcess | None = None


def set_writer(writer: WriterProcess | None) -> None:
    """Let the saves of this process use that writer."""
    global _writer  # noqa: PLW0603 - a process has at most one
    _writer = writer


def executor_of_this_process() -> Executor:
    """In the writer of this process if it has one that is alive, otherwise here."""
    return _writer.executor() if _writer is not None else ThisProcess()


def _serve(channel: socket.socket) -> NoReturn:
    """Serve requests until the rank closes its end."""
    # Fatal signals would be reported to a descriptor of the rank.
    faulthandler.disable()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # A fork has none of the threads that torch's parallel loops would wait for.
    torch.set_num_threads(1)
    segments: dict[int, Segment] = {}
    while True:
        try:
            data, descriptors = _receive(channel)
        except (OSError, EOFError):
            os._exit(0)
        _send(channel, _run(data, descriptors, segments), [])


def _run(data: bytes, descriptors: list[int], segments: dict[int, Segment]) -> bytes:
    try:
        content = io.BytesIO(data)
        in_use, new = pickle.load(content)  # noqa: S301 - of the rank that this process is a part of
        for number in segments.keys() - in_use:
            del segments[number]
        for (number, size), descriptor in zip(new, descriptors, strict=True):
            segments[number] = Segment(size, descriptor)
        function, args, kwargs = _Unpickler(content, segments).load()
        return pickle.dumps((function(*args, **kwargs), None))
    except BaseException as error:
        try:
            return pickle.dumps((None, error))
        except Exception:
            return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))


class _Pickler(pickle.Pickler):
    """Pickles tensors as their places in shared memory."""

    def __init__(self, file: io.BytesIO, segments: list[Segment]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._segments = segments

    def persistent_id(self, obj: Any) -> SharedTensor | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if not obj.numel():
            return SharedTensor(-1, 0, obj.dtype, obj.shape)
        for segment in self._segments:
            if (place := segment.locate(obj)) is not None:
                return place
        raise ValueError("a tensor of a checkpoint is not in the memory that is shared with its writer")


class _Unpickler(pickle.Unpickler):
    """Maps these places again."""

    def __init__(self, file: io.BytesIO, segments: dict[int, Segment]) -> None:
        super().__init__(file)
        self._segments = segments

    def persistent_load(self, pid: SharedTensor) -> torch.Tensor:
        if pid.segment < 0:
            return torch.empty(pid.shape, dtype=pid.dtype)
        return self._segments[pid.segment].tensor(pid.offset, pid.dtype, pid.shape)


def _nothing() -> None:
    """A request that only says which segments are in use."""


def _send(channel: socket.socket, content: bytes, descriptors: list[int]) -> None:
    socket.send_fds(channel, [_LENGTH.pack(len(content))], descriptors)
    channel.sendall(content)


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """A message with its descriptors.

    Raises:
        EOFError, OSError: the other side is gone.
    """
    head, descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, _MAX_DESCRIPTORS, socket.MSG_WAITALL)
    if len(head) != _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    content = bytearray()
    while len(content) < length:
        block = channel.recv(min(length - len(content), 1 << 20))
        if not block:
            raise EOFError
        content += block
    return bytes(content), list(descriptors)
