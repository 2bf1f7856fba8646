"""Rules for the repository as a whole: its directories, its modules and its files."""

from __future__ import annotations

import operator
import subprocess
import sys
import sysconfig
import tokenize
from pathlib import Path

import pytest

from tests.conflicts import ROOT, conflict_markers, repository_files
from tests.conflicts import main as conflicts_main


@pytest.mark.parametrize("directory", ["operator", "worker"])
def test_the_directories_of_packages_are_not_packages(directory: str) -> None:
    assert (ROOT / directory).is_dir()
    assert not (ROOT / directory / "__init__.py").exists(), f"{directory}/ would hide a module of that name"


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
    return [p for directory in ("meshwright", "operator", "worker") for p in sorted((ROOT / directory).rglob("*.py"))]


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_has_a_docstring(path: Path) -> None:
    with tokenize.open(path) as file:
        tokens = tokenize.generate_tokens(file.readline)
        first = next(token for token in tokens if token.type not in (tokenize.COMMENT, tokenize.NL))
    assert first.type == tokenize.STRING, "begin the module with what it is and why"


def test_no_file_has_conflict_markers() -> None:
    files = repository_files()
    assert ROOT / "README.md" in files
    assert conflict_markers(files) == []


def conflict(middle: str = "") -> str:
    """Text with a conflict, written so that this file has none."""
    return f"a\n{'<' * 7} HEAD\nb\n{middle}{'=' * 7}\nc\n{'>' * 7} branch\n"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (conflict(), [2, 6]),
        (conflict(f"{'|' * 7} base\nd\n"), [2, 4, 8]),
        (conflict().replace("\n", "\r\n"), [2, 6]),
        (f"a heading\n{'=' * 7}\n", []),
        (f"text with {'<' * 7} inside\n{'<' * 8} and eight of them\n", []),
        (f"binary \0\n{conflict()}", []),
    ],
)
def test_conflict_markers_are_found(tmp_path: Path, text: str, lines: list[int]) -> None:
    path = tmp_path / "file"
    path.write_bytes(text.encode())
    assert conflict_markers([path]) == [f"{path}:{line}" for line in lines]
    assert (conflicts_main([str(path)]) == 1) == bool(lines)


def test_without_git_all_files_but_the_ignored_count(tmp_path: Path) -> None:
    for name in ("README.md", "docs/page.md", ".venv/lib/module.py", "docs/build/page.html"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text", encoding="utf-8")
    (tmp_path / ".gitignore").write_text("# made by tools\n.venv/\nbuild/\n", encoding="utf-8")
    names = [path.relative_to(tmp_path).as_posix() for path in repository_files(tmp_path)]
    assert names == [".gitignore", "README.md", "docs/page.md"]


@pytest.mark.parametrize("package", ["meshwright.api", "meshwright.planner.placement", "meshwright.protocol.messages"])
def test_the_shared_core_imports_nothing_heavy(package: str) -> None:
    heavy = "torch kopf kubernetes aiohttp yaml numpy"
    code = f"import sys, {package}; sys.exit(' '.join(m for m in '{heavy}'.split() if m in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stderr.strip() == ""
