"""The parent of one container's processes: a small separate process that uses only the standard library.

It does what a container runtime's shim and a PID namespace do together:

- the container's main process gets its own session, and dies with the shim (PR_SET_PDEATHSIG);
- every descendant stays a descendant of the shim, even if it daemonizes itself (PR_SET_CHILD_SUBREAPER), and is killed
  when the main process ends or when the agent requests it;
- the agent has the other end of a socket. If the agent dies, the shim reads end of file and kills everything. A signal
  on the parent's death would not suffice, because it reaches one process and not its children.

The agent's first line is a ProcessSpec as JSON, later ones `{"signal": N}` or `{"kill": true}`. The shim responds with
`{"pid": N}` or `{"error": TEXT}`, and at the end with `{"code": N}`. With `log`, output goes there in the format of the
Container Runtime Interface: `TIME STREAM F|P TEXT`. Otherwise it goes to the shim's own streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import termios
import time
import warnings  # noqa: F401 - `os.execvpe` imports it, which is too late in a container with a root of its own
from typing import Any

from meshwright_local.nodeagent.runtime import mount_namespace

_PDEATHSIG, _CHILD_SUBREAPER = 1, 36
_LONGEST_LINE = 16384
_CHUNK = 65536


class Shim:
    """One container: its main process, its streams and its agent."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._main = 0
        self._status: int | None = None
        self._ending = False
        self._poll = select.poll()
        self._streams: dict[int, LogStream] = {}

    def run(self) -> None:
        """Start the container, handle commands, and return when every process is reaped."""
        line = self._control.makefile("rb").readline()
        # Unbuffered from here on: poll does not see buffered data.
        commands = self._control.makefile("rb", buffering=0)
        wake, wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_in)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        _prctl(_CHILD_SUBREAPER, 1)
        try:
            if line:
                self._start(json.loads(line))
        except OSError as error:
            self._send_message({"error": error.strerror})
        if not self._main:
            return
        self._send_message({"pid": self._main})
        for descriptor in (self._control.fileno(), wake, *self._streams):
            self._poll.register(descriptor, select.POLLIN)
        while not (self._reap() and self._status is not None and not self._streams):
            if self._ending:
                _kill_all()
            # While ending, check again soon: a process may have been forked during the last round.
            for descriptor, _ in self._poll.poll(20 if self._ending else None):
                if descriptor == wake:
                    os.read(wake, _CHUNK)
                elif descriptor == self._control.fileno():
                    self._execute_command(commands.readline())
                else:
                    self._copy(descriptor)
        self._send_message({"code": os.waitstatus_to_exitcode(self._status)})

    def _start(self, spec: dict[str, Any]) -> None:
        outputs: dict[int, int] = {}
        if spec["log"]:
            log = os.open(spec["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            for number, name in ((1, "stdout"), (2, "stderr")):
                reader, outputs[number] = os.pipe2(os.O_CLOEXEC)
                self._streams[reader] = LogStream(name, log)
            outputs[0] = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        failure, failure_in = os.pipe2(os.O_CLOEXEC)
        parent, child = os.getpid(), os.fork()
        if child == 0:
            try:
                _exec_container(spec, outputs, parent)
            except OSError as error:
                os.write(failure_in, f"{error.filename or spec['argv'][0]}: {error.strerror}".encode())
            finally:
                os._exit(127)
        for descriptor in (failure_in, *outputs.values()):
            os.close(descriptor)
        if not spec["log"]:
            # Only the container may have the streams open, or their readers would never see end of file.
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
        why = os.read(failure, _CHUNK).decode()
        os.close(failure)
        if why:
            raise OSError(0, why)
        self._main = child

    def _execute_command(self, line: bytes) -> None:
        """Execute a command of the agent. An empty one means that the agent is gone."""
        command = json.loads(line or b'{"kill": true}')
        if "kill" in command:
            self._ending = True
        elif self._status is None:
            os.kill(self._main, command["signal"])
        if not line:
            self._poll.unregister(self._control.fileno())

    def _copy(self, descriptor: int) -> None:
        data = os.read(descriptor, _CHUNK)
        self._streams[descriptor].feed(data)
        if not data:
            self._poll.unregister(descriptor)
            os.close(descriptor)
            del self._streams[descriptor]

    def _reap(self) -> bool:
        """Reap ended processes. Return True if no child, and therefore no descendant, is left."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._main:
                    self._status = ended[1]
                    self._ending = True
            return False
        return True

    def _send_message(self, message: dict[str, object]) -> None:
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps(message).encode() + b"\n")


class LogStream:
    """Splits one output stream into lines of the log. Lines longer than 16 KiB are written in parts."""

    def __init__(self, name: str, log: int) -> None:
        self._name = name
        self._log = log
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Write complete lines. Empty data is the end of the stream, and writes the rest."""
        moment = time.time_ns()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment // 10**9))
        head = f"{stamp}.{moment % 10**9:09d}Z {self._name} ".encode()
        *lines, self._rest = (self._rest + data).split(b"\n")
        out = [head + b"F " + line + b"\n" for line in lines]
        if len(self._rest) >= _LONGEST_LINE or (self._rest and not data):
            out.append(head + (b"P " if data else b"F ") + self._rest + b"\n")
            self._rest = b""
        with contextlib.suppress(OSError):
            # A full disk must not stop the container.
            os.write(self._log, b"".join(out))


def descendants(root: int) -> list[int]:
    """Return every process below `root`, read from /proc."""
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
            # The command's name may contain ")": the fields begin after the last one.
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found = list(children.get(root, ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def _exec_container(spec: dict[str, Any], outputs: dict[int, int], parent: int) -> None:
    """Become the container's main process, in the child. Does not return."""
    os.setsid()
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    for number, descriptor in outputs.items():
        os.dup2(descriptor, number)
    if spec["tty"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # Python ignores these signals, and ignored signals stay ignored across exec.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    os.umask(0o022)
    if spec["view"]:
        mount_namespace.enter(mount_namespace.FileSystemView(*spec["view"]))
        # Container runtimes do the same in the container's own file system.
        os.makedirs(spec["cwd"], exist_ok=True)
    elif spec["join"]:
        mount_namespace.join(spec["join"])
    os.chdir(spec["cwd"])
    os.execvpe(spec["argv"][0], spec["argv"], spec["env"])


def _kill_all() -> None:
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
