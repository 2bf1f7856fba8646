"""Processes that die with their parent: a rank must never outlive its agent, however the agent exits."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Make the kernel send SIGKILL to this process when its parent, `parent`, exits.

    The kernel watches the parent's *thread*, so the parent must start this process from its main thread. If the parent
    exited before this call, this process exits now.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    """Adopt every descendant whose parent exits, as process 1 otherwise would."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
