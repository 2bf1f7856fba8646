"""What ruff, mypy and import-linter say of the whole tree: as tests, so that they run beside the others."""

import subprocess
import sys
import tomllib
from collections import defaultdict
from graphlib import TopologicalSorter
from os.path import commonprefix
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "command",
    ["ruff check .", "ruff format --check .", "lint-imports", pytest.param("mypy", marks=pytest.mark.slow)],
)
def test_nothing_is_found(command):
    program, *arguments = command.split()
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_neither_files_nor_folders_import_each_other():
    """Imports for type checking count: what names each other is read together or not at all."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    graph = grimp.build_graph(*settings["root_packages"], cache_dir=None)
    files = {file: graph.find_modules_directly_imported_by(file) for file in graph.modules}
    TopologicalSorter(files).prepare()  # raises CycleError, which names the files
    folders = defaultdict(lambda: defaultdict(set))
    """Folder -> what is in it -> what of the same folder that imports."""
    for file, others in files.items():
        for other in others:
            own, theirs = file.split("."), other.split(".")
            shared = len(commonprefix([own, theirs]))
            if shared < min(len(own), len(theirs)):
                folders[".".join(own[:shared])][own[shared]].add(theirs[shared])
    for imports in folders.values():
        TopologicalSorter(imports).prepare()
