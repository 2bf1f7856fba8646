"""A home directory and a user name for processes of a pod whose user id is not in the image's list of users.

Pods run with any user id, and containers then get `HOME=/`, which they cannot write to, and no user name. Python's
`getpass`, inductor, Triton and Hugging Face libraries need both for their caches. What the pod's environment says, by
`workers.env` or the image, stays.

This module imports only the standard library, as `server_process` says.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

USER = "meshwright"
_CACHES = {
    "XDG_CACHE_HOME": ".cache",
    "TORCHINDUCTOR_CACHE_DIR": ".cache/torchinductor",
    "TRITON_CACHE_DIR": ".cache/triton",
    "HF_HOME": ".cache/huggingface",
}
"""Variable of a cache -> its directory below the home directory."""


def user_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the environment of this process lacks. Makes the directory that they name.

    Without any directory that it may write to, it names none: only libraries that write would fail.
    """
    found = {} if _has_name(environment) else {"USER": USER, "LOGNAME": USER}
    home = environment.get("HOME", "")
    if home not in ("", "/") and _is_writable(home):
        return found
    own = _own_directory(environment)
    if own is None:
        return found
    caches = {name: str(own / below) for name, below in _CACHES.items() if name not in environment}
    # A home directory that somebody chose may have files to read.
    return {**found, **caches, **({} if home not in ("", "/") and Path(home).is_dir() else {"HOME": str(own)})}


def _has_name(environment: Mapping[str, str]) -> bool:
    """Whether `getpass.getuser` finds a name."""
    if any(environment.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME")):
        return True
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return True


def _is_writable(directory: str) -> bool:
    return Path(directory).is_dir() and os.access(directory, os.W_OK | os.X_OK)


def temporary_directories(environment: Mapping[str, str]) -> list[str]:
    """The directories for temporary files that this process may write to. An image may have none but `/dev/shm`."""
    places = (environment.get("TMPDIR"), "/tmp", "/var/tmp", "/dev/shm")  # noqa: S108
    return [place for place in places if place and _is_writable(place)]


def _own_directory(environment: Mapping[str, str]) -> Path | None:
    """A directory of this user alone, always the same. None if there is no place for it."""
    for parent in temporary_directories(environment):
        own = Path(parent) / f"{USER}-home-{os.getuid()}"
        try:
            own.mkdir(mode=0o700, exist_ok=True)
            state = own.lstat()
        except OSError:
            continue
        if own.is_dir() and not own.is_symlink() and state.st_uid == os.getuid():
            return own
    return None
