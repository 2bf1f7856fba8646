"""What the bundle consists of: the running interpreter, its standard library, and the packages that the agent imports.

    bin/python          the interpreter
    lib/*.so*           its shared libraries, with the C library and the dynamic loader
    lib/python3.11/     the standard library; site-packages has the agent

Nothing is taken from the image in which it runs. The agent imports neither torch nor numpy, so neither is part of it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from meshwright_worker.bundle import elf

DISTRIBUTIONS = ("aiohttp", "prometheus-client", "pydantic", "regex")
"""What the agent imports, apart from Meshwright; what these require is added."""
PACKAGES = ("meshwright", "meshwright_worker")

_LEFT_OUT = frozenset(
    {"ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "dist-packages", "test", "tests", "tkinter"}
    | {"turtledemo"}
)
"""Directories of the standard library."""
_EXTENSIONS_LEFT_OUT = re.compile(r"_tkinter|_test|_curses|_dbm|_gdbm|_sqlite3|_xx|xx|readline|nis|ossaudiodev|spwd")
"""Extension modules whose libraries the agent does not need."""
_REQUIREMENT = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)")


def python_name() -> str:
    """The name of the interpreter and of its library directory, such as `python3.11`."""
    return f"python{sys.version_info.major}.{sys.version_info.minor}"


def copy_interpreter(target: Path) -> Path:
    """Copy the interpreter that runs this, and its standard library; return the copy of the executable."""
    executable = target / "bin" / python_name()
    executable.parent.mkdir(parents=True)
    shutil.copy2(os.path.realpath(sys.executable), executable)
    (executable.parent / "python").symlink_to(executable.name)
    shutil.copytree(sysconfig.get_path("stdlib"), target / "lib" / python_name(), ignore=_ignored)
    return executable


def copy_packages(target: Path) -> None:
    """Copy Meshwright and what its agent requires to `target`, a directory of packages."""
    target.mkdir(parents=True, exist_ok=True)
    for name in sorted(_required(DISTRIBUTIONS)):
        for path in importlib.metadata.files(name) or ():
            source, place = Path(str(path.locate())), target / path
            # Scripts are outside the directory of packages.
            if ".." not in path.parts and source.is_file():
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, place)
    for name in PACKAGES:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            raise elf.ToolError(f"the package {name} is not installed")
        shutil.copytree(Path(found.origin).parent, target / name, ignore=_other_bytecode)


def copy_libraries(target: Path, executable: Path) -> Path:
    """Copy every shared library to `target`, let every file find them there, and return the dynamic loader's copy."""
    loader = elf.interpreter(executable)
    files = [executable, *_elf_files(target)]
    for name, real in {**elf.libraries(files), loader.name: loader}.items():
        shutil.copy2(os.path.realpath(real), target / name)
        (target / name).chmod(0o755)
    elf.find_libraries_in(executable, target)
    for path in _elf_files(target):
        if elf.has_search_path(path):
            elf.find_libraries_in(path, target)
    return target / loader.name


def _elf_files(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.rglob("*.so*")) if elf.is_elf(path)]


def _required(names: tuple[str, ...]) -> set[str]:
    """The distributions and what they require, without extras and what other versions of Python need."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            if name in names:
                raise elf.ToolError(f"the package {name} is not installed") from None
            continue
        found.add(name)
        waiting += list(_names(requirements))
    return found


def _names(requirements: list[str]) -> Iterator[str]:
    for requirement in requirements:
        text, _, marker = requirement.partition(";")
        if "extra ==" not in marker and (match := _REQUIREMENT.match(text)):
            yield re.sub(r"[-_.]+", "-", match[1]).lower()


def _ignored(directory: str, names: list[str]) -> set[str]:
    ignored = _other_bytecode(directory, names)
    if Path(directory).name == "lib-dynload":
        ignored |= {name for name in names if _EXTENSIONS_LEFT_OUT.match(name)}
    return ignored | {name for name in names if name in _LEFT_OUT or name.startswith("config-")}


def _other_bytecode(directory: str, names: list[str]) -> set[str]:
    """Bytecode for other interpreters and other levels of optimization."""
    if Path(directory).name != "__pycache__":
        return set()
    return {name for name in names if not name.endswith(f".{sys.implementation.cache_tag}.pyc")}
