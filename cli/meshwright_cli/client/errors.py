"""Errors of the client. Each message names what failed, why, and what to do; each class has an exit code.

`exit_code` is what the command line ends with. `docs/cli.md` lists the codes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of commands that use a cluster."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    NO_ACCESS = 4
    TIMED_OUT = 5
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.DONE: "The command succeeded. For a command that waits: the job reached the state.",
    ExitCode.FAILED: "The job failed or cannot reach the state, the API server rejected the request, or `doctor` found "
    "an error.",
    ExitCode.USAGE: "Wrong usage: an unknown option, a missing argument, or an invalid value.",
    ExitCode.NOT_FOUND: "The job, rank or worker does not exist, or the cluster has no CustomResourceDefinition of "
    "Meshwright.",
    ExitCode.NO_ACCESS: "The cluster cannot be reached, the credentials are invalid, or you may not do this.",
    ExitCode.TIMED_OUT: "The time-out passed. The job continues.",
    ExitCode.INTERRUPTED: "Ctrl-C ended the command. The job continues.",
}


class MeshwrightError(Exception):
    """The base of all errors of the client."""

    exit_code = ExitCode.FAILED


class ConfigurationError(MeshwrightError):
    """There is no usable kubeconfig, or the context does not exist."""

    exit_code = ExitCode.NO_ACCESS


class UnreachableError(MeshwrightError):
    """The API server does not answer, or its certificate is not trusted."""

    exit_code = ExitCode.NO_ACCESS


class UnauthorizedError(MeshwrightError):
    """The API server does not accept the credentials."""

    exit_code = ExitCode.NO_ACCESS


class ForbiddenError(MeshwrightError):
    """The user may not do this. `verb` and `resource` are what a role must allow."""

    exit_code = ExitCode.NO_ACCESS

    def __init__(self, message: str, verb: str = "", resource: str = "", namespace: str | None = None) -> None:
        super().__init__(message)
        self.verb = verb
        self.resource = resource
        self.namespace = namespace


class NotFoundError(MeshwrightError):
    """The object does not exist. `nearest` are existing names that resemble its name."""

    exit_code = ExitCode.NOT_FOUND

    def __init__(self, message: str, nearest: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.nearest = nearest


class DefinitionMissingError(MeshwrightError):
    """The cluster has no CustomResourceDefinition of Meshwright."""

    exit_code = ExitCode.NOT_FOUND


class RejectedError(MeshwrightError):
    """The API server rejected the request, such as an invalid manifest. `status` is the HTTP status code."""

    def __init__(self, message: str, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class ManifestError(MeshwrightError):
    """A manifest cannot be read. The message names the file and the field."""

    exit_code = ExitCode.USAGE


class JobFailedError(MeshwrightError):
    """A job failed, or was deleted, before it reached the state that was waited for."""


class WaitTimeoutError(MeshwrightError):
    """The job did not reach the state in time."""

    exit_code = ExitCode.TIMED_OUT


def nearest(name: str, names: Iterable[str]) -> tuple[str, ...]:
    """At most three of the names that resemble `name`, the most similar first."""
    return tuple(difflib.get_close_matches(name, sorted(set(names)), n=3, cutoff=0.5))


def suggestion(name: str, names: Iterable[str]) -> str:
    """`: did you mean ...?`, or an empty string."""
    found = nearest(name, names)
    return f": did you mean {' or '.join(f'`{one}`' for one in found)}?" if found else ""
