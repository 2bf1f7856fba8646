"""Copy the bundle to a volume of the pod: the init container of `runtime.agent: Injected`.

    python -I -m meshwright_worker.bundle.install DIRECTORY

Copying again, after a restart of the init container, replaces what is there.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def install(target: Path) -> None:
    """Copy the bundle of this interpreter to a directory."""
    for name in ("bin", "lib"):
        shutil.rmtree(target / name, ignore_errors=True)
        shutil.copytree(Path(sys.prefix) / name, target / name, symlinks=True)


def main(arguments: list[str]) -> int:
    """Copy the bundle; returns the exit code."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -I -m meshwright_worker.bundle.install DIRECTORY\n")
        return 2
    try:
        install(Path(arguments[0]))
    except (OSError, shutil.Error) as error:
        sys.stderr.write(f"the agent cannot be copied to {arguments[0]}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
