"""Finds conflict markers that a merge left: `python -m tests.conflicts [FILE ...]`.

Without arguments it reads all files of the repository. The pre-commit hooks and tests/test_repository.py use it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The middle marker, `=======`, is not searched for: it can underline a heading, and the other two always come with it.
MARKER = re.compile(rb"^(?:<{7}|>{7}|\|{7})(?: |\r?$)", re.MULTILINE)


def repository_files(root: Path = ROOT) -> list[Path]:
    """The files that git tracks under `root`; without git, all files that `.gitignore` does not exclude."""
    command = ["git", "-C", str(root), "ls-files", "-z"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        names = []
    tracked = [root / name for name in names if name]
    return sorted(path for path in tracked if path.is_file()) or _walk(root)


def _walk(root: Path) -> list[Path]:
    ignore_file = root / ".gitignore"
    lines = ignore_file.read_text(encoding="utf-8").splitlines() if ignore_file.is_file() else []
    patterns = [".git", *(line.rstrip("/") for line in lines if line and not line.startswith("#"))]

    def excluded(path: Path) -> bool:
        parts = path.relative_to(root).parts
        return any(fnmatch(part, pattern) for part in parts for pattern in patterns)

    return sorted(path for path in root.rglob("*") if path.is_file() and not excluded(path))


def conflict_markers(paths: Iterable[Path]) -> list[str]:
    """The markers in these files, as `FILE:LINE`. Binary files, which contain a zero byte, are skipped."""
    markers = []
    for path in paths:
        content = path.read_bytes()
        if b"\0" not in content:
            lines = [content.count(b"\n", 0, match.start()) + 1 for match in MARKER.finditer(content)]
            markers += [f"{path}:{line}" for line in lines]
    return markers


def main(arguments: list[str]) -> int:
    """Print every marker; the exit code is 1 if there is one."""
    markers = conflict_markers([Path(name) for name in arguments] or repository_files())
    for place in markers:
        print(f"{place}: conflict marker: merge the two versions and delete the markers")
    return 1 if markers else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
