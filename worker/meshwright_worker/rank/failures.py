"""Whose fault a rank's failure looks like, and what to tell people about it.

When one rank dies, every other rank fails within milliseconds with a broken connection. The root cause is the one
failure that is not of that kind, so each failure is classified where it happens, by what torch, gloo and NCCL say.
"""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Sequence

from meshwright.protocol.messages import FailureKind

_PEER_LOST = re.compile(
    "|".join(
        (
            r"connection (was likely )?closed",
            r"connection reset",
            r"broken pipe",
            r"connection refused",
            r"connectFullMesh failed",
            r"failed to (recv|send|connect)",
            r"(recv|send)Value failed",
            r"socket timeout",
            r"wait timeout after",
            r"timed out (after|waiting)",
            r"network is unreachable|no route to host",
            r"store (is )?not reachable",
            r"ncclRemoteError|ncclSystemError|remote process (has )?exited|communicator was aborted",
        )
    ),
    re.IGNORECASE,
)
# `[rank0]:` is what torch's own exception hook puts before each line.
_EXCEPTION_LINE = re.compile(r"^(?:\[rank\d+\]:\s*)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b.*)$")
MAX_MESSAGE = 1500


class InvalidRunError(ValueError):
    """A run that cannot be executed. The message names each field and the nearest values that work."""


def classify_output(text: str) -> FailureKind:
    """`PeerLost` if the text is what a broken connection to another rank leaves behind, else `Error`."""
    return FailureKind.PEER_LOST if _PEER_LOST.search(text) else FailureKind.ERROR


def describe(error: BaseException) -> str:
    """The exception in one paragraph: its type and text, without the stack."""
    return "".join(traceback.format_exception_only(type(error), error)).strip()[:MAX_MESSAGE]


def classify(error: BaseException) -> FailureKind:
    """Whose fault an exception of the training loop is.

    A failed rendezvous or collective surfaces as `RuntimeError`, as one of torch's `Dist*Error` types or as the
    interpreter's `ConnectionError`; other types never speak of a peer, whatever their text.
    """
    if isinstance(error, InvalidRunError):
        return FailureKind.REFUSED
    names = {base.__name__ for base in type(error).__mro__}
    if names & {"RuntimeError", "ConnectionError", "TimeoutError"}:
        return classify_output(describe(error))
    return FailureKind.ERROR


def describe_exit(rank: int, code: int, tail: Sequence[str]) -> str:
    """A process's end for people: code or signal, and the most telling of its last lines of output."""
    if code < 0:
        how = f"rank {rank} was killed by {_signal_name(-code)}"
        if -code == signal.SIGKILL:
            how += " (out of memory, or killed from outside)"
    else:
        how = f"rank {rank} exited with code {code}"
    line = error_line(tail)
    return f"{how}: {line}"[:MAX_MESSAGE] if line else how


def error_line(tail: Sequence[str]) -> str:
    """The last line that names an exception, else the last line that is not blank, else nothing."""
    for line in reversed(tail):
        match = _EXCEPTION_LINE.match(line.strip())
        if match:
            return match.group(1)
    return next((line.strip() for line in reversed(tail) if line.strip()), "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
