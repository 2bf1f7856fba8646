"""What a pod sees of its host: files below a root, limits, and CPUs. Tests pass other roots and functions."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

CAP_IPC_LOCK = 14
"""Number of the capability (capability.h)."""
LIBRARY_DIRECTORIES = ("usr/lib", "usr/lib64", "lib", "lib64", "usr/local/lib", "usr/local/lib64", "opt/amazon")


def _memlock() -> int:
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def _size_of(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize


@dataclass(frozen=True, slots=True)
class Host:
    """Files below `root`, and what the kernel allows this process."""

    root: Path = Path("/")
    memlock: Callable[[], int] = _memlock
    """Limit of locked memory in bytes; `resource.RLIM_INFINITY` if there is none."""
    allowed_cpus: Callable[[], set[int]] = field(default=lambda: os.sched_getaffinity(0))
    """CPUs that this process may use."""
    size_of: Callable[[Path], int] = _size_of
    """Bytes of the file system at a path."""

    def path(self, name: str) -> Path:
        """A path of the host."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """The content of a file without surrounding blanks. Empty if it cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return ""

    def glob(self, pattern: str) -> list[Path]:
        """The paths that match a pattern, sorted."""
        try:
            return sorted(self.root.glob(pattern.lstrip("/")))
        except OSError:
            return []

    def has_library(self, pattern: str, more: Iterable[str] = ()) -> bool:
        """Whether a shared library exists in the usual directories, or in `more`, with one directory below them."""
        directories = [*LIBRARY_DIRECTORIES, *(name.lstrip("/") for name in more if name)]
        return any(self.glob(f"{name}/{depth}{pattern}") for name in directories for depth in ("", "*/", "*/*/"))

    def gpus(self) -> list[str]:
        """PCI addresses of the pod's NVIDIA GPUs that the driver shows, in the order of their addresses."""
        return [path.name for path in self.glob("/proc/driver/nvidia/gpus/*")]

    @property
    def may_lock_memory(self) -> bool:
        """Whether the process has the capability IPC_LOCK, so that the limit of locked memory does not apply to it."""
        lines = self.text("/proc/self/status").splitlines()
        effective = next((line.partition(":")[2].strip() for line in lines if line.startswith("CapEff:")), "0")
        try:
            return bool(int(effective, 16) >> CAP_IPC_LOCK & 1)
        except ValueError:
            return False

    @property
    def has_gpus(self) -> bool:
        """Whether the pod has device files of GPUs."""
        return bool(self.glob("/dev/nvidia[0-9]*") or self.glob("/dev/dri/renderD*") and self.glob("/dev/kfd"))


def parse_cpu_list(text: str) -> set[int]:
    """The CPUs of a list such as `0-3,8`. Parts that cannot be read are left out."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (last or first).isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return found
