"""Assemble the agent that pods with `runtime.agent: Injected` get.

    python -m meshwright_worker.bundle DIRECTORY

DIRECTORY becomes the root of the agent's image: the bundle is below it at the path that it has in every pod, because an
executable names its dynamic loader by an absolute path. Everything else in the bundle is found relative to it.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

from meshwright.api.labels import AGENT_MOUNT
from meshwright_worker.bundle import contents, elf

_CHECK = """
import json, os, platform, sys
import meshwright_worker.agent.agent, meshwright_worker.bundle.install, meshwright_worker.rank.command_guard
files = [getattr(module, "__file__", None) for module in sys.modules.values()]
files += [line.split()[-1] for line in open("/proc/self/maps") if ".so" in line]
outside = sorted({os.path.realpath(path) for path in files if path and not path.startswith(("<", "[", sys.argv[1]))})
heavy = sorted({"torch", "numpy"} & set(sys.modules))
print(json.dumps({"outside": outside, "heavy": heavy, "glibc": platform.libc_ver()[1]}))
"""


def assemble(root: Path) -> str:
    """Write the bundle below `root`, which must not have one, and try it. Returns a line about it.

    Raises:
        ToolError: a tool or a package is missing, or the bundle uses files outside it.
    """
    target = root / AGENT_MOUNT.lstrip("/")
    if target.exists():
        raise elf.ToolError(f"{target} already exists: remove it, or choose another directory")
    executable = contents.copy_interpreter(target)
    contents.copy_packages(target / "lib" / contents.python_name() / "site-packages")
    loader = contents.copy_libraries(target / "lib", executable)
    elf.set_interpreter(executable, f"{AGENT_MOUNT}/lib/{loader.name}")
    glibc = _try(target, executable, loader)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file() and not path.is_symlink())
    what = f"Python {platform.python_version()}, glibc {glibc}, {platform.machine()}"
    return f"{target}: {what}, {size / 2**20:.0f} MiB"


def _try(target: Path, executable: Path, loader: Path) -> str:
    """Import the agent with the bundle's own files; return the version of its C library."""
    command = [str(loader), str(executable), "-I", "-c", _CHECK, str(target.resolve())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": "/nonexistent"})
    if done.returncode:
        raise elf.ToolError(f"the bundle does not run: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    for problem in ("outside", "heavy"):
        if found[problem]:
            raise elf.ToolError(f"the agent must not use {', '.join(found[problem][:5])}")
    return str(found["glibc"])


def main(arguments: list[str]) -> int:
    """Assemble the bundle; returns the exit code."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m meshwright_worker.bundle DIRECTORY\n")
        return 2
    try:
        line = assemble(Path(arguments[0]).resolve())
    except (elf.ToolError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
