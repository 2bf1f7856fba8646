"""Images for pods of the embedded cluster: root directories that contain nothing of Meshwright but the agent's own."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from meshwright_worker.bundle import contents, elf

TRAINER = Path(__file__).parent / "static_trainer.c"
PATH = "/usr/local/bin:/usr/bin:/bin"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*")


def agent_image(images: Path, name: str) -> None:
    """The agent's image, as its Dockerfile makes it."""
    root = images / name / "rootfs"
    subprocess.run([sys.executable, "-m", "meshwright_worker.bundle", str(root)], check=True, stdout=subprocess.DEVNULL)


def static_image(images: Path, name: str) -> None:
    """An empty root directory, apart from a program that needs no library."""
    root = images / name / "rootfs"
    root.mkdir(parents=True)
    subprocess.run(["gcc", "-static", "-O1", "-o", root / "trainer", TRAINER], check=True)


def torch_image(images: Path, name: str) -> None:
    """Python and torch, and no package of Meshwright. Files of torch are links to those of this installation."""
    root = images / name / "rootfs"
    executable = contents.copy_interpreter(root / "usr" / "local")
    packages = root / "usr" / "local" / "lib" / contents.python_name() / "site-packages"
    for distribution in _required("torch"):
        for path in importlib.metadata.files(distribution) or ():
            source = Path(str(path.locate()))
            if ".." not in path.parts and source.is_file():
                _link(source, packages / path)
    files = [executable, *(path for path in root.rglob("*.so*") if elf.is_elf(path))]
    loader = elf.interpreter(executable)
    for library in {*elf.libraries(files).values(), loader}:
        if library.is_relative_to(root):
            continue
        place = root / str(library).lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            shutil.copy2(os.path.realpath(library), place)
    (root / "tmp").mkdir(mode=0o1777)
    config = {"config": {"Env": [f"PATH={PATH}", "LANG=C.UTF-8"], "WorkingDir": "/tmp"}}
    (images / name / "config.json").write_text(json.dumps(config))


def _link(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, place)
    except OSError:  # on another file system
        shutil.copy2(source, place)


def _required(name: str) -> Iterable[str]:
    """A distribution and those that it requires, as far as they are installed."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        one = waiting.pop()
        try:
            requirements = importlib.metadata.requires(one) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        if one not in found:
            found.add(one)
            waiting += [m[0] for text in requirements if "extra ==" not in text and (m := _NAME.match(text))]
    return sorted(found)
