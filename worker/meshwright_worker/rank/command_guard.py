"""The guard process of a rank that runs the user's command: it starts the command, forwards SIGTERM and cleans up.

    python -m meshwright_worker.rank.command_guard COMMAND...

Standard input is a pipe that only the agent holds open. End of file means that the rank must be killed at once, because
the agent closed the pipe or died. Every process that the command started (data loader workers, a shell's children,
daemons) is killed too: the guard adopts orphaned descendants and exits last. Its exit status is the command's. It
imports only the standard library, because one guard starts per rank.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import subprocess
import sys
from pathlib import Path

from meshwright_worker.rank.process_lifetime import become_subreaper, die_with_parent

# Exit codes that shells use for a command that cannot be started.
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127


def main(command: list[str]) -> int:
    """Run `command` until it exits or standard input ends. Return its status as `subprocess` does."""
    guard = os.getpid()
    become_subreaper()
    try:
        # This process has one thread, so running Python between fork and exec is safe.
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: die_with_parent(guard))
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]!r}: {error.strerror}\n")
        return EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE
    signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    selector.register(os.pidfd_open(child.pid), selectors.EVENT_READ)
    selector.select()
    if child.poll() is None:
        child.kill()
    status = child.wait()
    kill_orphans()
    return status


def kill_orphans() -> None:
    """Kill and reap every child of this process, and every orphan that it adopts meanwhile, until none is left."""
    while children := _children():
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def _children() -> list[int]:
    # A child stays a zombie until it is reaped here, so its pid is valid until then.
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN: daemons end with the pod
        return []


def exit_like(status: int) -> None:
    """Exit as the command did: with its code, or by its signal."""
    if status >= 0:
        sys.exit(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)


if __name__ == "__main__":
    exit_like(main(sys.argv[1:]))
