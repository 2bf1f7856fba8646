"""What ruff, mypy and import-linter say of the whole tree: as tests, so that they run beside the others."""

import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
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


def test_no_module_imports_itself_through_others():
    """Imports for type checking count: files that name each other are read together or not at all."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    graph = grimp.build_graph(*settings["root_packages"], cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules
