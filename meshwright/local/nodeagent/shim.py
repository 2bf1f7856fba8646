"""The parent of one container's processes. Run as a script of its own: `python -I -S shim.py FD`.

It does what a container runtime's shim and a PID namespace do together, with nothing but the standard library:

- the container's main process gets a session of its own, and dies with the shim (PR_SET_PDEATHSIG);
- every descendant stays a descendant of the shim, also one that daemonised itself (PR_SET_CHILD_SUBREAPER), and is
  killed when the main process ends or when the agent says so;
- the agent holds the other end of socket FD. When the agent dies, however, the socket reads end of file and everything
  is killed: a signal on the parent's death would not do, because it reaches one process and not its children.

The agent's first line is `{"argv", "env", "cwd", "log", "tty"}`, later ones `{"signal": N}` or `{"kill": true}`. The
shim answers `{"pid": N}` or `{"error": TEXT}`, and at the end `{"code": N, "signal": N}`. With `log`, output goes there
in the format of the Container Runtime Interface: `TIME STREAM F|P TEXT`. Without, it goes to the shim's own streams.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import sys
import termios
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_LINE = 16384


class LogStream:
    """Cuts one output stream into lines of the log. Longer lines than 16 KiB are written in parts."""

    def __init__(self, name: str, log: int) -> None:
        self._name = name
        self._log = log
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Write what is complete; empty data is the end and writes the rest."""
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
    """Every process below `root`, read from /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    # The command's name may hold anything, also ")"; the fields begin after the last one.
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def kill_all() -> None:
    """Send SIGKILL to every descendant."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


class Shim:
    """One container: its main process, its streams and its agent."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._rest = b""
        self._main = 0
        self._status: int | None = None
        self._ending = False
        self._streams: dict[int, LogStream] = {}

    def run(self) -> None:
        """Start, serve, and end with everything reaped."""
        spec = json.loads(self._first_line())
        wake, wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_in)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            self._start(spec, libc)
        except OSError as error:
            self._say({"error": f"{spec['argv'][0]}: {error.strerror}"})
            return
        self._say({"pid": self._main})
        poll = select.poll()
        for descriptor in (self._control.fileno(), wake, *self._streams):
            poll.register(descriptor, select.POLLIN)
        childless = False
        while not (childless and self._status is not None and not self._streams):
            # While ending, look again soon: a process may have been born during the last round.
            for descriptor, _ in poll.poll(20 if self._ending else None):
                self._ready(descriptor, wake, poll)
            childless = self._reap()
            if self._ending and not childless:
                kill_all()
        self._report()

    def _first_line(self) -> bytes:
        while b"\n" not in self._rest:
            data = self._control.recv(65536)
            if not data:
                sys.exit(1)
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _start(self, spec: dict[str, object], libc: ctypes.CDLL) -> None:
        outputs: dict[int, int] = {}
        if spec["log"]:
            log = os.open(str(spec["log"]), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            for number, name in ((1, "stdout"), (2, "stderr")):
                reader, outputs[number] = os.pipe2(os.O_CLOEXEC)
                self._streams[reader] = LogStream(name, log)
            outputs[0] = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        reader, writer = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        self._main = os.fork()
        if self._main == 0:
            try:
                self._become(spec, outputs, libc, parent)
            except OSError as error:
                os.write(writer, str(error.errno).encode())
            finally:
                os._exit(127)
        os.close(writer)
        for descriptor in outputs.values():
            os.close(descriptor)
        if not spec["log"]:
            # Only the container may hold the streams, or their readers would never see the end.
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
        failure = os.read(reader, 16)
        os.close(reader)
        if failure:
            raise OSError(int(failure), os.strerror(int(failure)))

    @staticmethod
    def _become(spec: dict[str, object], outputs: dict[int, int], libc: ctypes.CDLL, parent: int) -> None:
        """In the child: turn into the container's main process. Does not return."""
        os.setsid()
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(127)
        for number, descriptor in outputs.items():
            os.dup2(descriptor, number)
        if spec["tty"]:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        # Python ignores these, and what is ignored stays ignored across exec.
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored, signal.SIG_DFL)
        os.umask(0o022)
        os.chdir(str(spec["cwd"]))
        argv, env = spec["argv"], spec["env"]
        if isinstance(argv, list) and isinstance(env, dict):
            os.execvpe(argv[0], argv, env)

    def _ready(self, descriptor: int, wake: int, poll: select.poll) -> None:
        if descriptor == wake:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
        elif descriptor == self._control.fileno():
            if not self._listen():
                poll.unregister(descriptor)
        else:
            data = os.read(descriptor, 65536)
            self._streams[descriptor].feed(data)
            if not data:
                poll.unregister(descriptor)
                os.close(descriptor)
                del self._streams[descriptor]

    def _listen(self) -> bool:
        """Obey the agent; False when it is gone."""
        try:
            data = self._control.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._ending = True
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if order.get("kill"):
                self._ending = True
            elif self._status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._main, order["signal"])
        return True

    def _reap(self) -> bool:
        """Collect what ended; True when no child, and so no descendant, is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self._main:
                self._status = status
                self._ending = True

    def _report(self) -> None:
        status = self._status or 0
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = 128 + number if number else os.WEXITSTATUS(status)
        self._say({"code": code, "signal": number})

    def _say(self, message: dict[str, object]) -> None:
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    Shim(socket.socket(fileno=int(sys.argv[1]))).run()
