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
from pathlib import Path

from meshwright.data.errors import DataError, is_storage_fault
from meshwright.figures import format_number
from meshwright.printable import printable
from meshwright.protocol.messages import FailureKind
from meshwright_worker.checkpoint_errors import (
    CheckpointMismatchError,
    ForeignCheckpointError,
    ResumeSourceError,
    UnusableStoreError,
)

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
            r"milliseconds before timing out",
            r"NCCL operations have failed or timed out",
            r"failure detected by watchdog|collective (operation )?timeout",
            r"network is unreachable|no route to host",
            r"store (is )?not reachable",
            r"ncclRemoteError|ncclSystemError|remote process (has )?exited|communicator was aborted",
            r"got completion from peer|failed to check the .should dump. flag",
        )
    ),
    re.IGNORECASE,
)
_OWN_FAULT = re.compile(
    "|".join(
        (
            r"shared memory segment|no space left on device",
            r"out of memory|cannot allocate memory",
            r"illegal memory access|misaligned address|device-side assert|unspecified launch failure",
            r"uncorrectable|ECC error|hardware error",
            r"ncclInvalidUsage|ncclInvalidArgument|duplicate GPU",
            r"unhandled cuda error|ncclUnhandledCudaError|no kernel image",
        )
    ),
    re.IGNORECASE,
)
"""Errors of this rank, its device or its pod, which NCCL also reports as failed communication."""
# torch's exception hook prefixes each line with `[rank0]:`.
_EXCEPTION_LINE = re.compile(r"^(?:\[rank\d+\]:\s*)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b.*)$")
MAX_MESSAGE = 1500
_CGROUP = Path("/sys/fs/cgroup")
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
"""Exit codes of shells, and of `command_guard`, for a command that cannot be started."""
_INVALID_COMMAND = re.compile(
    r"(SyntaxError|IndentationError|ModuleNotFoundError|meshwright_worker\.custom_module\.plan\.PlanError)\b"
    r"|.*: can't open file "
)


class PretrainedError(ValueError):
    """Pretrained weights that cannot be used. The message names the file or field and the fix."""


class InvalidRunError(ValueError):
    """A run that cannot be executed. The message names each field and the nearest values that work."""


class WentBackError(ArithmeticError):
    """An anomaly of the loss made training go back: the latest checkpoint is now an older one, from which the next mesh
    generation continues.
    """


class NodeFaultError(RuntimeError):
    """The node of this rank computes wrong results, computes far too slowly, or cannot exchange data."""


def classify_output(text: str) -> FailureKind:
    """Return `PeerLost` if the text is the error of a broken connection to another rank, else `Error`.

    NCCL's watchdog aborts each rank whose collective takes too long: it waits for another rank.
    """
    if _OWN_FAULT.search(text):
        return FailureKind.ERROR
    return FailureKind.PEER_LOST if _PEER_LOST.search(text) else FailureKind.ERROR


def describe(error: BaseException) -> str:
    """Describe the exception in one paragraph: its type and message, without the stack.

    Errors of Meshwright have messages for users, who need no name of a class.
    torch's `CheckpointException` has a stack for each rank in its message. The last line of it, which names the error,
    comes first, so that a message that is cut still says what happened.
    """
    if type(error).__module__.startswith("meshwright") and str(error):
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    else:
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
    lines = text.splitlines()
    if any(line.lstrip().startswith("Traceback (most recent call last)") for line in lines):
        raised = error_line([line for line in lines if _EXCEPTION_LINE.match(line.strip())][1:])
        text = f"{raised}\n{text}" if raised else text
    # The agent could not read a message with a file's name that is not UTF-8.
    return printable(text[:MAX_MESSAGE])


def classify(error: BaseException, *, training: bool = False) -> FailureKind:
    """Classify an exception of a rank. `training` says whether it had begun to train in this generation.

    Data, weights, checkpoints of other runs and stores that cannot be used at a start stay so until somebody changes
    them, the image or the spec, unless their storage does not answer.

    A failed rendezvous or collective surfaces as `RuntimeError`, as one of torch's `Dist*Error` types or as the
    interpreter's `ConnectionError`. Other types are never classified as a lost peer, whatever their message.
    """
    if isinstance(error, InvalidRunError):
        return FailureKind.REJECTED
    if isinstance(error, ForeignCheckpointError | CheckpointMismatchError):
        return FailureKind.CHECKPOINT_INCOMPATIBLE
    if isinstance(error, ResumeSourceError | UnusableStoreError):
        return FailureKind.INVALID_INPUT
    if isinstance(error, DataError | PretrainedError) and not training and not is_storage_fault(error):
        return FailureKind.INVALID_INPUT
    if isinstance(error, WentBackError):
        return FailureKind.WENT_BACK
    if isinstance(error, NodeFaultError):
        return FailureKind.NODE_FAULT
    names = {base.__name__ for base in type(error).__mro__}
    if names & {"RuntimeError", "ConnectionError", "TimeoutError"}:
        return classify_output(describe(error))
    return FailureKind.ERROR


def is_invalid_command(code: int, tail: Sequence[str]) -> bool:
    """Whether a user's command cannot run as it is: it does not exist, or its code or `ParallelPlan` is wrong."""
    if code in (_NOT_EXECUTABLE, _NOT_FOUND):
        return True
    return code > 0 and bool(_INVALID_COMMAND.match(error_line(tail)))


def describe_exit(rank: int, code: int, tail: Sequence[str]) -> str:
    """Describe the exit of a process: code or signal, and the most informative of its last lines of output."""
    if code < 0:
        how = f"rank {rank} was killed by {_signal_name(-code)}"
        if -code == signal.SIGKILL:
            how += _why_killed()
        elif -code == signal.SIGBUS:
            how += _WHY_BUS
    else:
        how = f"rank {rank} exited with code {code}"
    line = error_line(tail)
    return f"{how}: {line}"[:MAX_MESSAGE] if line else how


_WHY_BUS = (
    " (a mapped file became shorter or cannot be read any more, such as a shard of `data` or a volume that went away, "
    "or /dev/shm is full)"
)


def _why_killed() -> str:
    """Why the kernel or somebody else killed a rank, by the events of this pod's cgroup."""
    if _oom_kills() <= _OOM_KILLS_BEFORE:
        return " (out of memory, or killed from outside)"
    limit = _cgroup_value("memory.max") or _cgroup_value("memory/memory.limit_in_bytes")
    size = f", limit {format_number(int(limit) / 2**30)}Gi" if limit.isdigit() else ""
    return f": out of memory{size}: raise `workers.resources.memory`"


def _oom_kills() -> int:
    """How many processes of this pod's cgroup (v1 or v2) the kernel has killed because memory ran out."""
    events = _cgroup_value("memory.events") or _cgroup_value("memory/memory.oom_control")
    counts = dict(line.split() for line in events.splitlines() if len(line.split()) == 2)  # noqa: PLR2004
    return int(counts.get("oom_kill", 0))


def _cgroup_value(name: str) -> str:
    try:
        return (_CGROUP / name).read_text().strip()
    except OSError:
        return ""


_OOM_KILLS_BEFORE = _oom_kills()


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
