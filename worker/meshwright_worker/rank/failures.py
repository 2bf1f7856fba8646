"""Classifies a rank's failure by its likely cause, and describes it for users.

When one rank dies, every other rank fails within milliseconds with a broken connection. The root cause is the one
failure of another kind. Each failure is therefore classified where it happens, by the error messages of torch, gloo and
NCCL.
"""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Sequence

from meshwright.protocol.messages import FailureKind
from meshwright_worker.checkpoint.errors import CheckpointMismatchError, ForeignCheckpointError

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
# torch's exception hook prefixes each line with `[rank0]:`.
_EXCEPTION_LINE = re.compile(r"^(?:\[rank\d+\]:\s*)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b.*)$")
MAX_MESSAGE = 1500


class InvalidRunError(ValueError):
    """A run that cannot be executed. The message names each field and the nearest values that work."""


def classify_output(text: str) -> FailureKind:
    """Return `PeerLost` if the text is the error of a broken connection to another rank, else `Error`."""
    return FailureKind.PEER_LOST if _PEER_LOST.search(text) else FailureKind.ERROR


def describe(error: BaseException) -> str:
    """Describe the exception in one paragraph: its type and message, without the stack."""
    return "".join(traceback.format_exception_only(type(error), error)).strip()[:MAX_MESSAGE]


def classify(error: BaseException) -> FailureKind:
    """Classify an exception of the training loop.

    A failed rendezvous or collective surfaces as `RuntimeError`, as one of torch's `Dist*Error` types or as the
    interpreter's `ConnectionError`. Other types are never classified as a lost peer, whatever their message.
    """
    if isinstance(error, InvalidRunError):
        return FailureKind.REJECTED
    if isinstance(error, ForeignCheckpointError | CheckpointMismatchError):
        return FailureKind.CHECKPOINT_INCOMPATIBLE
    names = {base.__name__ for base in type(error).__mro__}
    if names & {"RuntimeError", "ConnectionError", "TimeoutError"}:
        return classify_output(describe(error))
    return FailureKind.ERROR


def describe_exit(rank: int, code: int, tail: Sequence[str]) -> str:
    """Describe the exit of a process: code or signal, and the most informative of its last lines of output."""
    if code < 0:
        how = f"rank {rank} was killed by {_signal_name(-code)}"
        if -code == signal.SIGKILL:
            how += " (out of memory, or killed from outside)"
    else:
        how = f"rank {rank} exited with code {code}"
    line = error_line(tail)
    return f"{how}: {line}"[:MAX_MESSAGE] if line else how


def error_line(tail: Sequence[str]) -> str:
    """Return the last line that names an exception, else the last line that is not blank, else an empty string."""
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
