"""What the repository's own shape promises."""

from __future__ import annotations

import ast
import operator
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 400


@pytest.mark.parametrize("folder", ["operator", "worker"])
def test_the_folders_of_packages_are_no_packages(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists(), f"{folder}/ would hide a module of that name"


def test_operator_is_the_standard_library_here_and_from_the_root() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import operator; print(operator.__file__)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    assert Path(found).resolve().is_relative_to(standard)
    assert Path(operator.__file__).resolve().is_relative_to(standard)


def python_files() -> list[Path]:
    """Every Python file of the product."""
    return [p for folder in ("meshwright", "operator", "worker") for p in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is_and_stays_readable(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)), "a module begins with what it is and why"
    assert len(text.splitlines()) <= MAX_FILE_LINES, f"more than {MAX_FILE_LINES} lines: split it by idea"


@pytest.mark.parametrize("package", ["meshwright.api", "meshwright.planner.placement", "meshwright.protocol"])
def test_the_shared_core_imports_nothing_heavy(package: str) -> None:
    heavy = "torch kopf kubernetes aiohttp yaml numpy"
    code = f"import sys, {package}; sys.exit(' '.join(m for m in '{heavy}'.split() if m in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stderr.strip() == ""
