"""Mount paths without mount namespaces: *paths by environment* (pure).

A pod here is an ordinary process and sees the machine's file system, so nothing can be mounted at `/data` for it
alone. Instead each of its texts that is a mount path, or lies below one, is rewritten to the real directory: values of
environment variables, words of command and args, also the part after the `=` of `--option=/data/x`, and the working
directory. A program that takes its paths from its environment or arguments, as containers should, notices nothing. One
that has `/data` written in its code, or in the middle of a shell script, does not find it. `readOnly` is not enforced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path


class PathMap:
    """Rewrites texts from a container's paths to real ones."""

    def __init__(self, mounts: Mapping[str, Path]) -> None:
        cleaned = {mount.rstrip("/") or "/": real for mount, real in mounts.items()}
        # The deepest mount wins, as with nested mounts.
        self._mounts = sorted(cleaned.items(), key=lambda item: -len(item[0]))

    def text(self, value: str) -> str:
        """One value: itself a path, or `name=path`."""
        mapped = self.path(value)
        if mapped is not None:
            return str(mapped)
        name, equals, rest = value.partition("=")
        mapped = self.path(rest) if equals else None
        return f"{name}={mapped}" if mapped is not None else value

    def path(self, value: str) -> Path | None:
        """The real path of one that lies in a mount, or None."""
        for mount, real in self._mounts:
            if value == mount or value.startswith(mount.rstrip("/") + "/"):
                return real / value[len(mount) :].lstrip("/")
        return None

    def texts(self, values: Iterable[str]) -> list[str]:
        """Several values."""
        return [self.text(value) for value in values]
